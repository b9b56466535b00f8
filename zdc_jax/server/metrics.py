"""What a server measures, for Prometheus, under the names that vLLM gives it."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from zdc_jax.engine.request import Event, Serving

LABEL = "model_name"
FIRST_TOKEN = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)
WHOLE_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960, 1920)
"""Bounds of histograms, in seconds."""
OUTCOMES = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""Reasons to end, as vLLM calls them."""


class Metrics:
    """Of one server: what it measures itself, and what its engine says when it is asked."""

    def __init__(self, engine: Serving, name: str):
        """name: of the model, a label of all."""
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine, name))
        self.first_token = self._seconds("time_to_first_token", FIRST_TOKEN).labels(name)
        self.between_tokens = self._seconds("inter_token_latency", BETWEEN_TOKENS).labels(name)
        self.whole_request = self._seconds("e2e_request_latency", WHOLE_REQUEST).labels(name)
        ended = Counter(
            "vllm:request_success", "Requests that ended", [LABEL, "finished_reason"], registry=self.registry
        )
        self.ended = {reason: ended.labels(name, outcome) for reason, outcome in OUTCOMES.items()}

    def _seconds(self, what: str, bounds: tuple[float, ...]) -> Histogram:
        meaning = f"{what.replace('_', ' ')}, in seconds"
        return Histogram(f"vllm:{what}_seconds", meaning, [LABEL], registry=self.registry, buckets=bounds)


class Stopwatch:
    """Measures one request, from when it was made."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._begun = time.monotonic()
        self._newest: float | None = None

    def take(self, event: Event) -> None:
        """Notes an event that comes now; tokens that come together share the time since those before."""
        now = time.monotonic()
        if event.tokens:
            if self._newest is None:
                self._metrics.first_token.observe(now - self._begun)
            else:
                for _ in event.tokens:
                    self._metrics.between_tokens.observe((now - self._newest) / len(event.tokens))
            self._newest = now
        if event.finish_reason is not None:
            self._metrics.whole_request.observe(now - self._begun)
            self._metrics.ended[event.finish_reason].inc()


@dataclass(frozen=True)
class EngineCollector(Collector):
    """Numbers of an engine, read when Prometheus asks."""

    engine: Serving
    name: str

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """One family for each number."""
        stats = self.engine.stats()
        gauges = {
            "num_requests_running": ("Requests in steps", stats.running),
            "num_requests_waiting": ("Requests that wait", stats.waiting),
            "kv_cache_usage_perc": ("Share of the cache in use, 1 for all", stats.cache_usage),
        }
        counters = {
            "num_preemptions": ("Requests that were put back", stats.preemptions),
            "prefix_cache_queries": ("Prompt tokens looked for in the cache", stats.prefix_queries),
            "prefix_cache_hits": ("Prompt tokens found in the cache", stats.prefix_hits),
            "prompt_tokens": ("Tokens of prompts", stats.prompt_tokens),
            "generation_tokens": ("Generated tokens", stats.generation_tokens),
        }
        for kind, numbers in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (meaning, value) in numbers.items():
                family = kind(f"vllm:{name}", meaning, labels=[LABEL])
                family.add_metric([self.name], value)
                yield family
