"""What tables say of the study of block lists."""

import json

import pytest

from benchmarks.quality import block_tables

TASK = {"retention": 0.98, "counts": True}
ROW = {
    "context": 4096,
    "split": "heldout",
    "seed": 16,
    "documents": 4,
    "density": 0.3,
    "density_by_layer": [0.2, 0.4],
    "density_by_length": {"2048": 0.4},
    "increase": 0.005,
    "interval": [-0.001, 0.01],
    "tasks": {
        how: {"needles": TASK, "lookup": {"retention": 0.1, "counts": False}} for how in ("lists", "all")
    },
    "exponent": 0.6,
    "extrapolated": {rule: {"32768": 0.1, "131072": 0.05} for rule in ("fitted", "constant", "proportional")},
}


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("keys R=32 m=8 mass=0.95", "keys, 32 coordinates, 8 queries, 95% of the mass"),
        ("recent share=0.33", "the last blocks, 33% of the blocks"),
        (
            "means R=64 m=8 count=16 worst",
            "mean keys, 64 coordinates, 8 queries, 16 blocks, by the query that wants it most",
        ),
        (
            "keys R=64 m=64 mass=0.98 Q=64 P=64 w=5",
            "keys, 64 coordinates, 64 queries, 98% of the mass, window 5, blocks of 64 by 64",
        ),
    ],
)
def test_labels_in_words(label, name):
    assert block_tables.name_of(label) == name


def test_tables_show_rows_by_length_and_leave_windows_out_of_growth(monkeypatch, tmp_path):
    """A task that the unmodified model cannot do is not the lowest."""
    rows = [ROW | {"choice": choice} for choice in ("keys R=32 m=8 mass=0.95", "recent share=0.5")]
    (tmp_path / f"{block_tables.NAME}.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(block_tables, "RESULTS", tmp_path)
    _, _, *lines = block_tables.judged_table().splitlines()
    assert len(lines) == 2
    assert "30.0% | 20% to 40% | +0.50 % [-0.10, +1.00] | 0.98 needles | 0.98 needles" in lines[0]
    _, _, *lines = block_tables.growth_table().splitlines()
    assert len(lines) == 1
    assert "| 40.0% | 30.0% | – | 0.60 | 10.0% | 5.0% | 5.0% | 5.0% |" in lines[0]
