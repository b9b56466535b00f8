import pytest
from fake_engine import FakeEngine
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from zdc_jax.engine.request import EngineRequest, Event
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
        "vllm:num_grammar_rewinds_total": 110,
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
    watch = Stopwatch(metrics, EngineRequest((5,) * 7, max_tokens=20))
    for event in (Event(tokens=(1, 2)), Event(tokens=(3, 4, 5)), Event(finish_reason="cancelled", queued=1)):
        now[0] += 3
        watch.record(event)

    def value(name, **labels):
        return metrics.registry.get_sample_value(name, {"model_name": "tiny"} | labels)

    assert value("vllm:time_to_first_token_seconds_sum") == 3
    assert value("vllm:inter_token_latency_seconds_sum") == 3
    assert value("vllm:inter_token_latency_seconds_count") == 3
    assert value("vllm:e2e_request_latency_seconds_sum") == 9
    assert value("vllm:request_success_total", finished_reason="abort") == 1
    # One second of waiting, 2 s of prefill until t = 3 s, and 3 s of decoding until t = 6 s.
    phases = {"queue": 1, "prefill": 2, "decode": 3, "inference": 5}
    for phase, seconds in phases.items():
        assert value(f"vllm:request_{phase}_time_seconds_sum") == seconds
    assert value("vllm:request_time_per_output_token_seconds_sum") == 3 / 4
    lengths = {"prompt_tokens": (7, 5, 10), "generation_tokens": (5, 2, 5)}
    lengths |= {"max_num_generation_tokens": (5, 2, 5), "params_max_tokens": (20, 10, 20)}
    for name, (length, below, bound) in lengths.items():
        assert value(f"vllm:request_{name}_sum") == length
        assert value(f"vllm:request_{name}_bucket", le=f"{below}.0") == 0
        assert value(f"vllm:request_{name}_bucket", le=f"{bound}.0") == 1
        assert value(f"vllm:request_{name}_bucket", le="200.0") == 1
        assert value(f"vllm:request_{name}_bucket", le="500.0") is None  # Beyond the longest request.


def test_a_request_that_only_waited_has_no_other_phases(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    metrics = Metrics(FakeEngine(), "tiny")
    watch = Stopwatch(metrics, EngineRequest((5,), max_tokens=20))
    now[0] += 3
    watch.record(Event(finish_reason="cancelled"))
    samples = {
        phase: metrics.registry.get_sample_value(
            f"vllm:request_{phase}_time_seconds_count", {"model_name": "tiny"}
        )
        for phase in ("queue", "prefill", "decode", "inference")
    }
    assert samples == {"queue": 1, "prefill": 0, "decode": 0, "inference": 0}


DASHBOARD = """
    e2e_request_latency_seconds_bucket e2e_request_latency_seconds_sum e2e_request_latency_seconds_count
    prompt_tokens_total generation_tokens_total
    time_per_output_token_seconds_bucket time_per_output_token_seconds_sum time_per_output_token_seconds_count
    inter_token_latency_seconds_bucket inter_token_latency_seconds_sum inter_token_latency_seconds_count
    num_requests_running num_requests_waiting
    time_to_first_token_seconds_bucket time_to_first_token_seconds_sum time_to_first_token_seconds_count
    gpu_cache_usage_perc kv_cache_usage_perc
    request_prompt_tokens_bucket request_generation_tokens_bucket request_success_total
    request_queue_time_seconds_sum request_prefill_time_seconds_sum request_decode_time_seconds_sum
    request_max_num_generation_tokens_sum
"""
"""Series that vLLM's dashboard `prometheus_grafana/grafana.json` reads, in its old and its new version."""


def test_vllms_dashboard_finds_all_its_series():
    client = TestClient(make_app(FakeEngine(), name="tiny"))
    client.post("/v1/completions", json={"prompt": "on", "max_tokens": 4})
    families = text_string_to_metric_families(client.get("/metrics").text)
    values = {}
    for sample in (sample for family in families for sample in family.samples):
        values[sample.name] = max(sample.value, values.get(sample.name, 0))
    assert {f"vllm:{name}" for name in DASHBOARD.split()} <= values.keys()
    for suffix in ("bucket", "count", "sum"):
        old, new = (
            f"vllm:{name}_{suffix}"
            for name in ("time_per_output_token_seconds", "inter_token_latency_seconds")
        )
        assert values[old] == values[new] > 0
