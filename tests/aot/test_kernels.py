"""ptxas reports of the kernels for Hopper.

Spills are listed, and hot loops must wait, multiply, then load. The cases are those of the tuning tables,
then further features of the kernels. Needs the extra `aot`, but no GPU.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from compiled import Kernel, assert_no_spills, compiled
from merged_parts import decode_attention

from kernels_pallas import (
    DecodeConfig,
    PrefillConfig,
    Ring,
    Trailing,
    post_rope,
    prefill_attention,
)
from kernels_pallas.tuning import file_of

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("optimised")]
N, S, B = 32, 8192, 16
"""Heads, tokens, and batch size of the decode kernel."""
WARPGROUP = 128
"""Threads of one warpgroup."""
NEAR = {"sinks": 4, "window": 512}
TUNED = json.loads(file_of("NVIDIA H200").read_text())
CTAS = {(64, 96, 64): 4, (32, 64, 32): 4, (32, 64, 128): 3, (64, 96, 128): 2, (16, 32, 64): 4}
"""Least number of decoding CTAs on a multiprocessor by (R, Z, H); 1 for other shapes.

With fewer CTAs, fewer bytes are in flight.
"""


def shape(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def integers(*dims: int) -> jax.ShapeDtypeStruct:
    return shape(*dims, dtype=jnp.int32)


def prefill(R: int, Z: int, H: int = 0, page: int = 0, **options: Any) -> list[Kernel]:
    """Compile prefill of S tokens, in pages if `page` is not 0, with two ranks if `H` is not 0."""
    cache, table = ((99, N, page), integers(1, S // page)) if page else ((1, N, S), None)
    arrays = shape(1, S, N, H or R), shape(*cache, R), shape(*cache, Z)
    tails = [shape(1, N, tokens, H - rank) for tokens in (S, 8) for rank in (R, Z)] if H else []
    trailing = Trailing(*tails[:2], integers(1), *tails[2:]) if H else None
    options = (NEAR if H else {}) | options

    def f(q, k, v, trailing, table):
        return prefill_attention(
            q,
            k,
            v,
            scale=0.1,
            trailing=trailing,
            block_table=table,
            **options,
        )

    return compiled(f, *arrays, trailing, table)


def decode(
    R: int,
    Z: int,
    H: int = 0,
    config: DecodeConfig | None = None,
    cache: tuple[int, ...] = (B, N, S),
    **options: Any,
) -> list[Kernel]:
    """Compile decoding from caches of S tokens, with two ranks if `H` is not 0."""
    arrays = shape(B, N, H or R), shape(*cache, R), shape(*cache, Z), integers(B)
    near = NEAR if H else {}
    if H:
        options["ring"] = Ring(*(shape(B, N, 520, H - rank) for rank in (R, Z)))

    def f(q, k, v, n, options):
        return decode_attention(q, k, v, n, scale=0.1, config=config, **near, **options)

    return compiled(f, *arrays, options)


def rope(H: int, C: int, *, T: int = S, K: int = 8, G: int = 4) -> list[Kernel]:
    """Compile the kernel after RoPE for prompts of T tokens."""
    rotations = [shape(K, H, C, dtype=jnp.float16) for _ in range(2)]
    angles = [shape(1, T, H // 2, dtype=jnp.float32) for _ in range(2)]
    return compiled(post_rope, shape(1, T, K * G, H), shape(1, T, K, H), *angles, *rotations)


def tuned(kernel: str) -> list[Any]:
    """Return the widths and configs of the table of measured configs."""

    def name(widths):
        return "-".join(map(str, widths.values()))

    return [pytest.param(x["widths"], x["config"], id=name(x["widths"])) for x in TUNED[kernel]]


@pytest.mark.parametrize("page", [0, 128])
@pytest.mark.parametrize(("widths", "config"), tuned("prefill"))
def test_prefill(widths: dict[str, int], config: dict[str, Any], page: int) -> None:
    R, Z, H, HV = (widths[name] for name in ("R", "Z", "H", "HV"))
    sizes = PrefillConfig(**config)
    (kernel,) = prefill(R, Z, 0 if (R, Z) == (H, HV) else H, page, config=sizes)
    assert_no_spills([kernel])
    assert kernel.ctas >= 1

    # If warpgroups asked for more registers than the others release, they would wait forever.
    fewer, more = (int(x.text.split()[-1], 16) for x in kernel.code.instructions if x.has("USETMAXREG"))
    assert (fewer + sizes.warpgroups * more) * WARPGROUP <= kernel.register_pool

    plain = kernel.code.loops_with("HGMMA")[0]
    assert plain.count("HGMMA") == R // 16 + sizes.block_kv // 16
    assert plain.in_order("SYNCS.PHASECHK", "HGMMA")
    assert plain.count("SYNCS.ARRIVE") == 2, "keys and values are released once each"
    assert plain.count("LDG", "LD", "UTMALDG") == 0, "another warpgroup loads"
    (producer,) = kernel.code.loops_with("UTMALDG")
    assert producer.count("SYNCS.PHASECHK") > 0


@pytest.mark.parametrize(("R", "Z"), [(16, 144), (16, 192), (16, 208), (16, 240), (128, 144)])
def test_prefill_of_wide_values(R: int, Z: int) -> None:
    # Outputs need many registers per thread. The default configs leave room for them.
    assert_no_spills(prefill(R, Z))


@pytest.mark.parametrize("page", [0, 128])
@pytest.mark.parametrize(("R", "Z", "H"), [(64, 96, 0), (48, 96, 0), (64, 96, 128), (48, 96, 128)])
def test_prefill_in_turns(R: int, Z: int, H: int, page: int) -> None:
    # Weights follow the start of a turn, and the weights of 80 of 128 columns precede its end. Two
    # exponentials are not weights: they rescale a thread's two rows when the maximum is raised.
    (kernel,) = prefill(R, Z, H, page)
    assert_no_spills([kernel])
    assert kernel.ctas >= 1
    code = kernel.code.loops_with("HGMMA")[0].instructions
    (take,), (hand_on,) = ([x.index for x in code if x.has(name)] for name in ("BAR.SYNC", "BAR.ARV"))
    exponentials = [x.index for x in code if x.has("MUFU")]
    assert sum(x < take for x in exponentials) == 2
    assert sum(x > hand_on for x in exponentials) <= 48 * 64 // WARPGROUP


@pytest.mark.parametrize(("R", "Z", "H"), [(64, 96, 0), (48, 96, 0), (64, 96, 128)])
def test_prefill_in_whole_turns(R: int, Z: int, H: int) -> None:
    # All weights lie between the start and the end of a turn; no wait for a product does.
    (kernel,) = prefill(R, Z, H, config=PrefillConfig(turns=128))
    assert_no_spills([kernel])
    code = kernel.code.loops_with("HGMMA")[0].instructions
    (take,), (hand_on,) = ([x.index for x in code if x.has(name)] for name in ("BAR.SYNC", "BAR.ARV"))

    def within(name):
        return [take < x.index < hand_on for x in code if x.has(name)]

    assert within("MUFU").count(False) == 2, "only a raised maximum needs more"
    assert not any(within("WARPGROUP.DEPBAR") + within("HGMMA") + within("FMNMX"))


@pytest.mark.parametrize(("R", "Z"), [(32, 64), (64, 64)])
def test_prefill_overlapped(R: int, Z: int) -> None:
    # The next block's product begins before this block's last weights, and both products share one wait.
    (kernel,) = prefill(R, Z, config=PrefillConfig(overlap=True))
    assert_no_spills([kernel])
    code = kernel.code.loops_with("HGMMA")[0].instructions
    products, weights = ([x.index for x in code if x.has(name)] for name in ("HGMMA", "MUFU"))
    assert products[0] < weights[-1] < products[R // 16]
    waits = [x.index for x in code if x.has("WARPGROUP.DEPBAR")]
    assert min(waits) > products[-1]


@pytest.mark.parametrize(("R", "Z"), [(128, 128), (64, 96), (32, 64)])
def test_blocks_that_raise_no_maximum_exchange_nothing(R: int, Z: int) -> None:
    # Each block takes one vote. Only few blocks then need shuffles and rescale their sums.
    (kernel,) = prefill(R, Z)
    plain = kernel.code.loops_with("HGMMA")[0]

    def places(name):
        return [x.index for x in plain.instructions if x.has(name)]

    *_, last_product = places("HGMMA")

    def always(name):
        return [kernel.code.on_every_path(x, last_product) for x in places(name)]

    assert always("VOTE") == [True]
    assert always("SHFL") == [False] * 4, "two rows, over four threads"
    assert all(always("BAR")), "barriers do not depend on raised maxima"
    assert not any(always("FMUL"))


@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize("warpgroups", [1, 2, 3])
@pytest.mark.parametrize(("block_kv", "overlap"), [(64, False), (64, True), (128, False)])
def test_prefill_of_near_keys_alone(H: int, warpgroups: int, block_kv: int, overlap: bool) -> None:
    # Blocks without a mask come first, then masked ones of 64 keys at a time.
    config = PrefillConfig(block_kv, 2, warpgroups, overlap=overlap)
    (kernel,) = prefill(0, 0, H, config=config)
    assert_no_spills([kernel])
    assert kernel.ctas >= 1
    plain, masked = kernel.code.loops_with("HGMMA")
    assert plain.count("HGMMA") == H // 16 + block_kv // 16
    assert masked.count("HGMMA") == H // 16 + 64 // 16
    assert plain.count("ISETP") < 8, "no element's key is compared with its query"
    assert masked.count("ISETP") > 32
    assert plain.count("LDG", "LD", "UTMALDG") == 0, "another warpgroup loads"


def prefill_near_and_far(H: int) -> list[Kernel]:
    """Compile prefill of far keys, near keys from arrays of their own, and block scores."""

    def f(q, k, v, starts, gains, *near):
        options = {"near": Trailing(*near, starts), "window": 512, "block_scores": gains}
        return prefill_attention(q, k, v, scale=0.1, starts=starts, keys="far", **options)

    near, gains = [shape(1, N, S, H)] * 2, jax.ShapeDtypeStruct((1, S, N, S // 64), jnp.float32)
    return compiled(f, shape(1, S, N, H), shape(1, N, S, H), shape(1, N, S, H), integers(1), gains, *near)


@pytest.mark.parametrize(("widths", "config"), tuned("decode"))
def test_decode(widths: dict[str, int], config: dict[str, Any]) -> None:
    R, Z, H = (widths[name] for name in "RZH")
    sizes = DecodeConfig(**config)
    (kernel,) = decode(R, Z, 0 if R == H else H, config=sizes)
    assert_no_spills([kernel])
    assert kernel.ctas >= CTAS.get((R, Z, H), 1)

    loops = kernel.code.loops_with("HGMMA")
    assert len(loops) == (1 if R == H else 2), "far keys, then near ones"
    assert loops[0].count("HGMMA") == R // 16 + sizes.block // 16
    for loop in loops:
        assert loop.in_order("SYNCS.PHASECHK", "HGMMA")
        # The next block overwrites this one, so it is loaded once no product reads this one any more.
        assert loop.in_order("WARPGROUP.DEPBAR", "UTMALDG", how_many=all)
        assert loop.count("LDG", "LD") == 0, "keys and values come by the copy engine only"


@pytest.mark.parametrize("T", [1, S])
@pytest.mark.parametrize(("H", "C"), [(64, 64), (128, 128), (128, 64), (256, 128)])
def test_post_rope(H: int, C: int, T: int) -> None:
    (kernel,) = rope(H, C, T=T)
    assert_no_spills([kernel])
    assert kernel.ctas >= 1
    (heads,) = kernel.code.loops_with("HGMMA")
    assert heads.count("HGMMA") == H // 16
    assert heads.in_order("SYNCS.PHASECHK", "HGMMA")
    assert heads.in_order("LDSM", "UTMALDG"), "a tile is read before the next one takes its place"


OTHERS: dict[str, Callable[[], list[Kernel]]] = {
    "prefill far": lambda: prefill(64, 96, keys="far", **NEAR),
    "prefill near": lambda: prefill(0, 0, 64),
    "prefill near 128": lambda: prefill(0, 0, 128),
    "prefill near and far": lambda: prefill_near_and_far(128),
    "prefill near of no sinks": lambda: prefill(0, 0, 128, sinks=0),
    "prefill paged small": lambda: prefill(64, 96, page=64),
    "decode wide": lambda: decode(256, 256),
    "decode wide two ranks": lambda: decode(128, 128, 256),
    "decode near": lambda: decode(0, 0, 256),
    "decode paged": lambda: decode(64, 96, cache=(99, N, 256), block_table=integers(B, 32)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_spills(name: str) -> None:
    assert_no_spills(OTHERS[name]())


SPILL: dict[str, tuple[str, Callable[[], list[Kernel]]]] = {
    "prefill 256-256": ("once, outside of its loops", lambda: prefill(256, 256)),
    "prefill 240-16": ("once, outside of its loops", lambda: prefill(240, 16)),
    "prefill 128-128-256": ("in blocks with near keys", lambda: prefill(128, 128, 256)),
    "prefill near 256": ("once, outside of its loops", lambda: prefill(0, 0, 256)),
    "post_rope 256": ("at each head", lambda: rope(256, 256)),
}
"""Default configs that are known to spill, and the places where they spill."""


@pytest.mark.parametrize(
    "compile_it",
    [
        pytest.param(f, id=name, marks=pytest.mark.xfail(raises=AssertionError, strict=True, reason=reason))
        for name, (reason, f) in SPILL.items()
    ],
)
def test_spills_known(compile_it: Callable[[], list[Kernel]]) -> None:
    assert_no_spills(compile_it())


def test_spills_are_seen() -> None:
    # This config keeps two blocks of scores and 128 values per query, and was rejected in tuning.
    (kernel,) = prefill(64, 128, config=PrefillConfig(overlap=True))
    assert kernel.stack > 0
    assert kernel.spills > 0
    assert kernel.serialized
    assert kernel.code.count("LDL", "STL") > 0
    with pytest.raises(AssertionError, match="spills"):
        assert_no_spills([kernel])
