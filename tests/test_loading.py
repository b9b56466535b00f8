"""Dtypes that families run in, and what the log says about the device."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import pytest
from conftest import LLAMA

from zdc_jax import loading
from zdc_jax.errors import CheckpointError, MeshError
from zdc_jax.loading import choose_dtype, load


def test_a_path_is_named_if_it_is_none():
    with pytest.raises(CheckpointError, match="path=5 must be the path of a folder written by `zdc convert`"):
        load(5)


@pytest.mark.parametrize("mesh", [4, ["sequence=2"]])
def test_a_mesh_is_a_config_or_a_text(mesh):
    with pytest.raises(MeshError, match=r"mesh=.* must be a MeshConfig, or a text such as 'sequence=2'"):
        load("folder", mesh=mesh)


def test_gemma_does_not_run_in_float16(caplog):
    gemma = replace(LLAMA, family="gemma3_text", dtype="float16")
    with pytest.raises(CheckpointError, match=r"dtype='float16': .* choose one of \['float32', 'bfloat16'\]"):
        choose_dtype(gemma, "float16")
    with caplog.at_level(logging.WARNING, "zdc_jax"):
        assert choose_dtype(gemma, None) == "bfloat16"
    assert "running in bfloat16" in caplog.text
    assert choose_dtype(gemma, "float32") == "float32"
    assert choose_dtype(replace(LLAMA, dtype="float16"), None) == "float16"
    assert choose_dtype(LLAMA, "float16") == "float16"


@pytest.fixture
def on_gpu(monkeypatch):
    """Replace the first device by a GPU of a kind, which kernels may have a reason to refuse."""

    def pretend(kind: str, reason: str | None) -> None:
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=kind)])
        monkeypatch.setattr(loading, "device_refusal", lambda q: reason)

    loading.log_device.cache_clear()
    yield pretend
    loading.log_device.cache_clear()


@pytest.mark.parametrize(
    ("kind", "reason", "said"),
    [
        ("NVIDIA A100", "it has 8.0", "NVIDIA A100 runs on XLA, where plans save memory but no time"),
        ("NVIDIA H800", None, "default tile sizes, because none were tuned on NVIDIA H800"),
        ("NVIDIA H200", None, ""),
    ],
)
def test_the_log_says_once_what_a_card_runs_on(on_gpu, caplog, kind, reason, said):
    on_gpu(kind, reason)
    with caplog.at_level(logging.INFO, "zdc_jax"):
        loading.log_device()
        loading.log_device()
    assert [said in record.message for record in caplog.records] == [True] * bool(said)


def test_items_are_read_ahead_in_order():
    def start(number: int) -> Callable[[], int]:
        def read() -> int:
            started.append(number)
            return number

        return read

    started: list[int] = []
    results = loading._call_ahead([start(number) for number in range(20)])
    assert next(results) == 0
    assert set(started) <= set(range(loading.AHEAD + 1))
    assert list(results) == list(range(1, 20))
    assert sorted(started) == list(range(20))


def test_reading_ends_at_an_error():
    def fail() -> int:
        raise CheckpointError("item 0 is damaged")

    later: list[int] = []
    reads = [fail, *(partial(later.append, number) for number in range(20))]
    with pytest.raises(CheckpointError, match="item 0 is damaged"):
        list(loading._call_ahead(reads))
    assert len(later) <= loading.AHEAD
