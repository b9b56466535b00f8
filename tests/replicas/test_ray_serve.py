"""`zdc serve --replicas` as a client sees it, and its manifest.

Ray runs in other processes, so its warnings do not reach these tests.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from conftest import LLAMA, TinyModel

pytest.importorskip("ray", reason="ray is absent: pip install '.[ray]'")
ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}


@pytest.fixture
def address(tmp_path):
    TinyModel(LLAMA).write(tmp_path / "tiny")
    command = [sys.executable, "-m", "convert.cli.main", "serve", str(tmp_path / "tiny"), "--port", "0"]
    command += ["--max-sequences", "4", "--chunk", "32", "--replicas", "2", "--dtype", "float32"]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.fullmatch(r"serving tiny at (http://127\.0\.0\.1:\d+)\n", process.stdout.readline())
        assert found
        yield found[1]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def replicas_under(name: str) -> set[int]:
    found = subprocess.run(
        ["pgrep", "-f", f"^ray::ServeReplica:{name}:replica"], capture_output=True, text=True, check=False
    )
    return set(map(int, found.stdout.split()))


def text_of(address: str, seed: int, kill: bool) -> str:
    """Return a sampled answer, after killing one of the two replicas amid it if `kill` is set."""
    body = {"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True, "seed": seed, "stream": True}
    text = ""
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as answer:
        for count, line in enumerate(line for line in answer.iter_lines() if line.startswith("data: {")):
            text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
            if kill and count == 3:
                os.kill(min(replicas_under("tiny")), signal.SIGKILL)
    return text


def test_a_killed_replica_is_not_noticed(address):
    whole = {seed: text_of(address, seed, kill=False) for seed in (1, 2)}
    assert len(set(whole.values())) == 2
    victims = replicas_under("tiny")
    assert len(victims) == 2
    assert text_of(address, 1, kill=True) == whole[1]
    until = time.monotonic() + 60
    while len(replicas_under("tiny")) < 2 and time.monotonic() < until:
        time.sleep(0.1)
    assert text_of(address, 2, kill=True) == whole[2]
    assert "vllm:generation_tokens_total" in httpx.get(f"{address}/metrics").text


MANIFEST = """
import sys, yaml
from ray.serve.schema import ServeDeploySchema
from zdc_jax.replicas.application import application
service = yaml.safe_load(open(sys.argv[1]))
config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
application(config.applications[0].args)
"""


def test_the_manifest_is_what_ray_reads():
    command = [sys.executable, "-c", MANIFEST, str(ROOT / "docs" / "kuberay.yaml")]
    subprocess.run(command, env=ENVIRONMENT, check=True)
