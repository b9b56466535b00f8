"""Kernel `post_rope`: lowering for CUDA, refusals, and equality with its reference on a GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_references import post_rope_reference

from kernels_pallas.rope.post_rope import PostRopeConfig, post_rope


def random_inputs(
    *,
    B: int = 2,
    T: int,
    K: int = 2,
    G: int,
    H: int,
    C: int,
    dtype: Any,
    rotation_dtype: Any = None,
    seed: int = 0,
) -> list[jax.Array]:
    """Return arguments of `post_rope`, drawn in float64 and rounded to its dtypes."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape)

    angles = rng.integers(0, 100_000, (B, T, 1)) * 10_000.0 ** -(np.arange(H // 2) / (H // 2))
    return [
        jnp.asarray(normal(B, T, K * G, H), dtype),
        jnp.asarray(normal(B, T, K, H), dtype),
        jnp.asarray(np.cos(angles), jnp.float32),
        jnp.asarray(np.sin(angles), jnp.float32),
        jnp.asarray(normal(K, H, C) / H**0.5, rotation_dtype or dtype),
        jnp.asarray(normal(K, H, C) / H**0.5, rotation_dtype or dtype),
    ]


def lower(arguments: list[Any], **options: Any) -> str:
    """Lower the kernel for CUDA as far as possible without a GPU, and return its text."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments]
    lowered = jax.jit(functools.partial(post_rope, **options)).trace(*shapes)
    return lowered.lower(lowering_platforms=("cuda",)).as_text()


def in_float64(arguments: list[jax.Array]) -> list[np.ndarray]:
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in arguments]
        return [np.asarray(x) for x in post_rope_reference(*exact)]


SHAPES = [(32, 16), (64, 16), (64, 64), (96, 48), (128, 64), (128, 80), (128, 128), (256, 16), (256, 240)]


@pytest.mark.parametrize(("T", "G"), [(1, 4), (64, 1), (1000, 4), (4096, 1)])
@pytest.mark.parametrize(("H", "C"), SHAPES)
@pytest.mark.matrix
def test_lowers_for_cuda(H: int, C: int, G: int, T: int) -> None:
    dtype = jnp.float16 if T == 64 else jnp.bfloat16
    options = {"dtype": dtype, "rotation_dtype": jnp.float16 if T > 1 else dtype}
    shapes = jax.eval_shape(lambda: random_inputs(T=T, G=G, H=H, C=C, **options))
    assert "mosaic_gpu" in lower(shapes)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [8, 1003])
def test_keys_are_the_same_in_both_orders(T: int) -> None:
    inputs = random_inputs(T=T, G=2, H=128, C=128, dtype=jnp.bfloat16)
    fill_memory_with_nan(inputs[0].nbytes + inputs[1].nbytes)
    heads, tokens = (
        jax.jit(functools.partial(post_rope, by_token=by_token))(*inputs) for by_token in (False, True)
    )
    np.testing.assert_array_equal(heads[0], tokens[0])
    np.testing.assert_array_equal(heads[1], tokens[1].swapaxes(1, 2))


@pytest.mark.parametrize("K", [1, 8, 32])
@pytest.mark.matrix
def test_lowers_when_a_cta_shares_angles_among_heads(K: int) -> None:
    shapes = jax.eval_shape(lambda: random_inputs(B=1, T=16384, K=K, G=1, H=128, C=128, dtype=jnp.bfloat16))
    assert "mosaic_gpu" in lower(shapes, by_token=True)


def test_reference_is_the_formula() -> None:
    q, k, cos, sin, a_q, a_k = (
        np.asarray(x, np.float64) for x in random_inputs(T=5, G=3, H=8, C=6, dtype=jnp.float32)
    )
    got = in_float64([q, k, cos, sin, a_q, a_k])
    rotary = cos + 1j * sin

    def turned(x: np.ndarray) -> np.ndarray:
        z = (x[..., :4] + 1j * x[..., 4:]) * rotary
        return np.concatenate([z.real, z.imag], -1)

    for n in range(6):
        np.testing.assert_allclose(got[0][:, :, n], turned(q[:, :, n]) @ a_q[n // 3], atol=1e-12)
    for j in range(2):
        want = turned(k[:, :, j]) @ a_k[j]
        np.testing.assert_allclose(got[1][:, j], want, atol=1e-12)


BAD = {
    "q.dtype is float32": lambda a: a | {"q": a["q"].astype(jnp.float32)},
    "k.dtype is float16": lambda a: a | {"k": a["k"].astype(jnp.float16)},
    "q.shape is ": lambda a: a | {"q": a["q"][0]},
    "no empty dimension": lambda a: a | {"q": a["q"][:, :0]},
    "k.shape is ": lambda a: a | {"k": a["k"][:, :3]},
    "the number of heads of k is 3": lambda a: a | {"k": a["k"][:, :, [0, 1, 1]]},
    "the head dimension of q is 72": lambda a: a | {"q": jnp.concatenate([a["q"], a["q"][..., :8]], -1)},
    "angles_cos.shape is ": lambda a: a | {"angles_cos": a["angles_cos"][..., :16]},
    "angles_sin.dtype is bfloat16": lambda a: a | {"angles_sin": a["angles_sin"].astype(jnp.bfloat16)},
    "q_rotation.shape is ": lambda a: a | {"q_rotation": a["q_rotation"][0]},
    "k_rotation.shape is ": lambda a: a | {"k_rotation": a["k_rotation"][..., :32]},
    "k_rotation.dtype is float32": lambda a: a | {"k_rotation": a["k_rotation"].astype(jnp.float32)},
    "the rank of q_rotation is 24": lambda a: a | {"q_rotation": a["q_rotation"][..., :24]},
    "the rank of q_rotation is 128": lambda a: a | {"q_rotation": jnp.tile(a["q_rotation"], 2)},
    "config is ": lambda a: a | {"config": PostRopeConfig(warpgroups=32)},
}


@pytest.mark.usefixtures("shapes_unchecked")
@pytest.mark.parametrize("message", BAD)
def test_refuses(message: str) -> None:
    names = ("q", "k", "angles_cos", "angles_sin", "q_rotation", "k_rotation")
    inputs = random_inputs(T=8, G=2, H=64, C=64, dtype=jnp.bfloat16)
    good = dict(zip(names, inputs, strict=True))
    with pytest.raises(ValueError, match=message):
        post_rope(**BAD[message](good))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("T", "G", "dtype", "rotation_dtype"),
    [
        (1, 1, jnp.bfloat16, jnp.float16),
        (64, 3, jnp.float16, jnp.float16),
        (1000, 1, jnp.float16, jnp.float16),
        (1003, 3, jnp.bfloat16, jnp.bfloat16),
        (4096, 2, jnp.bfloat16, jnp.float16),
    ],
)
@pytest.mark.parametrize(("H", "C"), SHAPES)
def test_equals_reference(H: int, C: int, T: int, G: int, dtype: Any, rotation_dtype: Any) -> None:
    # The error is at most twice XLA's in the same dtype, and all outputs are written.
    inputs = random_inputs(T=T, G=G, H=H, C=C, dtype=dtype, rotation_dtype=rotation_dtype)
    fill_memory_with_nan(inputs[0].nbytes + inputs[1].nbytes)
    got = jax.jit(post_rope)(*inputs)
    xla = jax.jit(post_rope_reference)(*inputs)
    exact = in_float64(inputs)
    for ours, theirs, truth in zip(got, xla, exact, strict=True):
        assert ours.dtype == dtype

        def loss(x, truth=truth):
            return np.linalg.norm(np.asarray(x, np.float64) - truth)

        assert loss(ours) <= 2 * loss(theirs)


def fill_memory_with_nan(size: int) -> None:
    """Leave NaN in freed device memory, where the next results are likely to be placed."""
    jax.block_until_ready([jnp.full(size, jnp.nan, jnp.bfloat16) for _ in range(4)])
