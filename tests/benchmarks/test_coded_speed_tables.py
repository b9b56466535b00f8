"""What tables say of the speed of coded caches, where rows are there and where they are not."""

import json

import pytest

from benchmarks import coded_speed_tables as tables

TIMES = {"ms": 0.5, "peer_ms": 1.0}
ROWS = {
    "coded chunks": {"kind": "prompt chunk", "heads": "MHA", "T": 1024, "S": 32768, "cost": 0.5},
    "coded selection": {"kind": "selection", "B": 16, "K": 8, "S": 32768, "k": 1024, "speedup": 2.0},
    "coded prompts": {"kind": "encode", "heads": "GQA-4", "S": 8192, "bandwidth": 0.5},
    "new tokens": {"kind": "new tokens", "heads": "MHA", "B": 8, "T": 1, "turning_ms": 0.25},
}
LINES = {
    "coded chunks": "| MHA | 1,024 | 32,768 | 0.500 | 1.000 | 0.50x |",
    "coded selection": "| 128 | 32,768 | 1,024 | 0.500 | 1.000 | 2.00x |",
    "coded prompts": "| GQA-4 | 8,192 | 0.500 | 50% |",
    "new tokens": "| MHA | 8 | 1 | 0.5000 | 1.0000 | 0.2500 |",
}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes rows where tables read them."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    return lambda name, *rows: (tmp_path / f"{name}.json").write_text(json.dumps({"results": rows}))


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_a_kind_are_a_table_and_no_rows_none(written, name):
    others = [ROWS[other] | TIMES for other in ROWS if other != name]
    written("coded-h200", *others)
    assert tables.TABLES[name]() == ""
    written("coded-h200", *others, ROWS[name] | TIMES)
    heads, _, line = tables.TABLES[name]().splitlines()
    assert line == LINES[name]
    assert heads.count("|") == line.count("|")


def test_a_searched_plan_has_a_name_and_quality_where_it_was_judged(written):
    row = {"shape": "Llama-2-7B", "kind": "searched", "ms": [8.0], "speedup": 2.0, "tokens": 10**6}
    row |= {"tokens_beside_dense": 4.0, "kernels": {"choosing": 1.0, "new tokens": 0.1}, "quality": None}
    judged = row | {"quality": {"increase": 0.005, "retention": {"lookup": 0.97, "needles": 0.99}}}
    written("coded-models-h200", row, judged)
    _, _, *lines = tables.TABLES["coded models"]().splitlines()
    line = "| Llama-2-7B | searched plan | 8.00 | 2.00x | 1.00, 0.10 | 1.00 M, 4.00x |"
    assert lines == [f"{line} – | – |", f"{line} +0.50% | 0.97 |"]
