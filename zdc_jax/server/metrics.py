"""Prometheus metrics of a server, under vLLM's names."""

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
"""Bucket bounds of the histograms, in seconds."""
OUTCOMES = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""Names of finish reasons in vLLM's metrics."""


class Metrics:
    """Metrics of one server: latencies that it measures, and statistics of its engine.

    Args:
      engine: engine whose statistics are collected.
      name: name of the model, a label of every metric.

    Attributes:
      registry: registry with all metrics.
      first_token: time to first token (TTFT).
      between_tokens: time per output token (TPOT).
      whole_request: time from submission to the end of the answer.
      ended: counter of ended requests for each finish reason.
    """

    def __init__(self, engine: Serving, name: str):
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine, name))
        self.first_token = self._make_histogram("time_to_first_token", FIRST_TOKEN).labels(name)
        self.between_tokens = self._make_histogram("inter_token_latency", BETWEEN_TOKENS).labels(name)
        self.whole_request = self._make_histogram("e2e_request_latency", WHOLE_REQUEST).labels(name)
        ended = Counter(
            "vllm:request_success", "Ended requests", [LABEL, "finished_reason"], registry=self.registry
        )
        self.ended = {reason: ended.labels(name, outcome) for reason, outcome in OUTCOMES.items()}

    def _make_histogram(self, quantity: str, bounds: tuple[float, ...]) -> Histogram:
        meaning = f"{quantity.replace('_', ' ')}, in seconds"
        return Histogram(f"vllm:{quantity}_seconds", meaning, [LABEL], registry=self.registry, buckets=bounds)


class Stopwatch:
    """Timer of one request, started when it is created."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        self._begun = time.monotonic()
        self._newest: float | None = None

    def record(self, event: Event) -> None:
        """Record an event that arrives now.

        Tokens that arrive together share the time since the previous tokens equally.
        """
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
    """Collector that reads an engine's statistics whenever Prometheus scrapes them."""

    engine: Serving
    name: str

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yield one metric family for each statistic."""
        stats = self.engine.stats()
        gauges = {
            "num_requests_running": ("Running requests", stats.running),
            "num_requests_waiting": ("Waiting requests", stats.waiting),
            "kv_cache_usage_perc": ("Share of the cache in use, from 0 to 1", stats.cache_usage),
        }
        counters = {
            "num_preemptions": ("Preempted requests", stats.preemptions),
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", stats.prefix_queries),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache", stats.prefix_hits),
            "prompt_tokens": ("Prompt tokens", stats.prompt_tokens),
            "generation_tokens": ("Generated tokens", stats.generation_tokens),
        }
        for kind, families in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (meaning, value) in families.items():
                family = kind(f"vllm:{name}", meaning, labels=[LABEL])
                family.add_metric([self.name], value)
                yield family
