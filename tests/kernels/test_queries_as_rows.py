"""Queries of a prompt chunk as rows of the decode kernels: each chooses and reads tokens by itself.

All kernels run in JAX's interpreter, on rows and on pages, and are compared with loops in float64.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import test_coded_decode
import test_coded_scan
import test_select
from coded_case import coded, read
from pages import Pool

from kernels_pallas.select import largest as select
from kernels_pallas.select import scan as coded_scan
from kernels_pallas.select.scan import _rounded
from kernels_pallas.select.scan_inputs import SAMPLE_BLOCK
from zdc_jax.ops import cache_attention

B, T, K, S, SINKS, WINDOW, COUNT, SCALE = 3, 3, 2, 384, 3, 2, 128, 0.2
STARTS = np.array([381, 200, 4])
"""First positions. The last row's queries have no far token, one, and two."""
KINDS = (32, 4), (32, 4), (64, 4)


class Case:
    """Queries of `groups` heads per KV head, and quantized tokens, in rows or in pages."""

    def __init__(self, groups: int):
        rng = np.random.default_rng(groups)
        self.positions = STARTS[:, None] + np.arange(T)
        self.q = jnp.asarray(rng.normal(size=(B, T, groups * K, 64)), jnp.bfloat16)
        self.planes = [coded(rng.normal(size=(B, K, S, C)), bits) for C, bits in KINDS]

    def run(self, page: int = 0):
        """Return the chosen slots [B, T, K, n], results [B, T, N, Z] and their log-sum-exp [B, N, T]."""
        planes, table = self.planes, None
        if page:
            pool = Pool(planes, np.full(B, SINKS), self.positions[:, -1] + 1, page)
            planes, table = pool.planes, pool.table
        given, near = {"scale": SCALE, "table": table}, {"sinks": SINKS, "window": WINDOW}
        positions = jnp.asarray(self.positions)
        slots = cache_attention.choose_by_index(
            self.q[..., :32], planes[:1], positions, count=COUNT, **given, **near
        )
        options = {"slots": slots, "table": table}
        read = cache_attention.far_pass(self.q, planes, positions, (SINKS, WINDOW), **options)
        o, lse = cache_attention.attend_passes(self.q, read, scale=SCALE)
        return np.asarray(slots), np.asarray(o, np.float64), np.asarray(lse, np.float64)

    def truth(self):
        """Compute the results of `run` with loops."""
        index, rest, v = (read(plane) for plane in self.planes)
        k, G = np.concatenate([index, rest], -1), self.q.shape[2] // K
        q, (whole, unit) = np.asarray(self.q, np.float64), _rounded(self.q[..., :32], SCALE)
        scored = np.asarray(whole, np.float64) * np.asarray(unit, np.float64)[..., None]
        slots = np.full((B, T, K, COUNT), S)
        o, lse = np.zeros((*q.shape[:3], 64)), np.full((B, q.shape[2], T), -np.inf)
        for b, t, kv in np.ndindex(B, T, K):
            far, heads = np.arange(SINKS, self.positions[b, t] - WINDOW + 1), range(kv * G, (kv + 1) * G)
            if not len(far):
                continue
            scores = scored[b, t, heads] @ index[b, kv, far].T
            sampled = scores[:, far < SAMPLE_BLOCK]  # One block in eight, of at most three.
            worth = np.logaddexp.reduce(scores - np.logaddexp.reduce(sampled, axis=1)[:, None], axis=0)
            best = np.sort(far[np.argsort(-worth, kind="stable")[:COUNT]])
            slots[b, t, kv, : len(best)] = best
            for n in heads:
                logits = SCALE * k[b, kv, best] @ q[b, t, n]
                lse[b, n, t] = np.logaddexp.reduce(logits)
                o[b, t, n] = np.exp(logits - lse[b, n, t]) @ v[b, kv, best]
        return slots, o, lse


@pytest.fixture
def interpreted():
    others = [(coded_scan, "index_scores", test_coded_scan.PLAIN), (select, "largest", test_select.PLAIN)]
    with test_coded_decode.interpreted_with_registers(*others):
        yield


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.full
def test_each_query_chooses_and_reads_its_own(interpreted, groups):
    it = Case(groups)
    (slots, o, lse), (true_slots, true_o, true_lse) = it.run(), it.truth()
    np.testing.assert_array_equal(slots, true_slots)
    error = np.linalg.norm(o - true_o, axis=-1)
    assert (error <= 0.004 * np.linalg.norm(true_o, axis=-1)).all(), error.max()
    np.testing.assert_allclose(lse, true_lse, atol=1e-3, rtol=2e-6)  # Queries have 15 bits.
    assert np.isneginf(lse[2, :, 0]).all()


@pytest.mark.full
def test_pages_give_what_rows_give(interpreted):
    it = Case(2)
    for paged, whole in zip(it.run(128), it.run(), strict=True):
        np.testing.assert_array_equal(paged, whole)


def test_a_row_of_a_store_is_a_page_of_its_queries():
    positions = jnp.asarray(STARTS[:, None] + np.arange(T))
    table = cache_attention.table_of_queries(positions, None)
    np.testing.assert_array_equal(table, [[0]] * 3 + [[1]] * 3 + [[2]] * 3)
    pages = jnp.asarray([[7, 2], [4, 0], [1, 9]], jnp.int32)
    of_queries = np.asarray(cache_attention.table_of_queries(positions, pages)).reshape(B, T, 2)
    np.testing.assert_array_equal(of_queries, np.broadcast_to(pages[:, None], (B, T, 2)))
    assert cache_attention.table_of_queries(positions[:, :1], pages) is pages
    begin, end = cache_attention.far_span(positions, SINKS, WINDOW)
    np.testing.assert_array_equal(begin, [SINKS] * 9)
    np.testing.assert_array_equal(end, np.ravel(positions) - 1)


@pytest.mark.parametrize(
    ("shape", "at_once"),
    [
        ((1, 8, 32768, 1024), 256),
        ((1, 32, 32768, 1024), 64),
        ((1, 8, 32768, 100), 100),
        ((4, 8, 131072, 1024), 16),
        ((64, 32, 131072, 1024), 1),
        ((64, 32, 131072, 1), 1),
        ((1, 1, 128, 65536), 16384),
    ],
)
def test_scores_of_as_many_queries_as_there_is_room_for(shape, at_once):
    assert cache_attention.queries_at_once(*shape) == at_once
    rows, heads, slots, _ = shape
    assert at_once == 1 or 4 * at_once * rows * heads * slots <= cache_attention.AT_ONCE
    # The second axis of a grid on a GPU has at most 65,535 CTAs.
    assert at_once == 1 or at_once * rows * heads <= 65535
