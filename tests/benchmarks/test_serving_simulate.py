"""Simulated requests, which take as long as their steps."""

import pytest

from benchmarks.serving.replay import Arrival
from benchmarks.serving.simulate import Cost, simulate

COST = Cost(
    token=1e-3,
    seen=1e-6,
    earlier=1e-5,
    another=5e-3,
    weights=0.04,
    joined=4e-3,
    step=0.02,
    stored=1e-4,
    cache_tokens=4096,
)
CHUNK = 256


def attention(begin: int, end: int) -> float:
    """Return the seconds of a chunk's attention, token by token, without products with weights."""
    return COST.seen * sum(position + 0.5 for position in range(begin, end)) + COST.earlier * begin


def decoding(*held: int) -> float:
    return COST.step + COST.stored * sum(held)


@pytest.mark.parametrize("tails", [False, True])
def test_one_request_takes_its_pieces_and_its_steps(tails):
    (one,) = simulate([Arrival(3.0, 300, 4)], COST, rows=2, chunk=CHUNK, tails=tails)
    # The last 44 tokens are padded to 64. The only marked page ends where they begin.
    first = CHUNK * COST.token + attention(0, CHUNK)
    assert one.first - one.came == pytest.approx(first + 64 * COST.token + attention(CHUNK, 300))
    steps = sum(COST.weights + decoding(held) for held in (301, 302, 303))
    assert one.last - one.first == pytest.approx(steps)
    assert one.tokens == 4


def test_few_tokens_take_as_long_as_the_weights():
    (one,) = simulate([Arrival(0.0, 20, 1)], COST, rows=2, chunk=CHUNK, tails=False)
    assert one.first == pytest.approx(COST.weights + attention(0, 20))


def test_pieces_of_two_texts_are_one_program_and_others_decode_beside_it():
    requests = [Arrival(0.0, 100, 4), Arrival(0.0, 250, 2)]
    second, first = simulate(requests, COST, rows=2, chunk=CHUNK, tails=False)
    # The rest of the first step reads the second prompt. Two programs would pad the chunks to 128 and 256.
    step = CHUNK * COST.token + attention(0, 100) + attention(0, CHUNK - 100) + COST.another
    assert first.first == pytest.approx(step)
    # The last 94 tokens of the second prompt are padded to 128.
    step += 128 * COST.token + attention(156, 250) + COST.joined + decoding(101)
    assert second.first == pytest.approx(step)
    assert second.last == pytest.approx(step + COST.weights + decoding(102, 251))
    assert first.last == pytest.approx(second.last + COST.weights + decoding(103))


def test_short_pieces_are_programs_of_their_own():
    requests = [Arrival(0.0, 60, 1), Arrival(0.0, 60, 1)]
    ended = simulate(requests, COST, rows=2, chunk=CHUNK, tails=False)
    assert ended[1].last == pytest.approx(2 * (64 * COST.token + attention(0, 60)))


def test_one_row_serves_one_after_another():
    ended = simulate([Arrival(0.0, 50, 1), Arrival(0.0, 60, 1)], COST, rows=1, chunk=CHUNK, tails=False)
    one, other = (64 * COST.token + attention(0, tokens) for tokens in (50, 60))
    assert [each.last for each in ended] == pytest.approx([one, one + other])
