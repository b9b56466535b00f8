"""`zdc serve` as a client sees it: a separate process on a converted model."""

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import jax
import openai
import pytest
from conftest import LLAMA, TinyModel

from convert.cli.main import main
from zdc_jax import generate, load
from zdc_jax.server.api_keys import collect_keys
from zdc_jax.server.http_settings import HttpSettings


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "tiny"
    TinyModel(replace(LLAMA, layers=LLAMA.layers[:1])).write(path)
    return path


@pytest.fixture(scope="module")
def served(folder):
    """Start the server; yield its process, its address and the file of its log."""
    command = [sys.executable, "-m", "convert.cli.main", "serve", str(folder), "--port", "0"]
    command += ["--max-sequences", "2", "--chunk", "32", "--max-model-len", "128"]
    command += ["--name", "tiny", "--name", "org/small"]
    environment = os.environ | {"ZDC_API_KEY": "sesame", "JAX_PLATFORMS": "cpu"}
    log = folder.parent / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"serving tiny at (http://127\.0\.0\.1:\d+)\n", line)
        assert found, line
        try:
            yield process, found[1], log
        finally:
            process.kill()


@pytest.mark.skipif(find_spec("ray") is not None, reason="ray is installed")
def test_replicas_without_ray_are_one_line(folder, capsys):
    assert main(["serve", str(folder), "--replicas", "2"]) == 2
    assert capsys.readouterr().err == "error: --replicas 2: needs ray; run: pip install 'zdc-jax[ray]'\n"


def test_replicas_on_a_mesh_are_refused(folder, capsys):
    assert main(["serve", str(folder), "--replicas", "2", "--mesh", "model=2"]) == 2
    assert capsys.readouterr().err == (
        "error: --mesh model=2: not with --replicas 2, as each has one device; drop one flag\n"
    )


def test_replicas_leave_connections_to_haproxy(folder, capsys):
    assert main(["serve", str(folder), "--replicas", "2", "--keep-alive", "9"]) == 2
    assert capsys.readouterr().err == (
        "error: --keep-alive 9.0: not with --replicas 2, whose connections HAProxy holds; drop one flag\n"
    )


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--max-sequences", "0", "--max-sequences 0"),
        ("--chunk", "0", "--chunk 0"),
        ("--decode-steps", "0", "--decode-steps 0"),
        ("--max-model-len", "257", "--max-model-len 257"),
    ],
)
def test_an_engine_that_cannot_be_is_refused_before_the_model_is_loaded(
    folder, capsys, monkeypatch, flag, value, message
):
    monkeypatch.setattr("convert.cli.serve.load", lambda *_, **__: pytest.fail("the model was loaded"))
    assert main(["serve", str(folder), flag, value]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--port", "99999", "--port 99999: must be 0 to 65535"),
        ("--port", "-5", "--port -5: must be 0 to 65535"),
        ("--replicas", "0", "--replicas 0: must be at least 1"),
        ("--drain-seconds", "nan", "--drain-seconds nan: must be a finite number, at least 0"),
        ("--root-path", "llm/", "--root-path llm/: must start with / and not end with it, such as /llm"),
        ("--ssl-keyfile", "key.pem", "--ssl-keyfile key.pem: needs a certificate, too; add --ssl-certfile"),
        ("--keep-alive", "0", "--keep-alive 0.0: must be a finite number of seconds above 0"),
        ("--keep-alive", "inf", "--keep-alive inf: must be a finite number of seconds above 0"),
        (
            "--allowed-origins",
            "https://a.example/",
            "--allowed-origins https://a.example/: must be * or an origin such as https://example.com:8080, "
            "in lower case and without a path",
        ),
        ("--drain-seconds", "-1", "--drain-seconds -1.0: must be a finite number, at least 0"),
        ("--max-sequences", "5000", "--max-sequences 5000 must be at most 4096"),
        ("--name", "", "--name '': must not be empty; give the name that clients send"),
        (
            "--cache-tokens",
            "10",
            "--cache-tokens 10 must be at least 256, one request of max_model_len=256 tokens in pages of "
            "128; raise it, leave it out, or lower --max-model-len",
        ),
        (
            "--mesh",
            "sequence=99",
            f"--mesh sequence=99: needs 99 devices, there are {jax.device_count()}; use smaller axes",
        ),
    ],
)
def test_numbers_are_refused_before_the_model_is_loaded(folder, capsys, monkeypatch, flag, value, message):
    monkeypatch.setattr("convert.cli.serve.load", lambda *_, **__: pytest.fail("the model was loaded"))
    assert main(["serve", str(folder), flag, value]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_addresses_are_refused_before_the_model_is_loaded(folder, capsys, monkeypatch):
    monkeypatch.setattr("convert.cli.serve.load", lambda *_, **__: pytest.fail("the model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(folder), "--port", str(port)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: cannot listen on --host 127.0.0.1 --port {port}: ")
    assert "in use" in line
    for host in ("192.0.2.1", "no such host", "a" * 64):  # The first address belongs to no machine.
        assert main(["serve", str(folder), "--host", host, "--port", "0"]) == 2
        assert f"cannot listen on --host {shlex.quote(host)} --port 0: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ssl-certfile", "{}"], "--ssl-certfile {}: cannot be loaded: "),
        (["--ssl-certfile", "{}/no"], "--ssl-certfile {}/no: cannot be loaded: "),
        (["--api-key-file", "{}"], "--api-key-file {}: contains no key; write one key per line"),
        (["--api-key-file", "{}/no"], "--api-key-file {}/no: cannot be read: "),
        (["--uds", "{}"], "cannot listen on --uds {}: it is a file, not a socket"),
        (["--uds", "{}/no/socket"], "cannot listen on --uds {}/no/socket: "),
        (["--uds", "{}" + "x" * 100], "cannot listen on --uds {}" + "x" * 100 + ": "),
        (["--uds", "{}.sock", "--port", "80"], "not together with --host 127.0.0.1 and --port 80; drop"),
    ],
)
def test_files_are_refused_before_the_model_is_loaded(folder, tmp_path, capsys, monkeypatch, flags, message):
    monkeypatch.setattr("convert.cli.serve.load", lambda *_, **__: pytest.fail("the model was loaded"))
    file = tmp_path / "file"
    file.write_text("# no key here\n\n")
    assert main(["serve", str(folder), *(flag.format(file) for flag in flags)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message.format(file) in line


def test_keys_come_from_the_environment_and_from_a_file(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("# of the team\nfirst \n\nsécond\n")
    monkeypatch.delenv("ZDC_API_KEY", raising=False)
    assert collect_keys(None) == ()
    assert collect_keys(file) == ("first", "sécond")
    monkeypatch.setenv("ZDC_API_KEY", "sesame")
    assert collect_keys(file) == ("sesame", "first", "sécond")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_addresses_that_can_be_listened_at(host):
    HttpSettings(host=host, port=0).check_files_and_address()


def test_a_client_gets_what_generate_gives_until_the_server_is_told_to_end(folder, served):
    process, address, log = served
    # Keys and values of one layer, 2 heads and 32 dimensions in float32.
    assert "device: 1 x cpu; dtype: float32; plan: method zdc, 100.0%" in log.read_text()
    assert f"cache: {2 * 2 * 32 * 4:,} bytes per token, room for 256 tokens" in log.read_text()
    compiled = re.findall(r"compiled (\d+) of (\d+) programs", log.read_text())
    assert compiled == [(str(i), str(len(compiled))) for i in range(1, len(compiled) + 1)]
    with openai.OpenAI(base_url=f"{address}/v1", api_key="sesame") as client:
        assert [model.id for model in client.models.list()] == ["tiny", "org/small"]
        assert client.models.retrieve("org/small").id == "org/small"
        asked = {"model": "tiny", "prompt": "w5 w6 w7", "max_tokens": 12, "temperature": 0}
        whole = client.completions.create(**asked)
        (true,) = generate(load(folder), "w5 w6 w7", 12).completions
        assert whole.choices[0].text == true.text
        assert whole.usage.completion_tokens == len(true.tokens)
        pieces = [piece.choices[0].text for piece in client.completions.create(**asked, stream=True)]
        assert "".join(pieces) == true.text
        with pytest.raises(openai.BadRequestError, match="maximum context length is 128 tokens") as refused:
            client.completions.create(**asked | {"prompt": [5] * 128})
        assert refused.value.code == "context_length_exceeded"
    with (
        openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()
    assert len(re.findall(r" GET /v1/models: 200 in .* s, request \w{32}\n", log.read_text())) == 1
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
