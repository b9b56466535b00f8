"""Prefill kernel in JAX's interpreter, on a CPU: numerics that need no GPU.

Plain functions replace its products and its vote. The tests cover the softmax, which keys each query sees,
and the buffers that keys pass through. Only a GPU can test overlapped steps and two ranks. Overlapped steps
start a product without a wait, which the interpreter does not support; with two ranks, it waits forever.
"""

import os
from functools import partial

import interpreting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brute_force import check, prefill
from jumps import jumping
from near_and_far import NEAR_AND_FAR, check_needed, near_and_far

from kernels_pallas import (
    PrefillConfig,
    Trailing,
    prefill_attention,
)
from kernels_pallas.prefill import attention as prefill_kernel
from kernels_pallas.prefill import consumer, softmax, turns

BF16 = jnp.bfloat16
NEEDS_CORES = pytest.mark.skipif(
    (os.cpu_count() or 1) < 4, reason="three warpgroups that wait for each other may deadlock on few cores"
)
F32 = jnp.float32


def _product(*pairs):
    def dot(q, k):
        return jnp.dot(q[...].astype(F32), k[...].astype(F32).T, precision="highest")

    return sum(dot(q, k) for q, k in pairs)


def _accumulate(acc, p, values):
    return acc + jnp.dot(p.astype(F32), values[...].astype(F32), precision="highest")


@pytest.fixture
def interpreted(monkeypatch):
    monkeypatch.setattr(softmax, "_any_positive", lambda x: (x > 0).any())
    monkeypatch.setattr(consumer, "_product", _product)
    monkeypatch.setattr(consumer, "_accumulate", _accumulate)
    with interpreting.interpreted_warpgroups(prefill_kernel, "prefill_attention"):
        yield


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, BF16)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "config",
    [
        PrefillConfig(64, 2, 1),
        PrefillConfig(128, 1, 2),
        pytest.param(PrefillConfig(64, 2, 3), marks=NEEDS_CORES),
    ],
)
@pytest.mark.full
def test_one_rank(config):
    B, T, S, N, K, R, Z = 2, 150, 400, 4, 2, 32, 48
    q, k, v = draw(0, B, T, N, R), draw(1, B, K, S, R), draw(2, B, K, S, Z)
    options = {"scale": 0.2, "starts": np.array([0, 217]), "lengths": np.array([150, 300])}
    check(*prefill_attention(q, k, v, config=config, **options), *prefill(q, k, v, **options), BF16)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [BF16, jnp.float16])
@pytest.mark.matrix
def test_scores_that_jump(dtype):
    B, T, S, N, R, Z, scale = 1, 128, 700, 1, 32, 48, 0.2
    q, k = jumping(B, T, S, N, N, R, scale, dtype)
    v = draw(2, B, N, S, Z).astype(dtype)
    options = {"scale": scale, "starts": np.array([S - T])}
    found = prefill_attention(q, k, v, config=PrefillConfig(64, 2, 2), **options)
    check(*found, *prefill(q, k, v, lengths=np.array([S]), **options), dtype)


@pytest.fixture
def turns_ungated(monkeypatch):
    """Remove the waits for turns, because the interpreter does not support named barriers."""
    monkeypatch.setattr(turns, "_take_turn", lambda c, m: m)
    monkeypatch.setattr(turns, "_hand_on", lambda c, l: None)


@pytest.mark.usefixtures("interpreted", "turns_ungated")
@pytest.mark.parametrize("config", [PrefillConfig(64, 2, 2, turns=8), PrefillConfig(128, 2, 2, turns=112)])
@pytest.mark.parametrize("starts", [0, 387])
@pytest.mark.matrix
def test_in_turns(config, starts):
    # This tests what the steps compute. Only a GPU can test that warpgroups keep to their turns.
    B, T, S, N, K, R, Z = 1, 190, 600, 2, 2, 32, 48
    q, k, v = draw(0, B, T, N, R), draw(1, B, K, S, R), draw(2, B, K, S, Z)
    options = {"scale": 0.2, "starts": np.array([starts]), "lengths": np.array([starts + 183])}
    check(*prefill_attention(q, k, v, config=config, **options), *prefill(q, k, v, **options), BF16)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("ends", [(250, 550), (187, 400)])
@pytest.mark.full
def test_far_keys(ends):
    # Rows are whole, end early, or have no queries at all.
    B, T, S, N, K = 2, 150, 300, 2, 2
    q, k, v = draw(0, B, T, N, 32), draw(1, B, K, S, 32), draw(2, B, K, S, 16)
    starts = np.array([100, 400])
    options = {"scale": 0.2, "starts": starts, "sinks": 4, "window": 70, "keys": "far"}
    options["lengths"] = np.array(ends)
    found = prefill_attention(q, k, v, config=PrefillConfig(64, 2, 2), **options)
    check(*found, *prefill(q, k, v, **options), BF16)


@pytest.mark.usefixtures("interpreted")
def test_queries_before_the_needed_ones_are_left_out():
    starts, lengths = np.array([0, 100]), np.array([300, 230])
    q, k, v = draw(0, 2, 300, 1, 32), draw(1, 2, 1, 400, 32), draw(2, 2, 1, 400, 16)
    options = {"scale": 0.2, "starts": starts, "lengths": lengths, "config": PrefillConfig(64, 2, 2)}
    check_needed(partial(prefill_attention, q, k, v, **options), starts, lengths, tile=128)


NEAR_ALONE = {
    "short rows, all in the window": (150, (0, 20), (100, 150), 512),
    "long rows": (300, (0, 257), (300, 300), 333),
    "unmasked blocks in each tile": (200, (900, 1033), (200, 131), 512),
    "a row without queries": (130, (640, 700), (130, 0), 320),
    "a window within a tile": (150, (500, 77), (150, 150), 40),
    "a window of one": (70, (3, 700), (70, 65), 1),
}
"""T, starts, number of queries in each row, and the window."""


def near_alone(T, starts, counts, window, sinks, halo, config):
    """Check attention to near keys alone, whose arrays begin `halo` tokens before the first query."""
    B, H, starts = 2, 16, np.array(starts)
    S = int(max(starts)) + T + halo
    q, k, v = draw(0, B, T, 1, H), draw(1, B, 1, S, H), draw(2, B, 1, S, H)
    base = starts - halo

    def cut(x):
        return jnp.stack([jnp.roll(x[b], -base[b], axis=1)[:, : halo + T] for b in range(B)])

    of_sinks = (k[:, :, :8], v[:, :, :8]) if sinks else ()
    trailing = Trailing(cut(k), cut(v), jnp.asarray(base, jnp.int32), *of_sinks)
    options = {"scale": 0.3, "starts": starts, "lengths": starts + counts, "sinks": sinks, "window": window}
    found = prefill_attention(q, k[..., :0], v[..., :0], trailing=trailing, config=config, **options)
    check(*found, *prefill(q, k[..., :0], v[..., :0], tail=(k, v), **options), BF16)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.matrix
@pytest.mark.parametrize("case", NEAR_ALONE)
@pytest.mark.parametrize(
    ("sinks", "config"),
    [
        (0, PrefillConfig(64, 2, 1)),
        (4, PrefillConfig(64, 3, 2)),
        (4, PrefillConfig(128, 2, 2)),
        pytest.param(4, PrefillConfig(64, 2, 3), marks=NEEDS_CORES),
    ],
)
def test_near_keys_alone(case, sinks, config):
    # In some rows the arrays begin before position 0, and they never begin with a block.
    T, starts, counts, window = NEAR_ALONE[case]
    near_alone(T, starts, counts, window, sinks, window + 3, config)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("sinks", "starts"), [(0, (800, 600)), (4, (640, 900)), (4, (7, 50))])
@pytest.mark.full
def test_near_keys_alone_of_arrays_that_begin_long_before(sinks, starts):
    # Blocks before all windows are skipped. Arrays of the first tokens begin long before any token.
    near_alone(140, starts, (140, 90), 400, sinks, 576, PrefillConfig(64, 2, 2))


@pytest.mark.usefixtures("interpreted", "turns_ungated")
@pytest.mark.parametrize("config", [PrefillConfig(64, 2, 2, turns=56), PrefillConfig(128, 2, 2, turns=112)])
@pytest.mark.full
def test_near_keys_alone_in_turns(config):
    near_alone(150, (900, 3), (150, 150), 600, 4, 600, config)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", NEAR_AND_FAR)
@pytest.mark.parametrize(
    "config", [PrefillConfig(64, 2, 1), PrefillConfig(128, 2, 2), PrefillConfig(64, 4, 2, overlap=True)]
)
@pytest.mark.matrix
def test_near_and_far_keys(case, config):
    # Queries before the last tile are left out in a second call.
    near_and_far(*NEAR_AND_FAR[case], config, tile=64 * config.warpgroups)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.full
def test_near_and_far_keys_in_pages():
    near_and_far(130, (257, 640), (130, 90), 128, 4, PrefillConfig(64, 2, 2), page=128)
