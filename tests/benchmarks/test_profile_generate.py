"""Summaries of traces: kinds of kernels, and the time in which none ran."""

from benchmarks.model.profile_generate import divide_difference, find_kind, summarize
from benchmarks.traces import Kernel, busy_ns


def kernel(name, begin, duration, operation=""):
    return Kernel(name, operation, begin, duration)


def test_time_in_which_several_kernels_run_counts_once():
    kernels = [kernel("a", 0, 10), kernel("b", 4, 2), kernel("c", 8, 6), kernel("d", 20, 5)]
    assert busy_ns(kernels) == 14 + 5
    assert busy_ns([]) == 0


def test_kernels_are_summed_by_kind():
    kernels = [
        kernel("zdc_prefill_mosaic_gpu_kernel", 0, 3e6),
        kernel("nvjet_tst_NNT", 4e6, 2e6),
        kernel("zdc_encode", 6e6, 1e6),
        kernel("loop_add_fusion", 7e6, 1e6, "jit(prefill)/jit(extend_layer)/mlp/add"),
    ]
    found = summarize(kernels)
    assert (found["busy_ms"], found["waits_ms"], found["kernels"]) == (7.0, 1.0, 4)
    assert found["kinds_ms"] == {
        "attention of prompts": 3.0,
        "matrix products": 2.0,
        "rotation and quantization": 1.0,
        "other fusions": 1.0,
    }
    assert found["longest"][0]["part"] == "zdc_prefill_mosaic_gpu_kernel"
    assert found["longest"][-1]["part"] == "loop_add_fusion mlp/add"
    assert found["longest_waits"][0] == {"part": "nvjet_tst_NNT", "ms": 1.0, "kernels": 1}
    assert find_kind(kernel("MemcpyDD", 0, 1)) == "copies"


def test_a_token_costs_what_a_longer_call_has_more():
    one, two = (summarize([kernel("gemm", i, 1e6) for i in range(count)]) for count in (2, 8))
    each = divide_difference(two, one, 3)
    assert (each["kernels"], each["kinds_ms"]) == (2, {"matrix products": 2.0})


def test_a_call_without_kernels_has_no_time():
    nothing = {
        "busy_ms": 0.0,
        "waits_ms": 0,
        "kernels": 0,
        "kinds_ms": {},
        "longest": [],
        "longest_waits": [],
    }
    assert summarize([]) == nothing
