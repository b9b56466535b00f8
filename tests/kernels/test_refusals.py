"""Refusals of calls: equal to what the kernels raise, from shapes alone."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas as kernels
from kernels_pallas import DecodeConfig, PostRopeConfig, Ring, Trailing

CALLS = 90
DTYPES = [jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32]
Call = tuple[dict[str, Any], dict[str, Any]]


def shape(*dims: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(map(int, dims)), dtype)


integers = partial(shape, dtype=jnp.int32)


def widths(rng: np.random.Generator, near: str) -> tuple[int, int, int]:
    """Return R, Z and H for two ranks, near keys alone, or one rank."""
    R, Z = rng.choice([16, 32, 48, 64], 2)
    if near == "alone":
        return 0, 0, int(R + Z)
    return R, Z, R + Z if near else R


def prefill_call(rng: np.random.Generator) -> Call:
    near = rng.choice(["", "both", "alone"])
    R, Z, H = widths(rng, near)
    B, T, K, S, M = rng.integers(1, 200, 5) % [3, 200, 4, 200, 200] + 1
    paged, page = rng.random() < 0.3, 64 * rng.integers(1, 5)
    tokens = (B + 3, K, page) if paged else (B, K, S)
    arrays = {"q": shape(B, T, K * rng.integers(1, 4), H), "k": shape(*tokens, R), "v": shape(*tokens, Z)}
    if paged:
        arrays["block_table"] = integers(B, rng.integers(1, 5))
    options: dict[str, Any] = {"sinks": int(rng.choice([0, 4, 64])), "window": int(rng.choice([1, 64, 100]))}
    rest = {"starts": integers(B), "lengths": integers(B)}
    if near:
        heads = [shape(B, K, 64, H - rank) for rank in (R, Z)]
        arrays["trailing"] = Trailing(shape(B, K, M, H - R), shape(B, K, M, H - Z), integers(B), *heads)
    else:
        options["keys"] = str(rng.choice(["all", "far"]))
    return arrays | {name: x for name, x in rest.items() if rng.random() < 0.6}, options


def decode_call(rng: np.random.Generator) -> Call:
    near = rng.choice(["", "both", "alone"])
    R, Z, H = widths(rng, near)
    B, K, S, pages = rng.integers(1, 300, 4) % [3, 4, 300, 5] + 1
    paged, options = rng.random() < 0.3, {}
    block = int(rng.choice([64, 128]))
    lead, slots = (pages + 3, block * pages) if paged else (B, S)
    arrays = {"q": shape(B, K * rng.choice([1, 3, 56]), H), "lengths": integers(B)}
    arrays |= {"k": shape(lead, K, slots, R), "v": shape(lead, K, slots, Z)}
    if paged:
        arrays["block_table"] = integers(B, pages)
    if near:
        options = {"sinks": int(rng.choice([0, 4, 64])), "window": block * int(rng.integers(1, 4))}
        M = sum(options.values()) + rng.integers(0, 9)
        arrays["ring"] = Ring(shape(B, K, M, H - R), shape(B, K, M, H - Z))
    if rng.random() < 0.5:
        options["config"] = DecodeConfig(block=block)
    return arrays, options


def post_rope_call(rng: np.random.Generator) -> Call:
    B, T, K, G = rng.integers(1, 200, 4) % [3, 200, 4, 3] + 1
    H = int(rng.choice([32, 64, 96, 128, 256]))
    C = 16 * int(rng.integers(1, H // 16 + 1))
    angles = shape(B, T, H // 2, dtype=jnp.float32)
    arrays = {"q": shape(B, T, K * G, H), "k": shape(B, T, K, H), "angles_cos": angles, "angles_sin": angles}
    arrays |= {"q_rotation": shape(K, H, C), "k_rotation": shape(K, H, C)}
    return arrays, {"config": PostRopeConfig()}


def changed(rng: np.random.Generator, arrays: dict[str, Any], options: dict[str, Any]) -> Call:
    """Return a call with one array of another size, dtype or rank, or with one other option."""
    if options and rng.random() < 0.3:
        name = rng.choice(list(options))
        values: dict[str, list[Any]] = {"keys": ["all", "far", "near"]}
        of_rope = isinstance(options.get("config"), PostRopeConfig)
        values["config"] = [PostRopeConfig(warpgroups=8) if of_rope else DecodeConfig(block=128)]
        other = values.get(name, [-1, 0, 60, 65, 100])
        return arrays, options | {name: other[rng.integers(len(other))]}
    leaves, tree = jax.tree.flatten(arrays)
    index = rng.integers(len(leaves))
    dims, dtype = list(leaves[index].shape), leaves[index].dtype
    if not dims:  # Its only axis is already removed.
        return arrays, options
    axis = rng.integers(len(dims))
    match rng.integers(5):
        case 0:
            dtype = DTYPES[rng.integers(len(DTYPES))]
        case 1:
            del dims[axis]
        case _:
            size = dims[axis]
            dims[axis] = int(rng.choice([0, size + 1, max(size - 1, 0), 2 * size, size + 16, 60 * size, 24]))
    leaves[index] = shape(*dims, dtype=dtype)
    return jax.tree.unflatten(tree, leaves), options


KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., str | None], Callable[..., Call]]] = {
    "prefill": (partial(kernels.prefill_attention, scale=1.0), kernels.prefill_refusal, prefill_call),
    "decode": (partial(kernels.decode_parts, scale=1.0), kernels.decode_refusal, decode_call),
    "post_rope": (kernels.post_rope, kernels.post_rope_refusal, post_rope_call),
}


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.matrix
def test_a_call_is_refused_exactly_where_the_kernel_raises(no_launch, name):
    # Random calls are valid, and never refused, or have one or two changes.
    kernel, refusal, draw = KERNELS[name]
    rng, refused = np.random.default_rng(0), 0
    for index in range(CALLS):
        arrays, options = draw(rng)
        for _ in range(index % 3):
            arrays, options = changed(rng, arrays, options)
        said, raised = refusal(**arrays, **options), None
        try:
            jax.eval_shape(partial(kernel, **options), **arrays)
        except (ValueError, NotImplementedError) as error:
            raised = str(error)
        assert said == raised, (arrays, options)
        assert said is None or index % 3, (arrays, options)
        refused += said is not None
    assert CALLS / 4 < refused < 2 * CALLS / 3


@pytest.mark.usefixtures("shapes_unchecked")
def test_shapes_tracers_and_arrays_are_refused_alike():
    arrays = [jnp.zeros(dims, jnp.bfloat16) for dims in ((1, 8, 2, 32), (1, 2, 8, 24), (1, 2, 8, 32))]
    said = []
    jax.eval_shape(lambda *arrays: said.append(kernels.prefill_refusal(*arrays)), *arrays)
    said += [kernels.prefill_refusal(*given) for given in (arrays, [shape(*x.shape) for x in arrays])]
    assert said == ["R=24: must be a multiple of 16 from 16 to 256"] * 3


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    ("table", "pages", "message"),
    [
        (shape(1, 2, dtype=jnp.float32), 3, "block_table has dtype float32: must be int32"),
        (integers(1, 0), 3, "block_table has 0 pages per sequence, the pool 3: must be at least 1"),
        (integers(1, 2), 0, "block_table has 2 pages per sequence, the pool 0: must be at least 1"),
        (integers(1, 2), 3, None),
    ],
)
def test_tables_of_pages(table, pages, message):
    q, pool = shape(1, 4, 32), shape(pages, 2, 64, 32)
    assert kernels.decode_refusal(q, pool, pool, integers(1), block_table=table) == message


def plane(*tokens: int, width: int = 64) -> kernels.Plane:
    """Return the shapes of a plane of 4-bit integers."""
    return kernels.Plane(shape(*tokens, width // 2, dtype=jnp.uint8), shape(*tokens, dtype=jnp.uint8), 4)


def refused_sizes(*, B: int = 2, T: int = 3, N: int = 4, K: int = 2, S: int = 128, ints: Any = jnp.int32):
    """Return the kernels' refusals of arrays with these sizes and index arrays of dtype `ints`."""
    of_rows = shape(B, dtype=ints)
    q, one, k, held = shape(B, T, N, 64), shape(B, N, 64), shape(B, K, S, 64), plane(B, K, S)
    scores = shape(B, K, S, dtype=jnp.float32)
    return {
        "prefill": kernels.prefill_refusal(q, k, k, starts=of_rows),
        "prefill, lengths": kernels.prefill_refusal(q, k, k, lengths=of_rows),
        "decode": kernels.decode_refusal(one, k, k, of_rows),
        "coded": kernels.coded_refusal(kernels.CodedPass(one, [held], held, of_rows, of_rows)),
        "scan": kernels.scan_refusal(one, held, of_rows, of_rows, config=None),
        "select": kernels.select_refusal(scores, of_rows, of_rows, k=128),
        "dequantise": kernels.dequantise_refusal([[held]], of_rows),
        "encode": kernels.encode_refusal([shape(B, T, K, 64)], [[held]], of_rows, of_rows),
    }


@pytest.mark.usefixtures("shapes_unchecked")
def test_sizes_and_index_arrays_that_launch():
    assert not any(refused_sizes().values())


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("B", ()),
        ("T", ("decode", "coded", "scan", "select", "dequantise")),
        ("N", ("select", "dequantise", "encode")),
        ("K", ()),
        ("S", ()),
    ],
)
def test_no_size_is_zero(name, without):
    for kernel, said in refused_sizes(**{name: 0}).items():
        zero = said is not None and any(text in said for text in ("=0: must be", " 0 heads", "S=0 slots"))
        assert zero != (kernel in without), (kernel, said)


@pytest.mark.usefixtures("shapes_unchecked")
def test_index_arrays_are_integers():
    for kernel, said in refused_sizes(ints=jnp.float32).items():
        assert str(said).endswith("has dtype float32: must be an integer dtype"), (kernel, said)


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize(
    ("backend", "capability", "dtype", "expected"),
    [
        ("cpu", None, jnp.bfloat16, "it needs a GPU of compute capability 9.0, the default backend is 'cpu'"),
        ("gpu", "8.6", jnp.bfloat16, "it needs a GPU of compute capability 9.0, the device has 8.6"),
        ("gpu", "9.0", jnp.float32, "q has dtype float32: must be bfloat16 or float16"),
        ("gpu", "9.0", jnp.float16, None),
    ],
)
def test_devices(monkeypatch, backend, capability, dtype, expected):
    # Kernels refuse another GPU alike. Without a GPU, they may be lowered for one.
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(compute_capability=capability)])
    q, k = shape(1, 8, 2, 32, dtype=dtype), shape(1, 2, 8, 32, dtype=dtype)
    assert kernels.device_refusal(q) == expected
    assert kernels.prefill_refusal(q, k, k) == (None if backend == "cpu" else expected)


@pytest.mark.parametrize("scale", [0.0, -0.1, float("nan")])
def test_scores_keep_their_order(scale):
    # Masked scores are -inf before scaling.
    x, keys = jnp.zeros((1, 2, 4, 16), jnp.bfloat16), jnp.zeros((1, 4, 64, 16), jnp.bfloat16)
    with pytest.raises(ValueError, match=f"scale={scale}: must be above 0"):
        kernels.prefill_attention(x, keys, keys, scale=scale)
    with pytest.raises(ValueError, match=f"scale={scale}: must be above 0"):
        kernels.decode_parts(x[:, 0], keys, keys, jnp.ones(1, jnp.int32), scale=scale)
