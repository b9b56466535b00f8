"""Two processes on one mesh, compared with one device and timed; processes that wait for an absent one."""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import LLAMA, TinyModel

from convert.cli.main import main
from zdc_jax import generate, load
from zdc_jax.errors import ProcessError
from zdc_jax.parallel.processes import initialize, meet

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@pytest.mark.full
def test_two_processes_give_what_one_gives(tmp_path, capsys):
    TinyModel(replace(LLAMA, layers=LLAMA.layers[:1] * 2, num_heads=8, num_kv_heads=2)).write(
        tmp_path / "model"
    )
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, str(Path(__file__).parent / "process.py"), str(tmp_path), address]
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    processes = [subprocess.Popen([*command, str(index)], **options) for index in range(2)]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs

    alone = load(tmp_path / "model")
    rows = generate(alone, [[5, 6, 7], [9]], 20, stop_tokens=()).completions
    for index in range(2):
        streamed = np.load(tmp_path / f"streamed-{index}.npy")
        assert [tuple(row) for row in streamed] == [row.tokens for row in rows]
    tokens = np.random.default_rng(0).integers(3, 90, (1, 61), dtype=np.int32)
    longer = np.asarray(alone.network.hidden(jnp.asarray(np.append(tokens, tokens[:, :1], axis=1))))[0]
    expected = longer[[60, 60, 61], None]
    for index in range(2):
        got = np.load(tmp_path / f"last-{index}.npy")
        assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max()
    arguments = ["generate", str(tmp_path / "model"), "w5 w6 w7 w8 w9 w10", "w3", "--max-new-tokens", "9"]
    assert main(arguments) == 0
    texts = capsys.readouterr().out.splitlines()[:2]
    assert [line for line in outputs[0][0].splitlines() if line.startswith("w")] == texts
    assert "w5" not in outputs[1][0]  # Only process 0 prints.

    written = json.loads((tmp_path / "sequence-parallel-tiny-4-2-processes-gloo.json").read_text())
    dense, runahead = (written["results"][f"{name} 61"] for name in ("dense", "runahead"))
    assert written["results"]["link_rate"] > 0
    assert all(dense[figure][0] > 0 for figure in ("attention", "exchange", "far"))
    assert runahead["bytes"]["compiled"] == runahead["bytes"]["formula"]
    assert runahead["bytes"]["padding"] == [0, 1, 1, 1]
    assert runahead["first_token"][0] > 0


def test_processes_that_never_come_are_named():
    port = free_port()
    with ThreadPoolExecutor() as pool:
        waits = [pool.submit(meet, "127.0.0.1", port, 4, index, 1.0) for index in (2, 0)]
        for wait in waits:
            with pytest.raises(ProcessError, match="num_processes=4: process 1, 3 did not connect"):
                wait.result()
    with pytest.raises(ProcessError, match=f"coordinator=127.0.0.1:{port}: process 0 did not answer"):
        meet("127.0.0.1", port, 2, 1, 0.2)
    with pytest.raises(ProcessError, match=r"num_processes=2: process 1 did not connect within 0\.2 s"):
        initialize(f"127.0.0.1:{port}", 2, 0, timeout=0.2)


def calling(port: int, line: bytes) -> socket.socket:
    """Return a connection to process 0, once it listens."""
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=20)
        except ConnectionRefusedError:
            continue
        connection.sendall(line)
        return connection


@pytest.mark.parametrize("line", [b"GET / HTTP/1.1", b"0", b"2", b"17"])
def test_strangers_are_not_counted(line):
    port = free_port()
    with ThreadPoolExecutor() as pool:
        waits = [pool.submit(meet, "127.0.0.1", port, 2, 0, 20.0)]
        with calling(port, line) as stranger:
            assert stranger.recv(1) == b""
        waits.append(pool.submit(meet, "127.0.0.1", port, 2, 1, 20.0))
        assert [wait.result() for wait in waits] == [None, None]


def test_who_says_nothing_is_hung_up_on():
    port = free_port()
    with ThreadPoolExecutor() as pool:
        wait = pool.submit(meet, "127.0.0.1", port, 2, 0, 0.3)
        with calling(port, b"") as silent:
            with pytest.raises(ProcessError, match="num_processes=2: process 1 did not connect"):
                wait.result()
            assert silent.recv(1) == b""


def test_a_process_that_calls_again_is_one_process():
    port = free_port()
    with ThreadPoolExecutor() as pool:
        waits = [pool.submit(meet, "127.0.0.1", port, 3, 0, 20.0)]
        with calling(port, b"1") as before, calling(port, b"1") as again:
            assert before.recv(1) == b""
            waits.append(pool.submit(meet, "127.0.0.1", port, 3, 2, 20.0))
            assert again.recv(64) == b"all present"
        assert [wait.result() for wait in waits] == [None, None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("host:1", 2, None), "process_id=None: give all three"),
        (("host:1", 2, 2), "process_id=2: must be at least 0 and below num_processes=2"),
        (("host", 2, 0), "coordinator='host': must be HOST:PORT"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ProcessError, match=message):
        initialize(*arguments)
