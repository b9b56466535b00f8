"""Schedule of a layer's attention and head exchange on four abstract H200s."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import devices
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zdc_jax.cache.codes.code import Split
from zdc_jax.cache.codes.fitted_integers import FittedIntegers
from zdc_jax.cache.specs.coded_store import CodedStore
from zdc_jax.cache.specs.prefix_ring import PrefixRing
from zdc_jax.parallel.attention import sharded_attention
from zdc_jax.parallel.coded import coded_attention
from zdc_jax.parallel.mesh import SEQUENCE
from zdc_jax.parallel.payload import NATIVE

TOKENS = PartitionSpec(None, SEQUENCE)
KINDS = {
    r" all-to-all-start\(": "start",
    r" all-to-all-done\(": "done",
    r" all-to-all\(": "waited for",
    r" collective-permute-start\(": "halo",
    "__mosaic_gpu_v2|mosaic_gpu": "attention",
}
COMING = ["start", "attention", "done"]
"""One group of heads: the start of its exchange, the attention computed meanwhile, and the end."""


@pytest.mark.aot
@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize("kv_heads", [32, 8])
def test_attention_hides_the_exchange(kv_heads):
    # Near attention overlaps the first group's exchange, and each group's attention overlaps the next
    # exchange. Only one exchange on the way back stays exposed.
    spec = PrefixRing(num_kv_heads=kv_heads, head_dim=128, dtype="bfloat16", R=32, Z=64, sinks=4, window=512)
    assert scheduled(spec, 32) == ["halo", *COMING * 3, "start", "done"]


@pytest.mark.aot
@pytest.mark.usefixtures("on_kernels")
def test_without_near_attention_the_first_group_is_waited_for():
    spec = PrefixRing(num_kv_heads=8, head_dim=128, dtype="bfloat16", R=128, Z=128, sinks=0, window=0)
    assert scheduled(spec, 32) == ["start", "done", *COMING * 2, "waited for"]


@pytest.mark.aot
@pytest.mark.usefixtures("on_kernels")
def test_a_single_kv_head_is_one_group():
    spec = PrefixRing(num_kv_heads=4, head_dim=128, dtype="bfloat16", R=32, Z=64, sinks=4, window=512)
    assert scheduled(spec, 32) == ["halo", *COMING, "attention", "waited for"]


@pytest.mark.aot
@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize("kv_heads", [32, 8])
def test_attention_hides_the_exchange_of_codes(kv_heads):
    # The schedule equals that of keys and values in 16 bits. Kernels quantize keys and values before the
    # exchange and read quantized values after it.
    codes = {"key_code": Split(32, FittedIntegers(6), FittedIntegers(3)), "value_code": FittedIntegers(4)}
    near = {"sinks": 4, "window": 128, "near_code": FittedIntegers(8)}
    spec = CodedStore(num_kv_heads=kv_heads, head_dim=128, dtype="bfloat16", R=128, Z=128, **near, **codes)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        end = jnp.full(1, 32768, jnp.int32)
        how: Any = {"scale": 0.1, "implementation": "pallas", "formats": NATIVE}
        return coded_attention(q, k, v, end, None, spec=spec, **how)[0]

    assert scheduled(spec, 32, attend) == ["halo", *COMING * 3, "start", "done"]


def scheduled(
    spec: PrefixRing | CodedStore, num_heads: int, attend: Callable[..., jax.Array] | None = None
) -> list[str]:
    """Return the parts of the exchange and our kernels, in the order of the compiled program."""
    mesh = Mesh(np.array(devices(4)), (SEQUENCE,))
    native = partial(sharded_attention, scale=0.1, spec=spec, implementation="pallas")
    one = attend or (lambda *qkv: native(*qkv)[0])
    program = jax.shard_map(one, mesh=mesh, in_specs=(TOKENS,) * 3, out_specs=TOKENS, check_vma=False)
    placed = NamedSharding(mesh, TOKENS)
    q, k = (
        jax.ShapeDtypeStruct((1, 32768, n, 128), jnp.bfloat16, sharding=placed)
        for n in (num_heads, spec.num_kv_heads)
    )
    lowered = jax.jit(program).trace(q, k, k).lower(lowering_platforms=("cuda",))
    text = lowered.compile({"xla_gpu_enable_latency_hiding_scheduler": True}).as_text()
    lines = text[text.index("\nENTRY") :].splitlines()
    return [kind for line in lines for pattern, kind in KINDS.items() if re.search(pattern, line)]
