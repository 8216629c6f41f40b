"""Prometheus metrics, prefix `enginecore:`. Nothing is registered globally; a scrape reads plain numbers.

| name | kind | meaning |
|---|---|---|
| num_requests_running, num_requests_waiting | gauge | sequences in the engine |
| kv_cache_usage_perc | gauge | 0 to 1: blocks in use over all blocks; evictable cached blocks do not count |
| prompt_tokens_total, generation_tokens_total | counter | as in the `usage` of responses, summed |
| prefix_cache_queries_total, prefix_cache_hits_total | counter | prompt tokens looked up, and found |
| num_preemptions_total | counter | sequences that had to give their blocks back |
| num_swaps_total | counter | those of them whose blocks were left in a lower tier to come back from |
| host_cache_blocks, disk_cache_blocks | gauge | KV blocks kept below the device |
| host_cache_hits_total, disk_cache_hits_total | counter | prompt tokens that came up from there |
| grammar_fast_forward_tokens_total | counter | tokens that a grammar forced and that took no step of their own |
| spec_decode_num_draft_tokens_total, spec_decode_num_accepted_tokens_total | counter | tokens guessed, and kept |
| graph_replays_total, eager_steps_total | counter | steps that replayed a captured graph, and all others |
| steps_ahead_total | counter | steps that were planned while the one before was on the device |
| adapter_steps_total, adapter_swaps_total | counter | steps with rows that have an adapter; adapters put into a slot |
| lost_steps_total | counter | steps that ran out of device memory; their requests ended with an error |
| reference_op{op} | gauge | 1 for each op that runs as a torch reference, for want of a kernel that can be built |
| request_success_total{finished_reason} | counter | ended requests: stop, length, abort, error |
| time_to_first_token_seconds, inter_token_latency_seconds, e2e_request_latency_seconds | histogram | latencies |
| request_prompt_tokens, request_generation_tokens | histogram | sizes of ended requests |

A prompt is one request, whatever its n; a batch of prompts is as many. Every metric has the label model_name.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from enginecore.request import EngineStats

PREFIX = "enginecore:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_REASONS = ("stop", "length", "abort", "error")
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_NEXT_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 40)
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)


class Histogram:
    """Counts by bucket; `observe` is a bisection and two additions."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def export(self) -> tuple[list[tuple[str, float]], float]:
        """(cumulative buckets, sum), as prometheus-client takes them."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, map(float, self._bounds)), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets, self._sum


class Metrics:
    """The observer of an output processor and the collector of a registry. `stats` gives the engine's latest
    figures."""

    def __init__(self, model_name: str, num_blocks: int) -> None:
        self._model_name = model_name
        self._num_blocks = max(1, num_blocks)
        self.stats: Callable[[], EngineStats] = EngineStats
        self._prompt_tokens = self._generation_tokens = 0
        self._ended = dict.fromkeys(_REASONS, 0)
        self._first_token, self._next_token = Histogram(_FIRST_TOKEN), Histogram(_NEXT_TOKEN)
        self._whole = Histogram(_WHOLE)
        self._prompt_sizes, self._output_sizes = Histogram(_TOKENS), Histogram(_TOKENS)
        self.next_token = self._next_token.observe
        self.first_token = self._first_token.observe
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def first_output(self, num_prompt_tokens: int) -> None:
        """The prompt of a request has been computed."""
        self._prompt_tokens += num_prompt_tokens

    def tokens(self, count: int) -> None:
        """Tokens were generated."""
        self._generation_tokens += count

    def finished(self, reason: str, seconds: float, num_prompt_tokens: int, num_generated: int) -> None:
        """A request has ended, `seconds` after it arrived."""
        self._ended[reason] = self._ended.get(reason, 0) + 1
        self._whole.observe(seconds)
        self._prompt_sizes.observe(num_prompt_tokens)
        self._output_sizes.observe(num_generated)

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What a scrape shows (called by the registry)."""
        stats, labels, values = self.stats(), ["model_name"], [self._model_name]
        gauges = {
            "num_requests_running": ("Sequences running", stats.num_running),
            "num_requests_waiting": ("Sequences waiting", stats.num_waiting),
            "kv_cache_usage_perc": ("Share of KV blocks in use", stats.num_used_blocks / self._num_blocks),
            "host_cache_blocks": ("Blocks kept in host memory", stats.host_blocks),
            "disk_cache_blocks": ("Blocks kept on disk", stats.disk_blocks),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=labels)
            gauge.add_metric(values, value)
            yield gauge
        counters = {
            "prompt_tokens": ("Prompt tokens of requests", self._prompt_tokens),
            "generation_tokens": ("Tokens generated", self._generation_tokens),
            "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", stats.prefix_cache_queries),
            "prefix_cache_hits": ("Prompt tokens found in the prefix cache", stats.prefix_cache_hits),
            "num_preemptions": ("Preemptions", stats.num_preemptions),
            "grammar_fast_forward_tokens": ("Tokens that a grammar forced", stats.grammar_fast_forward),
            "spec_decode_num_draft_tokens": ("Tokens that speculation guessed", stats.num_drafted),
            "spec_decode_num_accepted_tokens": ("Guessed tokens that were kept", stats.num_accepted),
            "graph_replays": ("Steps that replayed a captured graph", stats.graph_replays),
            "eager_steps": ("Steps that ran their operations one by one", stats.eager_steps),
            "host_cache_hits": ("Prompt tokens that came up from host memory", stats.lifted_tokens),
            "disk_cache_hits": ("Prompt tokens that came up from disk, then from host memory", stats.fetched_tokens),
            "num_swaps": ("Preemptions that left their blocks in a lower tier", stats.num_swaps),
            "steps_ahead": ("Steps that were planned while the one before was on the device", stats.steps_ahead),
            "adapter_steps": ("Steps with rows that have an adapter", stats.adapter_steps),
            "adapter_swaps": ("Adapters put into a slot of the device", stats.adapter_swaps),
            "lost_steps": ("Steps that ran out of device memory", stats.lost_steps),
        }
        for name, (text, count) in counters.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=labels)
            counter.add_metric(values, count)
            yield counter
        text = "Ops that run as torch references"
        reference = GaugeMetricFamily(PREFIX + "reference_op", text, labels=[*labels, "op"])
        for op in stats.reference_ops:
            reference.add_metric([*values, op], 1)
        yield reference
        ended = CounterMetricFamily(PREFIX + "request_success", "Requests ended", labels=[*labels, "finished_reason"])
        for reason, count in self._ended.items():
            ended.add_metric([*values, reason], count)
        yield ended
        histograms = {
            "time_to_first_token_seconds": ("From arrival to the first token", self._first_token),
            "inter_token_latency_seconds": ("Between tokens of a sequence", self._next_token),
            "e2e_request_latency_seconds": ("From arrival to the end", self._whole),
            "request_prompt_tokens": ("Prompt tokens of ended requests", self._prompt_sizes),
            "request_generation_tokens": ("Tokens generated by ended requests", self._output_sizes),
        }
        for name, (text, histogram) in histograms.items():
            family = HistogramMetricFamily(PREFIX + name, text, labels=labels)
            buckets, total = histogram.export()
            family.add_metric(values, buckets, total)
            yield family
