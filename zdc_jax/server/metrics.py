"""Prometheus metrics of a server, under vLLM's names."""

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from zdc_jax.engine.request import EngineRequest, Event, Serving

LABEL = "model_name"
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TPOT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)
WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960, 1920)
"""Bucket bounds in seconds of the time to first token, the time per output token, and other times."""
OUTCOMES = {"stop": "stop", "length": "length", "cancelled": "abort", "error": "error"}
"""Names of finish reasons in vLLM's metrics."""


class Metrics:
    """Metrics of one server: what it measures of its requests, and statistics of its engine.

    Args:
      engine: engine whose statistics are collected.
      name: name of the model, a label of every metric.

    Attributes:
      registry: registry with all metrics.
      first_token: time to first token (TTFT).
      between_tokens: time per output token (TPOT), one observation per token.
      mean_between_tokens: mean time per output token of a request.
      whole_request: time from submission to the end of the answer.
      queue: time until a request's prefill starts.
      prefill: time from there to the first token.
      decode: time from the first token to the last.
      inference: prefill and decode together.
      prompt_tokens: tokens of a prompt.
      generation_tokens: tokens of an answer.
      most_generation_tokens: the same, under the name of the most tokens among a prompt's answers.
      max_tokens: most tokens that an answer may have.
      ended: counter of ended requests for each finish reason.
    """

    def __init__(self, engine: Serving, name: str):
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine, name))

        def make_histogram(quantity: str, bounds: Sequence[float]) -> Histogram:
            full_name, meaning = f"vllm:{quantity}", _describe(quantity)
            return Histogram(full_name, meaning, [LABEL], registry=self.registry, buckets=bounds).labels(name)

        bounds = [digit * 10**power for power in range(12) for digit in (1, 2, 5)]
        lengths = [bound for bound in bounds if bound <= engine.max_model_len]
        self.first_token = make_histogram("time_to_first_token_seconds", TTFT)
        self.between_tokens = TokenTimes(name)
        self.registry.register(self.between_tokens)
        self.mean_between_tokens = make_histogram("request_time_per_output_token_seconds", TPOT)
        self.whole_request = make_histogram("e2e_request_latency_seconds", WHOLE)
        self.queue = make_histogram("request_queue_time_seconds", WHOLE)
        self.prefill = make_histogram("request_prefill_time_seconds", WHOLE)
        self.decode = make_histogram("request_decode_time_seconds", WHOLE)
        self.inference = make_histogram("request_inference_time_seconds", WHOLE)
        self.prompt_tokens = make_histogram("request_prompt_tokens", lengths)
        self.generation_tokens = make_histogram("request_generation_tokens", lengths)
        self.most_generation_tokens = make_histogram("request_max_num_generation_tokens", lengths)
        self.max_tokens = make_histogram("request_params_max_tokens", lengths)
        ended = Counter(
            "vllm:request_success", "Ended requests", [LABEL, "finished_reason"], registry=self.registry
        )
        self.ended = {reason: ended.labels(name, outcome) for reason, outcome in OUTCOMES.items()}


def _describe(quantity: str) -> str:
    """Return a description of a histogram from its name."""
    return quantity.replace("_", " ").replace(" seconds", ", in seconds")


class Stopwatch:
    """Timer of one request, started when it is created.

    Args:
      metrics: metrics to record in.
      request: the request.
    """

    def __init__(self, metrics: Metrics, request: EngineRequest):
        self._metrics, self._request = metrics, request
        self._begun = time.monotonic()
        self._first: float | None = None
        self._newest = self._begun
        self._count = 0

    def record(self, event: Event) -> None:
        """Record an event that arrives now.

        Tokens that arrive together share the time since the previous tokens equally.
        """
        now = time.monotonic()
        if event.tokens:
            if self._first is None:
                self._first = now
                self._metrics.first_token.observe(now - self._begun)
            else:
                self._metrics.between_tokens.observe(now - self._newest, len(event.tokens))
            self._newest = now
            self._count += len(event.tokens)
        if event.finish_reason is not None:
            self._metrics.ended[event.finish_reason].inc()
            self._record_end(now, event.queued)

    def _record_end(self, now: float, queued: float) -> None:
        """Record what is known at the end of a request; `queued` is the time until its prefill, 0 without."""
        metrics, request = self._metrics, self._request
        metrics.whole_request.observe(now - self._begun)
        metrics.prompt_tokens.observe(len(request.prompt))
        metrics.max_tokens.observe(request.max_tokens)
        metrics.generation_tokens.observe(self._count)
        metrics.most_generation_tokens.observe(self._count)
        if self._first is None:
            metrics.queue.observe(queued or now - self._begun)
            return
        prefill_began = self._begun + queued
        metrics.queue.observe(queued)
        metrics.prefill.observe(self._first - prefill_began)
        metrics.decode.observe(self._newest - self._first)
        metrics.inference.observe(self._newest - prefill_began)
        if self._count > 1:
            metrics.mean_between_tokens.observe((self._newest - self._first) / (self._count - 1))


class TokenTimes(Collector):
    """Histogram of the time per output token, under the names that newer and older dashboards read.

    Histograms of `prometheus_client` would take a fifth of the server's time: they are told of each token.

    Args:
      name: name of the model.
    """

    NAMES = "inter_token_latency_seconds", "time_per_output_token_seconds"

    def __init__(self, name: str):
        self._name, self._sum = name, 0.0
        self._counts = [0] * (len(TPOT) + 1)

    def observe(self, seconds: float, tokens: int) -> None:
        """Count tokens that took this time together."""
        self._counts[bisect_left(TPOT, seconds / tokens)] += tokens
        self._sum += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Yield a metric family for each name."""
        bounds = [str(float(bound)) for bound in TPOT] + ["+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        for name in self.NAMES:
            family = HistogramMetricFamily(f"vllm:{name}", _describe(name), labels=[LABEL])
            family.add_metric([self._name], buckets, self._sum)
            yield family


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
            "gpu_cache_usage_perc": ("Old name of vllm:kv_cache_usage_perc", stats.cache_usage),
        }
        counters = {
            "num_preemptions": ("Preempted requests", stats.preemptions),
            "num_grammar_rewinds": ("Answers read again after a token that a grammar refused", stats.rewinds),
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
