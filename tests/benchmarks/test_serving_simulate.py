"""Simulated requests take what their steps do."""

import pytest

from benchmarks.serving.simulate import Cost, simulate
from benchmarks.serving.traces import Arrival

COST = Cost(
    token=1e-3, seen=1e-6, earlier=1e-5, weights=0.01, beside=4e-3, step=0.02, held=1e-4, cache_tokens=4096
)
CHUNK = 256


def piece(begin: int, end: int) -> float:
    """Seconds of a piece, token by token."""
    seen = sum(position + 0.5 for position in range(begin, end))
    return (end - begin) * COST.token + COST.seen * seen + COST.earlier * begin


def decoding(*held: int) -> float:
    return COST.weights + COST.step + COST.held * sum(held)


@pytest.mark.parametrize("tails", [False, True])
def test_one_request_takes_its_pieces_and_its_steps(tails):
    (one,) = simulate([Arrival(3.0, 300, 4)], COST, rows=2, chunk=CHUNK, tails=tails)
    # Behind a step that reads the end of a text its first token is known.
    assert one.first - one.came == pytest.approx(piece(0, CHUNK) + piece(CHUNK, 300))
    assert one.last - one.first == pytest.approx(decoding(301) + decoding(302) + decoding(303))
    assert one.tokens == 4


@pytest.mark.parametrize(("tokens", "weights"), [(250, COST.weights), (400, COST.beside)])
def test_a_second_request_is_read_while_the_first_decodes(tokens, weights):
    """Its piece shares weights with the token beside it where it is longer than half a chunk."""
    requests = [Arrival(0.0, 100, 4), Arrival(0.0, tokens, 2)]
    second, first = simulate(requests, COST, rows=2, chunk=CHUNK, tails=False)
    # What is left of the first step is read of the second prompt.
    step = piece(0, 100) + piece(0, CHUNK - 100)
    assert first.first == pytest.approx(step)
    step += piece(156, tokens) + decoding(101) - COST.weights + weights
    assert second.first == pytest.approx(step)
    assert second.last == pytest.approx(step + decoding(102, tokens + 1))
    assert first.last == pytest.approx(second.last + decoding(103))


def test_one_row_serves_one_after_another():
    ended = simulate([Arrival(0.0, 50, 1), Arrival(0.0, 60, 1)], COST, rows=1, chunk=CHUNK, tails=False)
    assert [one.last for one in ended] == pytest.approx([piece(0, 50), piece(0, 50) + piece(0, 60)])
