"""Traces as they are read, and the counts of a replay."""

import gzip
import json
from dataclasses import replace

import pytest
from conftest import LLAMA, TinyModel

from benchmarks.serving.models import ServedModel
from benchmarks.serving.replay import Arrival, Served, arrivals, main
from benchmarks.serving.replay import Options as ReplayOptions

ONE_LAYER = replace(LLAMA, layers=LLAMA.layers[:1])
"""A model of one layer, since each of an engine's programs compiles all layers."""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:04.1000000,20,3
2023-11-16 18:17:03.9799600,48,5
2023-11-16 18:17:04.2000000,4000,5
"""


@pytest.fixture
def azure(tmp_path):
    path = tmp_path / "azure.csv.gz"
    path.write_bytes(gzip.compress(AZURE.encode()))
    return path


def test_traces_begin_at_zero_and_ascend(azure, tmp_path):
    found = arrivals(azure)
    assert [(each.prompt, each.answer) for each in found] == [(48, 5), (20, 3), (4000, 5)]
    assert [each.time for each in found] == pytest.approx([0, 0.12004, 0.22004])
    lines = [{"timestamp": 1500, "input_length": 700, "output_length": 9, "hash_ids": [0, 7]}]
    lines.append({"timestamp": 3000, "input_length": 600, "output_length": 2, "hash_ids": [0, 8]})
    path = tmp_path / "mooncake.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    one, other = arrivals(path)
    assert (one, other) == (Arrival(0, 700, 9, (0, 7)), Arrival(1.5, 600, 2, (0, 8)))
    with pytest.raises(ValueError, match="must end in one of"):
        arrivals(tmp_path / "trace.txt")


def test_requests_of_one_time_are_spread_up_to_the_next(tmp_path):
    path = tmp_path / "mooncake.jsonl.gz"
    lines = [
        {"timestamp": time, "input_length": 5, "output_length": 1, "hash_ids": []}
        for time in (0, 0, 0, 3000, 3000)
    ]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    assert [each.time for each in arrivals(path)] == [0, 1, 2, 3, 3]


def test_prompts_share_what_their_hashes_share():
    one, other = (Arrival(0, 700, 1, blocks).tokens(0, 90) for blocks in ((0, 7), (0, 8)))
    assert len(one) == len(other) == 700
    assert one[:512] == other[:512]
    assert one[512:] != other[512:]
    plain = Arrival(0, 40, 1)
    assert plain.tokens(1, 90) == plain.tokens(1, 90) != plain.tokens(2, 90)


def test_objectives():
    served = Served(Arrival(0, 1000, 3), came=1.0, first=6.9, last=7.1, queued=2.0, tokens=3)
    assert served.attained
    assert served.parts()["prefill"] == pytest.approx(3.9)
    served.first = 7.05
    assert not served.attained, "more than 6 s for the first token"
    served.first, served.last = 6.9, 7.2
    assert not served.attained, "0.15 s a token"


@pytest.mark.full
def test_a_replay_counts_what_was_served(azure, tmp_path):
    TinyModel(ONE_LAYER).write(tmp_path / "tiny")
    options = ReplayOptions(
        ServedModel(tmp_path / "tiny"),
        azure,
        speeds=(1.0, 10.0),
        rows=2,
        max_model_len=128,
        chunk=64,
        results=tmp_path,
    )
    main(options)
    (tmp_path / "other").symlink_to(tmp_path / "tiny")
    main(replace(options, served=ServedModel(tmp_path / "other"), speeds=(5.0,)))
    one, other = json.loads((tmp_path / "serving.json").read_text())["results"]
    in_time = [row["rate"] for row in one["rows"] if row["attained"] == 1]
    assert (one["left_out"], one["sustained"]) == (1, max(in_time, default=None))
    assert (tmp_path / "serving.png").exists()
    assert [row["speed"] for row in one["rows"] + other["rows"]] == [1, 10, 5]
    for row in one["rows"]:
        assert row["requests"] == 2
        # The first speed includes compilation, so that how many requests are in time depends on the host.
        assert (row["goodput"] > 0) == (row["attained"] > 0)
        assert row["queue"]["mean"] + row["prefill"]["mean"] == pytest.approx(row["first_token"]["mean"])


@pytest.mark.full
def test_a_replay_whose_requests_fail_tells_no_times(azure, tmp_path, monkeypatch):
    TinyModel(ONE_LAYER).write(tmp_path / "tiny")

    def fail(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr("zdc_jax.engine.runner.Runner.prefill", fail)
    served = ServedModel(tmp_path / "tiny")
    options = ReplayOptions(served, azure, rows=2, max_model_len=128, results=tmp_path)
    with pytest.raises(SystemExit, match="2 of 2 requests failed; the first: RuntimeError: no memory"):
        main(options)
    assert not (tmp_path / "serving.json").exists()


def test_a_trial_has_a_name_of_its_own():
    def of(**options):
        return ServedModel(shape="Llama-2-13B", **options).name

    assert of() == "Llama-2-13B, dense"
    assert len({of(), of(layers=4), of(growth=3), of(kind="near"), of(mesh="sequence=2")}) == 5
