import pytest
from fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from zdc_jax.engine.request import Event
from zdc_jax.server.app import make_app
from zdc_jax.server.metrics import Metrics, Stopwatch


def samples(client: TestClient) -> dict[str, float]:
    """Return values by name, without histogram buckets, and check that all belong to the model."""
    found = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            if "le" not in sample.labels:
                found[sample.name + sample.labels.get("finished_reason", "")] = sample.value
    return found


def test_an_engine_is_asked_for_its_numbers():
    found = samples(TestClient(make_app(FakeEngine(), name="tiny")))
    expected = {
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 4,
        "vllm:kv_cache_usage_perc": 0.5,
        "vllm:prompt_tokens_total": 60,
        "vllm:generation_tokens_total": 70,
        "vllm:prefix_cache_queries_total": 80,
        "vllm:prefix_cache_hits_total": 90,
        "vllm:num_preemptions_total": 100,
    }
    assert found.items() >= expected.items()


def test_requests_are_measured():
    clients = [TestClient(make_app(FakeEngine(), name="tiny")) for _ in range(2)]
    clients[0].post("/v1/completions", json={"prompt": "on", "max_tokens": 4, "n": 2})
    clients[0].post("/v1/completions", json={"prompt": "on", "stop": "in", "stream": True})
    clients[0].post("/v1/completions", json={"prompt": "on!"})
    found, other = map(samples, clients)
    assert found["vllm:request_success_totallength"] == 2
    assert found["vllm:request_success_totalstop"] == 1
    assert found["vllm:request_success_totalerror"] == 1
    assert found["vllm:time_to_first_token_seconds_count"] == 4
    assert found["vllm:inter_token_latency_seconds_count"] == 6
    assert found["vllm:e2e_request_latency_seconds_count"] == 4
    assert other["vllm:time_to_first_token_seconds_count"] == 0


def test_tokens_that_come_together_share_their_time(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    metrics = Metrics(FakeEngine(), "tiny")
    watch = Stopwatch(metrics)
    for event in (Event(tokens=(1, 2)), Event(tokens=(3, 4, 5)), Event(finish_reason="cancelled")):
        now[0] += 3
        watch.record(event)

    def value(name, **labels):
        return metrics.registry.get_sample_value(name, {"model_name": "tiny"} | labels)

    assert value("vllm:time_to_first_token_seconds_sum") == 3
    assert value("vllm:inter_token_latency_seconds_sum") == 3
    assert value("vllm:inter_token_latency_seconds_count") == 3
    assert value("vllm:e2e_request_latency_seconds_sum") == 9
    assert value("vllm:request_success_total", finished_reason="abort") == 1
