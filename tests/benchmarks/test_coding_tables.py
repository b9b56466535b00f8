"""What tables say of the study of codes, and which trials of a search are of single layers."""

import json

import numpy as np
import pytest
from conftest import LLAMA

from benchmarks.quality import coding_tables
from benchmarks.quality.coded_layers import single_layers
from zdc_jax.errors import PlanError
from zdc_jax.methods.coded import Settings
from zdc_jax.plan import CompressionPlan, LayerRanks
from zdc_jax.planning.layer_costs import Precision, build_layer

EIGHT = Precision(32, 8)


def entry(layers, cost: float) -> dict:
    """A line of a journal; None: of the unmodified model."""

    def made():
        return CompressionPlan.of_layers(
            LLAMA, layers, window=8, method="coded", settings=Settings(index=0, read=0)
        )

    plan = None if layers is None else made().to_json()
    logs = {"copy": [-cost, -cost], "hard": [-9.0]}
    return {"key": "k", "plan": plan, "nll": [2 + cost], "logs": logs, "scores": {"copy": 0.9, "hard": 0.1}}


def test_single_layers_are_those_that_alone_are_lowered(tmp_path):
    whole, journal = [build_layer(EIGHT, EIGHT)] * LLAMA.num_layers, tmp_path / "j"

    def with_one(ranks):
        return [whole[0], ranks, *whole[2:]]

    entries = [
        entry(None, 0.0),
        entry(whole, 0.05),
        entry(with_one(build_layer(Precision(16, 2, 8, 4), EIGHT)), 0.1),
        entry(with_one(build_layer(EIGHT, Precision(32, 3))), 0.2),
        entry([LayerRanks(0, 0), *whole[1:]], 0.3),
        entry([build_layer(Precision(32, 2), EIGHT)] * LLAMA.num_layers, 0.9),
    ]
    journal.write_text("".join(json.dumps(each) + "\n" for each in entries))
    rows = single_layers(journal)
    assert [(row["layer"], row["lowered"]) for row in rows] == [
        (0, "no far tokens"),
        (1, "16 coordinates of keys in 2 bits"),
        (1, "32 coordinates of values in 3 bits"),
    ]
    for row, cost in zip(rows, (0.3, 0.1, 0.2), strict=True):
        assert row["increase"] == pytest.approx(np.expm1(cost))
        assert row["retention"] == {"copy": pytest.approx(np.exp(-cost))}
    journal.write_text(json.dumps(entries[0]) + "\n")
    with pytest.raises(PlanError, match="no trial in which one layer alone differs from 8 bits"):
        single_layers(journal)


def test_tables_tell_no_bytes_of_what_was_simulated(monkeypatch):
    task = {"retention": 0.5}
    row = {
        "method": "codes: keys 4, values 4 bits",
        "context": 4096,
        "bytes_share": 0.25,
        "read_share": 0.125,
        "increase": 0.01,
        "interval": [0.005, 0.015],
        "tasks": dict.fromkeys("abcdef", task),
    }
    simulated = row | {"method": "codes: two scales", "bytes_share": 1.06, "read_share": 1.06}
    other = row | {"method": "bases (stacked, stacked): keys 2, values 8 bits"}
    monkeypatch.setattr(coding_tables, "_read", lambda name: {"rows": [row, simulated, other]})
    _, _, real, not_real = coding_tables.coding_table("codes").splitlines()
    assert real.startswith("| keys 4, values 4 bits | 25.0% | 12.5% | +1.00 % [+0.50, +1.50] | 0.50 |")
    assert not_real.startswith("| two scales | – | – |")
    assert "| stacked, stacked: keys 2, values 8 bits | 25.0% |" in coding_tables.coding_table("bases")
