"""Prometheus metrics under the names of the field, prefixed `morph_`."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from morph.engine.params import RequestOutput
from morph.server.interface import ServedEngine

LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)
STEP_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2)
SHARE = tuple(step / 10 for step in range(11))
TOKENS = tuple(2**power for power in range(18))


class Metrics:
    """Histograms of finished requests and gauges of the engine; one registry per server."""

    def __init__(self, engine: ServedEngine) -> None:
        self.registry = CollectorRegistry()
        self._ttft = self._histogram("time_to_first_token_seconds", "Submission to first token.", LATENCY_S)
        self._tpot = self._histogram("time_per_output_token_seconds", "Mean gap between tokens.", STEP_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", "Submission to last token.", LATENCY_S)
        self._prompt = self._histogram("request_prompt_tokens", "Prompt length.", TOKENS)
        self._answer = self._histogram("request_generation_tokens", "Answer length.", TOKENS)
        self._share = self._histogram(
            "request_attention_share", "Blocks that ran attention over all blocks.", SHARE, ("layout_source",)
        )
        self._finished = self._counter("requests", "Finished requests.", ("finish_reason",))
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens.")
        self._cached_tokens = self._counter("cached_prompt_tokens", "Prompt tokens served from the context cache.")
        self._answer_tokens = self._counter("generation_tokens", "Answer tokens.")
        self.registry.register(_EngineCollector(engine))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()) -> Histogram:
        return Histogram(f"morph_{name}", text, labels, registry=self.registry, buckets=buckets)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"morph_{name}", text, labels, registry=self.registry)

    def observe(self, output: RequestOutput) -> None:
        """Count a finished request."""
        answer = len(output.token_ids)
        self._finished.labels(output.finish_reason).inc()
        self._prompt_tokens.inc(len(output.prompt_token_ids))
        self._cached_tokens.inc(output.cached_tokens)
        self._answer_tokens.inc(answer)
        self._prompt.observe(len(output.prompt_token_ids))
        self._answer.observe(answer)
        if output.ttft is not None:
            self._ttft.observe(output.ttft)
        if output.e2e is not None:
            self._e2e.observe(output.e2e)
            if output.ttft is not None and answer > 1:
                self._tpot.observe((output.e2e - output.ttft) / (answer - 1))
        if output.layout:
            share = output.layout.count("1") / len(output.layout)
            self._share.labels(output.layout_source or "request").observe(share)

    def observe_abort(self) -> None:
        """Count a request whose client left."""
        self._finished.labels("abort").inc()

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Reads the engine's numbers when a scrape asks for them."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Gauges of now and counters since the start."""
        engine = self._engine
        yield _gauge("engine_up", "1 while the engine loop runs.", float(engine.alive))
        stats = engine.stats()
        yield _gauge("num_requests_running", "Requests that decode.", stats["running"])
        yield _gauge("num_requests_prefilling", "Requests in prefill.", stats.get("prefilling", 0))
        yield _gauge("num_requests_waiting", "Requests in the queue.", stats["waiting"])
        yield CounterMetricFamily(
            "morph_num_preemptions", "Requests that gave their memory up.", value=stats["preemptions"]
        )
        pages = GaugeMetricFamily("morph_unit_pages", "Unit pages by what they hold.", labels=("kind",))
        for kind in ("attention", "ssm", "cached", "free"):
            if f"units_{kind}" in stats:
                pages.add_metric((kind,), stats[f"units_{kind}"])
        yield pages
        yield _gauge("unit_pages_reserved", "Free pages promised to requests.", stats.get("units_reserved", 0))
        yield _gauge("unit_pages_capacity", "Unit pages in the pool.", stats["units_total"])
        share = stats.get("attention_share")
        if share is not None:
            yield _gauge("attention_share", "Attention share of the running requests.", share)
        yield _gauge("distinct_layouts", "Distinct layouts that run.", stats.get("distinct_layouts", 0))


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"morph_{name}", text, value=value)
