"""Partitions, their table and their search, against closed forms and brute force."""

from functools import partial
from itertools import combinations
from math import sqrt

import pytest
from conftest import LLAMA
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.mesh.rivals.methods import handed_bytes
from benchmarks.mesh.rivals.partition import (
    ChunkCost,
    Partition,
    cache_slots,
    interpolated,
    predicted_ttft,
    searched,
)
from zdc_jax.errors import MeshError
from zdc_jax.plan import CompressionPlan

ATTENTION = ChunkCost(call=0, token=0, past=2e-9, own=1e-9)  # Causality halves own scores.
LAYERS = 32


def FREE(end):
    return 0.0


def test_positions():
    partition = Partition((5, 1, 4))
    assert partition.length == 10
    assert partition.starts == (0, 5, 6)
    assert partition.ends == (5, 6, 10)
    assert partition.padding == (0, 4, 1)
    assert Partition.ending_at(partition.ends) == partition


def test_even():
    assert Partition.even(13, 4).tokens == (4, 3, 3, 3)
    assert Partition.even(4, 4).tokens == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Partition(()), r"tokens=\(\) must give"),
        (lambda: Partition((3, 0)), r"tokens=\(3, 0\) must give at least one device at least one token"),
        (lambda: Partition.even(3, 4), "3 tokens cannot be divided over devices=4"),
        (lambda: Partition.even(3, 0), "3 tokens cannot be divided over devices=0"),
        (lambda: interpolated([], 8), r"table must hold partitions of one number of devices, it has \[\]"),
        (lambda: interpolated([Partition((4, 4)), Partition((1, 1, 1))], 8), r"it has \[2, 3\]"),
        (lambda: interpolated([Partition((4, 4))], 1), "length=1 must be >= 1 token for each of 2 devices"),
        (
            lambda: searched(3, 4, ATTENTION, layers=1, link=FREE),
            "3 tokens cannot be divided over devices=4",
        ),
        (lambda: ChunkCost.fit({Partition((4, 4)): 1.0}), "4 terms apart"),
        (lambda: ChunkCost.fit({Partition((4, 4)): 0.0}), r"seconds=\[0.0\] must all be > 0"),
        (lambda: ChunkCost.fit({}), "4 terms apart"),
    ],
)
def test_refuses(make, message):
    with pytest.raises((MeshError, ValueError), match=message):
        make()


def test_interpolated_between_the_two_nearest():
    # The paper's example (§5): shares of 10k lie halfway between those of 8k and 12k.
    table = [Partition((6000, 4000, 2000)), Partition((3200, 2400, 2400)), Partition((16, 8, 8))]
    assert interpolated(table, 10000).tokens == (4500, 3167, 2333)
    assert interpolated(table, 8000).tokens == (3200, 2400, 2400)
    assert interpolated(table, 24000).tokens == (12000, 8000, 4000)
    assert interpolated(table, 4).tokens == (2, 1, 1)


@st.composite
def tables(draw):
    """Draw a table of partitions for one number of devices, and a length."""
    devices = draw(st.integers(1, 6))
    pieces = st.lists(st.integers(1, 500), min_size=devices, max_size=devices)
    table = draw(st.lists(pieces, min_size=1, max_size=4))
    return [Partition(tuple(tokens)) for tokens in table], draw(st.integers(devices, 3000))


@given(tables())
def test_interpolated_sums_to_the_length(case):
    table, length = case
    partition = interpolated(table, length)
    assert partition.length == length
    assert len(partition.tokens) == len(table[0].tokens)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_attention_is_shared_as_the_closed_form(devices):
    # Equal areas of the causal triangle: chunk i ends at T √((i + 1) / U), with two devices T / √2.
    length = 65536
    found = searched(length, devices, ATTENTION, layers=10**9, link=FREE)
    expected = [length * sqrt((index + 1) / devices) for index in range(devices)]
    assert found.ends == pytest.approx(expected, abs=2)
    slowest, even = max(ATTENTION.seconds(found)), max(ATTENTION.seconds(Partition.even(length, devices)))
    assert slowest == pytest.approx(even / (2 - 1 / devices), rel=1e-3)


@pytest.mark.parametrize(
    "link", [FREE, lambda end: 1e-4 * end, lambda end: 4e-3 * end], ids=["free", "fast", "slow"]
)
@pytest.mark.parametrize("cost", [ATTENTION, ChunkCost(1e-3, 2e-4, 3e-5, 1e-5)], ids=["attention", "all"])
@pytest.mark.matrix
def test_search_as_brute_force(cost, link):
    length, devices = 48, 4

    def ttft(partition):
        return predicted_ttft(partition, cost, layers=LAYERS, link=link)

    cuts = combinations(range(1, length), devices - 1)
    least = min(ttft(Partition.ending_at([*ends, length])) for ends in cuts)
    found = searched(length, devices, cost, layers=LAYERS, link=link)
    assert ttft(found) <= 1.01 * least
    assert ttft(found) < 0.95 * ttft(Partition.even(length, devices))


def test_search_of_one_device_and_of_as_many_as_tokens():
    search = partial(searched, cost=ATTENTION, layers=LAYERS, link=FREE)
    assert search(4096, 1) == Partition((4096,))
    assert search(5, 5) == Partition.even(5, 5)


def test_fit_finds_what_times_were_made_of():
    cost = ChunkCost(call=2e-3, token=3e-5, past=4e-9, own=2e-9)
    partitions = [Partition((n, m)) for n in (500, 4000, 30000) for m in (700, 20000)]
    fitted = ChunkCost.fit({each: sum(cost.seconds(each)) for each in partitions})
    assert fitted.seconds(Partition((1000, 9000))) == pytest.approx(cost.seconds(Partition((1000, 9000))))
    assert fitted.past == pytest.approx(cost.past)
    assert fitted.own == pytest.approx(cost.own)


@pytest.mark.parametrize("token", [0.0, 1e-4, 1e-2])
def test_ttft_as_played_out_layer_by_layer(token):
    def link(end):
        return token * end

    cost, partition = ChunkCost(0.01, 1e-4, 2e-7, 1e-7), Partition((900, 700, 300, 148))
    ready, done, arrived = ([0.0] * 4 for _ in range(3))
    for _ in range(LAYERS):
        for device, seconds in enumerate(cost.seconds(partition)):
            if device:
                busy = link(partition.starts[device]) / LAYERS
                arrived[device] = max(arrived[device], ready[device - 1]) + busy
            ready[device] = max(done[device], arrived[device])
            done[device] = ready[device] + seconds / LAYERS
    assert predicted_ttft(partition, cost, layers=LAYERS, link=link) == pytest.approx(done[-1])


def test_bytes_of_even_pieces_are_those_of_the_paper():
    # Eq. 7: (p - 1) / 2 of the C keys and values.
    plan = CompressionPlan.full(LLAMA)
    sent = handed_bytes(plan, Partition.even(4096, 4), capacity=4096)
    token = plan.bytes(4096) // 4096
    assert sent == (1024 * token, 2048 * token, 3072 * token, 0)
    assert sum(sent) == 3 * 4096 * token // 2


def test_slots():
    assert cache_slots(Partition((3, 18, 40)), 20, 61) == (24, 24, 61)
    assert cache_slots(Partition((3, 57, 1)), 20, 61) == (24, 61, 61)
    assert cache_slots(Partition((3,)), 20, 16) == (16,)
