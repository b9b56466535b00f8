"""FlashAttention-3 as a peer of our kernels: PyTorch calls it, in a process that has no JAX.

    python -m benchmarks.kernels.flash_attention_3 --library _vllm_fa3_C.abi3.so --tokens 16384 --kv-heads 8

Prints one line of JSON (`measured`). The library is vLLM's build, which has only the form for prompts of
several lengths: a prompt is called as vLLM calls it, a batch of one.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro


@dataclass(frozen=True)
class Call:
    """Causal attention of one prompt of random bfloat16 numbers.

    library: `vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so` of vLLM's wheel, for the PyTorch that it asks for.
    window: the newest tokens that a query sees, itself among them; None is all.
    """

    library: Path
    tokens: int
    heads: int = 32
    kv_heads: int = 32
    head_dim: int = 128
    window: int | None = None


def measured(call: Call) -> dict[str, Any]:
    """`times` of seven calls after three that warm up, milliseconds by CUDA events; `error` of the worst head
    of sampled rows, relative, against float64; version of `torch`.

    Calls wait in a queue behind each other, so that the host's part in them is not timed.
    """
    import torch

    torch.ops.load_library(str(call.library))
    S = call.tokens
    q, k, v = (
        torch.randn(S, heads, call.head_dim, device="cuda", dtype=torch.bfloat16)
        for heads in (call.heads, call.kv_heads, call.kv_heads)
    )
    attend = attention(call, q, k, v)
    positions = torch.tensor([600, S // 2, S - 1], device=q.device)
    groups, window = call.heads // call.kv_heads, call.window or S
    heads = [
        exact_rows(q[positions, n], k[:, n // groups], v[:, n // groups], positions, window)
        for n in range(call.heads)
    ]
    exact = torch.stack(heads, 1)
    error = ((attend()[positions] - exact).norm(dim=-1) / exact.norm(dim=-1)).max()
    spans = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(7)]
    for _ in range(3):
        attend()
    for start, end in spans:
        start.record()
        attend()
        end.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in spans]
    return {"times": times, "error": error.item(), "torch": torch.__version__}


def attention(call: Call, q: Any, k: Any, v: Any) -> Any:
    """A function of nothing that gives the output [S, N, H]; q [S, N, H], k and v [S, K, H] on the device."""
    import torch

    ends = torch.tensor([0, call.tokens], device=q.device, dtype=torch.int32)
    operator = torch.ops._vllm_fa3_C.fwd.default
    absent = {argument.name: None for argument in operator._schema.arguments}
    given = {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": ends,
        "cu_seqlens_k": ends,
        "max_seqlen_q": call.tokens,
        "max_seqlen_k": call.tokens,
        "softmax_scale": call.head_dim**-0.5,
        "is_causal": True,
        "window_size_left": -1 if call.window is None else call.window - 1,
        "window_size_right": -1 if call.window is None else 0,
        "softcap": 0.0,
        "is_rotary_interleaved": True,
        "num_splits": 0,  # The library chooses.
        "sm_margin": 0,
        "cp_world_size": 1,
        "cp_rank": 0,
    }
    return lambda: operator(**absent | given)[0]


def exact_rows(q: Any, k: Any, v: Any, positions: Any, window: int) -> Any:
    """Float64 output [n, H] of queries [n, H] at `positions` [n] of one head, whose k and v are [S, H]."""
    import torch

    j, t = torch.arange(len(k), device=k.device), positions[:, None]
    scores = q.double() @ k.double().T * q.shape[-1] ** -0.5
    seen = (j <= t) & (j > t - window)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v.double()


if __name__ == "__main__":
    print(json.dumps(measured(tyro.cli(Call, description=__doc__))))
