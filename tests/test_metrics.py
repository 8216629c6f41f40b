from __future__ import annotations

from enginecore.metrics import Metrics
from enginecore.request import EngineStats
from prometheus_client.parser import text_string_to_metric_families


def test_exposition() -> None:
    metrics = Metrics('a "model"', 10)
    metrics.stats = lambda: EngineStats(num_running=2, num_waiting=1, num_used_blocks=5, num_preemptions=3)
    for seconds in (0.0005, 0.001, 0.5, 1e9):
        metrics.first_token(seconds)
    metrics.first_output(7)
    metrics.tokens(3)
    metrics.finished("abort", 1.5, 7, 3)
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    value = {name: family.samples[0].value for name, family in families.items() if family.samples}
    assert value["enginecore:num_requests_running"] == 2 and value["enginecore:num_requests_waiting"] == 1
    assert value["enginecore:kv_cache_usage_perc"] == 0.5 and value["enginecore:num_preemptions"] == 3
    assert value["enginecore:prompt_tokens"] == 7 and value["enginecore:generation_tokens"] == 3
    ended = {s.labels["finished_reason"]: s.value for s in families["enginecore:request_success"].samples}
    assert ended == {"stop": 0, "length": 0, "abort": 1, "error": 0}
    first = families["enginecore:time_to_first_token_seconds"].samples
    buckets = [(s.labels["le"], s.value) for s in first if s.name.endswith("_bucket")]
    assert buckets[0] == ("0.001", 2) and buckets[-2:] == [("160.0", 3), ("+Inf", 4)]
    assert all(s.labels["model_name"] == 'a "model"' for family in families.values() for s in family.samples)


def test_nothing_is_global() -> None:
    assert Metrics("a", 1).render() and Metrics("a", 1).render()
