"""`enginecore bench compare`: everyone gets the same work in turns, and other makes' ways are told of."""

from __future__ import annotations

import json
from typing import Any

import pytest
from enginecore.cli.bench_client import unlike
from enginecore.cli.bench_compare import comparison_table, parse_servers
from enginecore.cli.bench_workload import WorkItem
from enginecore.cli.main import main
from enginecore.errors import ParameterError

from tests.cli.stub_server import StubServer


def compare(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code = main(["bench", "compare", *arguments, "--json"])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    report: dict[str, Any] = json.loads(shown.out)
    return report


def test_every_server_does_the_same_work_in_turns(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["a"] * 35
    with StubServer(words, api_key="mine") as ours, StubServer(words) as one, StubServer(words) as two:
        line = [f"one={one.url}/v1", two.url, "--ours", ours.url, "--api-key", "mine", "--rounds", "2"]
        report = compare([*line, "--num-requests", "3", "--concurrency", "2", "--ttft-slo", "60000"], capsys)
    name = two.url.removeprefix("http://")
    assert list(report["servers"]) == ["enginecore", "one", name] and list(report["ratios"]) == ["one", name]
    for figures in report["servers"].values():
        assert (figures["num_requests"], figures["output_tokens"], len(figures["runs"])) == (3, 105, 2)
        assert figures["goodput"]["share"] == 1
    ratio = report["ratios"]["one"]["output_tok_per_s"]
    rates = [[run["output_tok_per_s"] for run in report["servers"][key]["runs"]] for key in ("enginecore", "one")]
    assert sorted(a / b for a, b in zip(*rates, strict=True)) == pytest.approx([ratio["min"], ratio["max"]])
    assert ratio["median"] == pytest.approx((ratio["min"] + ratio["max"]) / 2)
    work = [[b["prompt"] for b in stub.bodies if b["max_tokens"] > 8] for stub in (ours, one, two)]
    assert sorted(work[0]) == sorted(work[1]) == sorted(work[2]), "the same prompts, in every round"
    assert len(set(work[0])) == 6 and len({prompt[:8] for prompt in work[0]}) == 6, "and no two begin alike"
    table = comparison_table(report)
    assert [row.split()[0] for row in table[1:4]] == ["enginecore", "one", name] and table[4].startswith("ours / one")


def test_what_another_make_does_not_know_is_left_away_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    odd = StubServer(["a", "b"], unknown=("ignore_eos", "stream_options"), usage=False)
    with StubServer(["a", "b"], per_chunk=4) as ours, odd:
        report = compare([f"odd={odd.url}", "--ours", ours.url, "--rounds", "1", "--num-requests", "2"], capsys)
    notes = report["servers"]["odd"]["notes"]
    assert [note.split(":")[0] for note in notes] == [
        "refuses stream_options",
        "refuses ignore_eos",
        "counts no tokens in its streams",
        "2 of 2 answers were shorter than asked for",
    ]
    assert report["servers"]["odd"]["output_tokens"] == 4, "chunks are counted where the server counts nothing"
    answered = [body for body in odd.bodies if "ignore_eos" not in body and "stream_options" not in body]
    assert len(answered) == 4, "the probe that went through, the warm-up, and the work"
    assert any("4.0 tokens in a chunk" in note for note in report["servers"]["enginecore"]["notes"])


def test_our_server_is_started_when_none_is_given(smollm2: str, capsys: pytest.CaptureFixture[str]) -> None:
    with StubServer(["a"] * 8) as other:
        line = [smollm2, f"other={other.url}", "--device", "sim", "--max-model-len", "512", "--num-blocks", "256"]
        report = compare([*line, "--rounds", "1", "--num-requests", "2"], capsys)
    ours = report["servers"]["enginecore"]
    assert ours["output_tokens"] == 116 + 190 and not ours["notes"] and report["startup_s"] > 0
    assert report["fingerprint"]["settings"]["max_model_len"] == 512 and smollm2 in report["settings"]["serve"]


def test_a_server_that_refuses_everything_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with StubServer(["a"]) as ours, StubServer(["a"], status=400, message="too odd") as other:
        assert main(["bench", "compare", other.url, "--ours", ours.url, "--rounds", "1"]) == 1
    shown = capsys.readouterr().err
    assert "400: too odd" in shown and other.url in shown
    assert len(other.bodies) == 8, "every choice of fields was tried"


def test_servers_by_name() -> None:
    assert parse_servers(["http://a:1/v1/", "b=https://c/?x=1"]) == [("a:1", "http://a:1"), ("b", "https://c/?x=1")]
    for text in ("a:1", "=http://a", "http://", "x=a", "enginecore=http://a"):
        with pytest.raises(ParameterError, match="urls"):
            parse_servers([text])
    for texts in ([], ["http://a", "http://a/"]):
        with pytest.raises(ParameterError):
            parse_servers(texts)


def test_no_two_prompts_begin_alike() -> None:
    text, ids = WorkItem("hello", 3), WorkItem(list(range(100)), 3)
    assert unlike(text) != unlike(text) and unlike(text).prompt[8:] == " hello"
    turned = unlike(ids).prompt
    assert isinstance(turned, list) and sorted(turned) == ids.prompt and turned[0] == (turned[-1] + 1) % 100
