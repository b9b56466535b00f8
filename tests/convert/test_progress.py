"""Progress: plain lines without a terminal, bars with one, and a fake clock."""

import itertools
import time

import pytest

from convert import progress


@pytest.fixture
def clock(monkeypatch):
    """Replace the clock by one that advances a second per call."""
    seconds = itertools.count()
    monkeypatch.setattr(progress, "monotonic", lambda: next(seconds))


@pytest.fixture
def terminal(monkeypatch):
    """Make standard error look like a terminal."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")


def test_plain_lines_at_the_ends_and_now_and_then(clock, capsys):
    assert list(progress.track(range(25), "moments")) == list(range(25))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "moments: 0 of 25",
        "moments: 10 of 25 (40 %), 10 s",
        "moments: 20 of 25 (80 %), 20 s",
        "moments: 25 of 25 (100 %), 25 s",
    ]


def test_slow_work_is_noted_unless_it_has_begun_to_print(capsys, monkeypatch):
    monkeypatch.setattr(progress, "INTERVAL", 0.01)
    with progress.noted_if_slow("slow") as cancel:
        cancel()
        time.sleep(0.1)
    with progress.noted_if_slow("still at work"):
        time.sleep(0.1)
    assert capsys.readouterr().err == "still at work\n"


def test_lines_come_with_the_work(capsys):
    steps = progress.track([1, 2], "layers")
    next(steps)
    assert capsys.readouterr().err == "layers: 0 of 2\n"
    next(steps)
    assert capsys.readouterr().err == ""
    assert list(steps) == []
    assert capsys.readouterr().err.startswith("layers: 2 of 2 (100 %)")


def test_work_that_breaks_off_says_no_more(capsys):
    for _ in progress.track(range(3), "layers"):
        break
    assert capsys.readouterr().err == "layers: 0 of 3\n"


@pytest.mark.parametrize(("items", "shown"), [(range(3), False), ((), True)])
def test_nothing_to_show(capsys, terminal, items, shown):
    assert list(progress.track(items, "layers", shown=shown)) == list(items)
    assert capsys.readouterr() == ("", "")


def test_counts_say_news_at_once_and_the_rest_now_and_then(clock, capsys):
    with progress.counted("plans", "the unmodified model") as show:
        for text in ("none", "none", "half", *["half"] * 11, "third"):
            show(text)
    assert capsys.readouterr().err.splitlines() == [
        "the unmodified model",
        "plans: 1, 1 s: none",
        "plans: 3, 3 s: half",
        "plans: 13, 13 s: half",
        "plans: 15, 15 s: third",
    ]


def test_bars_on_a_terminal(terminal, capsys):
    assert list(progress.track(range(3), "moments")) == [0, 1, 2]
    with progress.counted("plans", "the unmodified model") as show:
        show("best: none")
        show("best: half")
    out, err = capsys.readouterr()
    assert out == ""
    assert "100%" in err
    assert "moments: " not in err
    assert "plans: 2" in err
    assert "best: half" in err
