"""Comparison of servers over HTTP: loads, command lines, the client, and servers that fail."""

import asyncio
import gzip
import json
import sys
from pathlib import Path

import pytest
from running_server import Running

from benchmarks.serving import compare, systems
from benchmarks.serving.client import MODEL, encode_requests, get, replay_load
from benchmarks.serving.compare import Options, main, make_limits, make_loads, make_systems
from benchmarks.serving.loads import Load, parse_loop, slice_trace
from benchmarks.serving.random_folder import Options as FolderOptions
from benchmarks.serving.random_folder import write_folder
from benchmarks.serving.replay import Arrival, Served
from benchmarks.serving.systems import Limits, make_ours, make_vllm
from zdc_jax.loading import load
from zdc_jax.server.http_settings import HttpSettings

ROOT = Path(__file__).parents[2]
LIMITS = Limits(max_model_len=64, slots=2, memory=0.8, queue=9, dtype="bfloat16")
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:{second:02}.0000000,{prompt},3\n"
    for second, prompt in ((0, 9), (10, 20), (14, 900), (18, 30), (40, 9))
)
DIES = f"""#!{sys.executable}
import asyncio, os, sys
from benchmarks.serving import stub_server

async def answer(reader, writer):
    if (await reader.readline()).startswith(b"POST"):
        print("out of memory", flush=True)
        os._exit(9)
    writer.write(b"HTTP/1.1 200 OK\\r\\n\\r\\n" + stub_server.VERSION)
    writer.close()

stub_server.answer = answer
asyncio.run(stub_server.serve(int(sys.argv[-1])))
"""
WITH_A_CHILD = f"""#!{sys.executable}
import asyncio, subprocess, sys
from benchmarks.serving import stub_server

subprocess.Popen(["sleep", "1000"])
asyncio.run(stub_server.serve(int(sys.argv[-1])))
"""


@pytest.fixture
def model(tmp_path):
    """Return a folder that vLLM would serve with random weights."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 90}')
    return tmp_path / "model"


@pytest.fixture
def of_this_process(monkeypatch):
    """Skip the process that reads the environment."""
    monkeypatch.setattr(compare, "ask_environment", lambda: {"device": "cpu", "commit": "abc"})
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def write_program(folder: Path, text: str) -> str:
    """Write a program that stands for `vllm`."""
    path = folder / "vllm"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def read_rows(options: Options, load: str) -> list[dict]:
    path = options.results / f"compare-model-{load}.json"
    return json.loads(path.read_text())["results"]


def test_loops():
    load = parse_loop("8000/128@3x2")
    assert load == Load("8000/128@3", (Arrival(0, 8000, 128),) * 6, clients=3)
    assert load.file_name == "8000-128-3"
    assert len(parse_loop("8000/128@3").requests) == 24
    assert load.take_first(3, 64).requests == (Arrival(0, 8000, 64),) * 3


@pytest.mark.parametrize("text", ["8000", "8000/128", "8000/128@0", "0/1@1", "a/1@1", "1/1@1x", "-1/1@1"])
def test_a_wrong_loop_is_refused(text, model):
    options = Options(model, 64, loop=(text,))
    wanted = r"must be PROMPT/OUTPUT@CLIENTS or PROMPT/OUTPUT@CLIENTSxREQUESTS in whole numbers above 0"
    with pytest.raises(SystemExit, match=f"--loop {text}: {wanted}"):
        main(options)


def test_a_slice_is_scaled_to_a_rate(tmp_path):
    path = tmp_path / "azure.csv.gz"
    path.write_bytes(gzip.compress(AZURE.encode()))
    slow, fast = slice_trace(path, start=10, seconds=20, rates=[0.1, 0.5], max_model_len=64)
    # Two of three requests fit into the context; two in 20 s are the recorded rate of 0.1.
    assert [(one.time, one.prompt) for one in slow.requests] == [(0, 20), (8, 30)]
    assert [one.time for one in fast.requests] == pytest.approx([0, 1.6])
    assert (fast.name, fast.file_name) == ("azure-10-20s@0.5", "azure-10-20s-0.5")
    assert (fast.clients, fast.left_out) == (None, 1)
    assert [one.time for one in slow.take_first(2, 64).requests] == [0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "no load: pass --loop PROMPT/OUTPUT@CLIENTS, or --trace with --rates"),
        ({"loop": ("60/5@1",)}, "--loop 60/5@1: has 65 tokens, more than --max-model-len 64; raise it"),
        ({"loop": ("6/5@1",), "slots": 0}, "--slots 0: must be at least 1"),
        ({"loop": ("6/5@1",), "memory": 1.5}, "--memory 1.5: must lie between 0 and 1"),
        ({"loop": ("6/5@1",), "quality": {"ours": 1}}, "--quality ours: must be one of ours-16, ours-plan"),
        ({"loop": ("6/5@1",), "model": Path("none")}, "--model none: no manifest.json, and no config.json"),
        ({"rates": (1.0,)}, "a trace needs rates; pass both"),
        ({"trace": Path("a.csv.gz"), "rates": (0.0,)}, "--rates 0: must be above 0"),
        ({"trace": Path("none.csv.gz"), "rates": (1.0,)}, "--trace none.csv.gz: .*No such file"),
        ({"trace": Path("a.txt"), "rates": (1.0,)}, "--trace a.txt: .*must end in one of"),
    ],
)
def test_wrong_options_are_refused_before_any_work(changes, message, model):
    with pytest.raises(SystemExit, match=message):
        main(Options(**{"model": model, "max_model_len": 64} | changes))


def test_an_empty_slice_is_refused(tmp_path):
    path = tmp_path / "azure.csv.gz"
    path.write_bytes(gzip.compress(AZURE.encode()))
    with pytest.raises(SystemExit, match=r"--start 20 --seconds 5: .* no request there of at most"):
        slice_trace(path, start=20, seconds=5, rates=[1], max_model_len=64)


def test_limits_are_equal_for_all_systems(model):
    options = Options(model, 64, loop=("6/5@1x3", "6/5@4x3"), memory=0.8)
    ours, plan, vllm, fp8 = make_systems(options, make_limits(options, make_loads(options)))
    ours_line, plan_line, vllm_line, fp8_line = (" ".join(each.command) for each in (ours, plan, vllm, fp8))
    assert ours_line.endswith(
        f"-m convert.cli.entry serve {model} --name model --plan none --dtype bfloat16 --max-model-len 64 "
        "--max-sequences 4 --max-waiting 12 --no-access-log"
    )
    assert ours.environment == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.8"}
    assert plan_line == ours_line.replace("--plan none", "--plan 3bit")
    assert vllm_line == (
        f"vllm serve {model} --served-model-name model --dtype bfloat16 --max-model-len 64 --max-num-seqs 4 "
        "--gpu-memory-utilization 0.8 --kv-cache-dtype auto --enable-prefix-caching "
        "--disable-uvicorn-access-log --generation-config vllm --load-format dummy --skip-tokenizer-init"
    )
    assert vllm.environment == {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
    assert fp8_line == vllm_line.replace("--kv-cache-dtype auto", "--kv-cache-dtype fp8")


def test_vllm_loads_what_its_folder_has(model):
    (model / "model-00001-of-00002.safetensors").touch()
    (model / "tokenizer.json").touch()
    command = make_vllm("vllm-16", model, "auto", LIMITS, "vllm").command
    assert command[-1] == "vllm", "neither random weights nor a missing tokenizer"


def test_prompts_differ_between_requests_and_not_between_runs():
    load = parse_loop("8/2@2x1")
    one, other = bodies = encode_requests(load, vocab_size=90, seed=0, salt="a")
    assert bodies == encode_requests(load, vocab_size=90, seed=0, salt="a")
    assert bodies != encode_requests(load, vocab_size=90, seed=1, salt="a")
    one, other = json.loads(one), json.loads(other)
    assert one.pop("prompt") != other.pop("prompt")
    assert one == other
    expected = {"max_tokens": 2, "ignore_eos": True, "temperature": 0, "cache_salt": "a", "model": MODEL}
    assert one == expected | {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture
def our_port():
    """Serve a fake engine with our server, and yield its port."""
    running = Running(HttpSettings(port=0), name=MODEL, api_keys=())
    yield running.http.base_url.port
    running.end()


def replay(port: int, load: Load) -> list[Served]:
    return asyncio.run(replay_load(port, load, encode_requests(load, vocab_size=90, seed=0, salt="a")))


def test_a_loop_on_our_server(our_port):
    served = replay(our_port, parse_loop("8/5@2x3"))
    assert [one.error for one in served] == [None] * 6
    assert [one.tokens for one in served] == [5] * 6
    assert all(one.came < one.first <= one.last for one in served)
    ends = sorted(one.last for one in served)
    starts = sorted(one.came for one in served)
    assert all(start >= end for start, end in zip(starts[2:], ends[:-2], strict=True)), "two at a time"
    assert json.loads(asyncio.run(get(our_port, "/version"))[1])["version"]


def test_requests_of_a_trace_come_at_their_times(our_port):
    load = Load("trace", (Arrival(0.0, 8, 2), Arrival(0.2, 8, 2)))
    first, second = replay(our_port, load)
    assert (first.came, second.came) == (0, 0.2)
    assert first.first > 0
    assert second.first > 0.2


def test_refused_requests_have_errors(our_port):
    (served,) = replay(our_port, parse_loop("300/5@1x1"))
    assert "status 400" in served.error
    row = compare.summarize([served], parse_loop("300/5@1x1"))
    assert row["failed"].startswith("1 requests failed; the first: status 400")
    (served,) = replay(1, parse_loop("8/5@1x1"))
    assert served.error, "no server"


def test_times_of_a_row():
    served = [
        Served(Arrival(0.5, 8, 3), 0.5, 1.0, 2.0, tokens=3),
        Served(Arrival(2, 8, 1), 2, 9, 9, tokens=1),
    ]
    row = compare.summarize(served, Load("trace", (served[0].arrival, served[1].arrival)))
    assert (row["rate"], row["throughput"]) == (1.0, pytest.approx(4 / 9))
    assert (row["ttft"]["p50"], row["jct"]["p50"]) == (3.75, 4.25)
    assert row["tpot"]["p50"] == 0.5, "one token has no time between tokens"
    assert (row["attained"], row["goodput"]) == (0, 0)
    assert compare.summarize(served, Load("8/3@2", (), clients=2))["rate"] == pytest.approx(2 / 9)
    assert compare.summarize(served[1:], Load("trace", ()))["tpot"] is None


@pytest.mark.usefixtures("of_this_process")
def test_the_client_is_measured_and_failures_are_rows(model, tmp_path, capsys):
    program = write_program(tmp_path, "#!/bin/sh\necho loading\necho no memory\nexit 3\n")
    options = Options(
        model,
        64,
        systems=("vllm-16", "vllm-fp8"),
        measure_client=True,
        loop=("20/4@2",),
        vllm=program,
        quality={"vllm-fp8": 0.01},
        results=tmp_path,
    )
    main(options)
    stub, dead, fp8 = read_rows(options, "20-4-2")
    assert (stub["system"], stub["version"], stub["requests"]) == ("stub", "stub", 16)
    assert (stub["each"]["tokens"], stub["each"]["prompt"]) == ([4] * 16, [20] * 16)
    assert stub["ttft"]["p50"] > 0
    assert (dead["version"], dead["failed"]) == (None, "the server ended with status 3")
    assert (dead["log"], dead["command"][:2]) == (["loading", "no memory"], [program, "serve"])
    assert (dead["quality"], fp8["quality"]) == (None, 0.01)
    assert "vllm-16 20/4@2: the server ended with status 3\nloading\nno memory\n" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"holds rows of other settings \(slots\); give another name"):
        main(Options(model, 64, loop=("20/4@2",), slots=3, results=tmp_path))


@pytest.mark.usefixtures("of_this_process")
def test_a_server_that_dies_leaves_a_row_for_each_load(model, tmp_path):
    common = {"systems": ("vllm-16",), "loop": ("20/4@1x1", "8/2@1x1"), "results": tmp_path}
    options = Options(model, 64, vllm=write_program(tmp_path, DIES), **common)
    main(options)
    for name in ("20-4-1", "8-2-1"):
        (row,) = read_rows(options, name)
        assert "failed" in row
        assert row["log"] == ["out of memory"]
    main(Options(model, 64, vllm="no-such-program", **common))
    (row,) = read_rows(options, "8-2-1")  # In place of the earlier row.
    assert row["failed"].startswith("cannot start no-such-program: ")


def test_children_of_a_server_end_with_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    system = systems.System("child", (write_program(tmp_path, WITH_A_CHILD),))
    with systems.run_server(system, 20) as server:
        session = server._process.pid
        assert len(systems.list_session(session)) == 2
    assert systems.list_session(session) == []


def test_a_server_that_never_answers(tmp_path):
    system = systems.System("sleeps", (write_program(tmp_path, "#!/bin/sh\nexec sleep 1000\n"),))
    with (
        pytest.raises(systems.ServerFailed, match=r"the server did not answer within 0.1 s"),
        systems.run_server(system, 0.1),
    ):
        pass


def test_a_random_folder_runs_presets(tmp_path):
    write_folder(FolderOptions(tmp_path / "model", "tiny", layers=1))
    model = load(tmp_path / "model", "3bit")
    assert model.plan.layers[0].shift
    assert model.tokenizer.decode([5, 6]) == "w5 w6"
    assert compare.read_vocab_size(tmp_path / "model") == 97
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]


@pytest.mark.full
def test_our_server_from_end_to_end(tmp_path, monkeypatch):
    def make_small(*settings):
        system = make_ours(*settings)
        return systems.System(system.name, (*system.command, "--chunk", "32"), system.environment)

    monkeypatch.setattr(compare, "make_ours", make_small)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    write_folder(FolderOptions(tmp_path / "model", "tiny", layers=1))
    options = Options(tmp_path / "model", 64, systems=("ours-plan",), loop=("40/8@1",), results=tmp_path)
    main(options)
    (row,) = read_rows(options, "40-8-1")
    assert (row["system"], row["requests"], row["attained"]) == ("ours-plan", 8, 1)
    assert row["each"]["tokens"] == [8] * 8
    assert 0 < row["ttft"]["p50"] < row["jct"]["p50"]
    run = json.loads((tmp_path / "compare-model-40-8-1.json").read_text())
    assert (run["device"], run["config"]["max_model_len"]) == ("cpu", 64)
