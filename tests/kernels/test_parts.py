"""Merging of partial results, compared with one float64 softmax; on a CPU, Pallas' interpreter runs it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from abstract_gpu import on_abstract_h200

from kernels_pallas import Parts, merged, merged_at_once

B, K, G = 2, 3, 4


def drawn(P, Z, *, pitch=0, padded=False, seed=0):
    """Return parts as kernels write them, with o [B, K·G, P, Z] and lse [B, K·G, P] in float64."""
    rng = np.random.default_rng(seed)
    o, lse = rng.normal(size=(B, K, P, G, Z)), 3 * rng.normal(size=(B, K, P, G))
    # One part of a row sees nothing, and neither does any part of another head.
    for at in ((0, 1, 0), (1, 2)):
        o[at], lse[at] = 0, -np.inf
    held = np.where(np.isneginf(lse)[..., None], np.nan, o)  # Kernels do not write them.
    if padded:
        held = np.concatenate([held, rng.normal(size=held.shape)], axis=3)
    rows = np.full((B, K, P, 64), np.nan)
    for kv in range(K):
        rows[:, kv, :, kv * pitch % 8 : kv * pitch % 8 + G] = lse[:, kv]
    held, rows = (jnp.asarray(x, jnp.float32) for x in (held, rows))
    parts = Parts(held, rows, pitch)

    def by_head(x):
        return np.moveaxis(x, 3, 2).reshape(B, K * G, P, *x.shape[4:])

    return parts, (by_head(o), by_head(lse))


def truth(said, width):
    o = np.concatenate([np.pad(o, [(0, 0)] * 3 + [(0, width - o.shape[3])]) for o, _ in said], axis=2)
    lse = np.concatenate([lse for _, lse in said], axis=2)
    weight = np.exp(lse)
    total = weight.sum(2)
    with np.errstate(divide="ignore"):
        return (weight[..., None] * o).sum(2) / np.where(total > 0, total, 1)[..., None], np.log(total)


KINDS = {
    "near and far": [{"P": 8, "Z": 128, "pitch": 4}, {"P": 5, "Z": 64, "padded": True}],
    "many parts": [{"P": 37, "Z": 96}],
    "padded heads": [
        {"P": 1, "Z": 64, "padded": True},
        {"P": 17, "Z": 64, "padded": True, "seed": 1},
    ],
}


def check(kinds, **options):
    found = [drawn(**kind) for kind in kinds]
    parts, said = zip(*found, strict=True)
    width = max(part.Z for part in parts)
    o, lse = merged_at_once(parts, G, jnp.float32, **options)
    exact = truth(said, width)
    np.testing.assert_allclose(o, exact[0], atol=2e-6)
    np.testing.assert_allclose(lse, exact[1], atol=2e-6)


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_is_one_softmax(kinds):
    check(kinds, interpret=True)


def test_a_part_without_a_number_makes_the_result_nan():
    parts, _ = drawn(**KINDS["many parts"][0])
    broken = replace(parts, lse=parts.lse.at[1, 0, 3].set(jnp.nan))
    for o, lse in (merged(broken, G, jnp.float32), merged_at_once([broken], G, jnp.float32, interpret=True)):
        is_nan = np.isnan(o).all(-1)
        assert is_nan[1, :G].all()
        np.testing.assert_array_equal(np.isnan(lse), is_nan)
        assert is_nan.sum() == G


def test_copies_of_one_sequence():
    parts = [drawn(**kind)[0] for kind in KINDS["near and far"]]
    with pytest.raises(ValueError, match="copies=2 of 2 sequences: must be 1"):
        merged_at_once(parts, G, jnp.float32, copies=2, interpret=True)
    first = [jax.tree.map(lambda x: x[:1], part) for part in parts]
    o, lse = merged_at_once(first, G, jnp.float32, interpret=True)
    copies, same = merged_at_once(first, G, jnp.float32, copies=2, interpret=True)
    np.testing.assert_array_equal(copies, jnp.concatenate([o, o]))
    np.testing.assert_array_equal(same, lse)


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_is_one_softmax_on_the_device(kinds):
    check(kinds)


@pytest.mark.parametrize("kind", [kind for kinds in KINDS.values() for kind in kinds], ids=str)
def test_on_xla(kind):
    parts, said = drawn(**kind)
    found, exact = merged(parts, G, jnp.float32), truth([said], parts.Z)
    for x, y in zip(found, exact, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6)


def test_lowers_for_cuda():
    parts = [drawn(**kind)[0] for kind in KINDS["near and far"]]
    with on_abstract_h200():
        traced = jax.jit(lambda *parts: merged_at_once(parts, G, jnp.bfloat16)).trace(*parts)
        assert "zdc_merge" in traced.lower(lowering_platforms=("cuda",)).as_text()
