"""F57: /metrics agrees with the usage of answers, stays in range and keeps its names."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.field.answers import user
from tests.field.support import CHAT, COMPLETIONS, InFlight, baseline, counter, cut_stream, token_prompt, wait_until
from tests.serving import MODEL_NAME, ServerProcess

#: name -> (type, names of its samples beyond the buckets). Renaming one breaks somebody's dashboard.
DOCUMENTED = {
    "num_requests_running": "gauge", "num_requests_waiting": "gauge", "kv_cache_usage_perc": "gauge",
    "prompt_tokens": "counter", "generation_tokens": "counter", "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter", "num_preemptions": "counter", "request_success": "counter",
    "time_to_first_token_seconds": "histogram", "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
}  # fmt: skip
HISTOGRAMS = ("e2e_request_latency_seconds_count", "request_prompt_tokens_count", "request_generation_tokens_count")


def test_names_types_and_labels(sim_server: ServerProcess) -> None:
    sim_server.complete(prompt="x")
    answer = sim_server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    for name, kind in DOCUMENTED.items():
        family = families[f"enginecore:{name}"]
        assert family.type == kind and family.documentation
        assert all(sample.labels["model_name"] == MODEL_NAME for sample in family.samples)
        if kind == "counter":
            assert {sample.name for sample in family.samples} == {f"enginecore:{name}_total"}
    reasons = {sample.labels["finished_reason"] for sample in families["enginecore:request_success"].samples}
    assert reasons == {"stop", "length", "abort", "error"}


def test_counters_are_the_sums_of_usage(sim_server: ServerProcess) -> None:
    baseline(sim_server)
    before = sim_server.metrics()
    prompt = token_prompt(57, 40)
    bodies: list[tuple[str, dict[str, Any]]] = [
        (COMPLETIONS, {"prompt": prompt, "max_tokens": 4}),
        (COMPLETIONS, {"prompt": prompt, "max_tokens": 6}),
        (COMPLETIONS, {"prompt": [prompt[:7], prompt[:9]], "n": 2, "max_tokens": 3}),
        (COMPLETIONS, {"prompt": "x", "n": 1, "best_of": 3, "max_tokens": 5}),
        (CHAT, {"messages": [user("hi")], "max_tokens": 5, "temperature": 1, "seed": 1}),
    ]
    usages = [sim_server.post(path, {"ignore_eos": True, **body}).json()["usage"] for path, body in bodies]
    after = sim_server.metrics()
    grown = {name: after[f"enginecore:{name}"] - before[f"enginecore:{name}"] for name in (
        "prompt_tokens_total", "generation_tokens_total", "prefix_cache_hits_total", "prefix_cache_queries_total",
        "request_success_total", "request_prompt_tokens_sum", "request_generation_tokens_sum",
        "time_to_first_token_seconds_count", *HISTOGRAMS,
    )}  # fmt: skip
    prompts, generated = (sum(usage[f"{kind}_tokens"] for usage in usages) for kind in ("prompt", "completion"))
    cached = usages[1]["prompt_tokens_details"]["cached_tokens"]
    assert cached == 32, "the second request found two blocks of the first"
    assert grown["prompt_tokens_total"] == grown["request_prompt_tokens_sum"] == prompts
    assert grown["generation_tokens_total"] == grown["request_generation_tokens_sum"] == generated
    assert grown["prefix_cache_queries_total"] >= grown["prefix_cache_hits_total"] >= cached
    assert grown["request_success_total"] == 6, "a prompt is a request"
    assert grown["time_to_first_token_seconds_count"] == 6 and all(grown[name] == 6 for name in HISTOGRAMS)
    assert all(value >= before[name] for name, value in after.items() if name.endswith("_total"))


def test_gauges_while_requests_run(sim_server: ServerProcess) -> None:
    aborted = counter(sim_server, "request_success_total", finished_reason="abort")
    body = {"prompt": token_prompt(58, 160), "max_tokens": 800, "ignore_eos": True}
    with InFlight([lambda: cut_stream(sim_server, COMPLETIONS, body, chunks=150)]):
        wait_until(lambda: sim_server.metrics()["enginecore:num_requests_running"] == 1, "one request runs")
        used = sim_server.metrics()["enginecore:kv_cache_usage_perc"]
        assert 10 / 256 <= used <= 61 / 256, "blocks of one sequence over all blocks"
    baseline(sim_server)
    assert counter(sim_server, "request_success_total", finished_reason="abort") == aborted + 1
