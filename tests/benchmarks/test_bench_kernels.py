"""Kernel benchmarks: peers that do not run, the reference for errors, and results of partial runs."""

import json
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import brute_force

from benchmarks.kernels import bench_kernels as bench
from benchmarks.kernels.bench_kernels import H, exact_rows, flash_rows, rising
from kernels_pallas.prefill.softmax import _SLACK


def test_a_peer_that_fails_has_a_row_that_says_why(tmp_path):
    # The library is absent, and PyTorch may be absent too.
    (row,) = flash_rows(tmp_path / "absent.so", "H=128", [1.0], {"tensor": 1.0}, tokens=1024, window=512)
    assert row["name"] == "flash-attention-3 H=128"
    assert "Error: " in row["refused"]
    assert not list(flash_rows(None, "H=128", [1.0], {"tensor": 1.0}, tokens=1024))


def test_the_process_of_the_peer_has_no_jax():
    command = "import sys, benchmarks.kernels.flash_attention_3; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_rows_of_a_window_without_sinks_are_those_of_jax():
    S, window = 40, 8
    q, k, v = (jax.random.normal(jax.random.key(i), (2, S, heads, H)) for i, heads in enumerate((4, 2, 2)))
    expected = jax.nn.dot_product_attention(
        q, k, v, scale=H**-0.5, is_causal=True, local_window_size=(window - 1, 0), implementation="xla"
    )
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    found = exact_rows(q, k[..., :0], v[..., :0], list(range(S)), (k, v), 0, window)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_truth_of_decoding_is_that_of_the_kernels_tests():
    # The reference covers a ring, whose slots it finds, and all heads of the first and the last row.
    (B, S, N, K, R, Z), near = (3, 40, 4, 2, 32, 64), {"sinks": 2, "window": 8}

    def draw(seed, *shape):
        return jax.random.normal(jax.random.key(seed), shape)

    q, k, v = draw(0, B, N, H), draw(1, B, K, S, R), draw(2, B, K, S, Z)
    ring = draw(3, B, K, 16, H - R), draw(4, B, K, 16, H - Z)
    out, _ = brute_force.decode(q, k, v, [S] * B, scale=H**-0.5, ring=ring, **near)
    assert bench.decode_error(lambda *_: jnp.asarray(out), q, k, v, ring, **near) < 1e-5
    out[-1, -1] *= 1.5
    assert bench.decode_error(lambda *_: jnp.asarray(out), q, k, v, ring, **near) == pytest.approx(0.5)


def test_one_wrong_head_of_one_row_shows():
    exact = np.random.default_rng(0).normal(size=(5, 32, 64))
    exact[0] *= 1000  # A row with few keys has large outputs compared with rows with many keys.
    out = exact.copy()
    out[3, 7] *= 1.5
    assert bench.error(out, exact) == pytest.approx(0.5)


def test_queries_have_a_truth_where_later_keys_weigh_much_more():
    q, k = rising(*(jax.random.normal(jax.random.key(i), (1, 1, n, H)) for i, n in enumerate((1, 8192))))
    found = exact_rows(q, k, k, [3], None, 0, 0)
    assert np.isfinite(found).all()


def test_rising_scores_raise_the_maximum_of_every_row_at_every_block():
    # Each block raises it by more than 2^8, the kernel's slack, although numbers are coarse in the last
    # ones.
    def draw(seed, *shape):
        return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)

    q, k = rising(draw(0, 1, 9, 1, 64), draw(1, 1, 1, 16384, 64))

    def exact(x):
        return np.asarray(x.astype(jnp.float32), np.float64)

    scores = exact(q[0, :, 0]) @ exact(k[0, 0]).T * H**-0.5 / np.log(2)
    highest = scores.reshape(9, -1, 64).max(-1)
    assert np.diff(highest, axis=1).min() > _SLACK


def test_a_run_replaces_its_own_sections_alone(tmp_path, monkeypatch):
    for ceiling in ("copy_bandwidth", "matmul_rate"):
        monkeypatch.setattr(bench, ceiling, lambda: 1e12)
    for section in ("decode", "epilogue"):
        monkeypatch.setattr(bench, section, lambda ceilings: iter([{"ms": 1.0}]))
    monkeypatch.setattr(bench, "commit", lambda: "a")
    options = bench.Options(sections=("decode", "epilogue"), results=tmp_path, name="kernels")
    bench.main(options)
    monkeypatch.setattr(bench, "commit", lambda: "b")
    bench.main(replace(options, sections=("epilogue",)))
    path = tmp_path / "kernels.json"
    results = json.loads(path.read_text())["results"]
    assert results["decode"] == [{"ms": 1.0, "commit": "a"}]
    assert results["epilogue"] == [{"ms": 1.0, "commit": "b"}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"config": {"sections": ["decode"]}}))
    with pytest.raises(SystemExit, match=r"other settings \(sections\)"):
        bench.main(options)
