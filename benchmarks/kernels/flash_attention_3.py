"""FlashAttention-3 as a peer of our kernels, called by PyTorch in a process without JAX.

    python -m benchmarks.kernels.flash_attention_3 --library _vllm_fa3_C.abi3.so --tokens 16384 --kv-heads 8

The script prints one line of JSON (`measure`). The library is vLLM's build, which accepts only prompts of
several lengths. One prompt is passed as a batch of one, as vLLM does.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro


@dataclass(frozen=True)
class Call:
    """Causal attention of one prompt of random bfloat16 numbers.

    Attributes:
      library: `vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so` of vLLM's wheel, with the PyTorch that it requires.
      window: the number of newest tokens that a query sees, itself included; None for all.
    """

    library: Path
    tokens: int
    heads: int = 32
    kv_heads: int = 32
    head_dim: int = 128
    window: int | None = None


def measure(call: Call) -> dict[str, Any]:
    """Time one call and compare it with float64.

    Calls are queued one after another, so that the time of the host is hidden.

    Returns:
      `times` of seven calls after three that warm up, in milliseconds by CUDA events; `error`, the largest
      relative error of a head in sampled rows; the version of `torch`.
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
    """Return a function without arguments that computes the output [S, N, H].

    Args:
      q: queries [S, N, H] on the device.
      k: keys [S, K, H].
      v: values [S, K, H].
    """
    import torch

    ends = torch.tensor([0, call.tokens], device=q.device, dtype=torch.int32)
    operator = torch.ops._vllm_fa3_C.fwd.default
    absent = {argument.name: None for argument in operator._schema.arguments}
    arguments = {
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
        "num_splits": 0,  # Chosen by the library.
        "sm_margin": 0,
        "cp_world_size": 1,
        "cp_rank": 0,
    }
    return lambda: operator(**absent | arguments)[0]


def exact_rows(q: Any, k: Any, v: Any, positions: Any, window: int) -> Any:
    """Return the float64 output [n, H] of queries [n, H] at `positions` [n]; k and v [S, H]."""
    import torch

    j, t = torch.arange(len(k), device=k.device), positions[:, None]
    scores = q.double() @ k.double().T * q.shape[-1] ** -0.5
    seen = (j <= t) & (j > t - window)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v.double()


if __name__ == "__main__":
    print(json.dumps(measure(tyro.cli(Call, description=__doc__))))
