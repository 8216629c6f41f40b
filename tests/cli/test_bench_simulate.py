"""`enginecore bench simulate`: the real scheduler over a modelled device. Nothing depends on this machine's speed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from enginecore.cli import bench_simulate
from enginecore.cli.bench_simulate import Timeline, simulated_device
from enginecore.cli.main import main
from enginecore.errors import ParameterError

H100 = {"flops": 989.4e12, "bytes_per_s": 3.35e12}
LLAMA_8B_WEIGHTS = 8_029_995_008
EMBEDDING = 128_256 * 4096


def simulate(capsys: pytest.CaptureFixture[str], *arguments: str, model: str = "llama-3-8b") -> dict[str, Any]:
    code = main(["bench", "simulate", model, "--profile", "h100", *arguments, "--json"])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    report: dict[str, Any] = json.loads(shown.out)
    return report


def virtual(report: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on this machine."""
    return {key: value for key, value in report.items() if key not in ("host", "versions", "machine", "command")}


def test_the_same_traffic_twice_gives_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    line = ("--num-requests", "60", "--rate", "20", "--max-model-len", "1024")
    first = simulate(capsys, *line)
    assert virtual(first) == virtual(simulate(capsys, *line))
    assert (first["num_requests"], first["num_failed"]) == (60, 0)
    assert first["ttft_ms"]["p50"] > 0 and first["e2e_ms"]["p99"] >= first["e2e_ms"]["p50"] > first["ttft_ms"]["p50"]
    assert 0 < first["kv_waste"] < 0.1 and first["device_busy"] <= 1
    assert first["settings"]["device"] == "sim" and first["host"]["scheduler_us_per_running_request"] > 0
    assert len(first["timeline"]["at_s"]) == len(first["timeline"]["kv_usage"]) <= 200
    assert virtual(first) != virtual(simulate(capsys, *line, "--traffic-seed", "1"))


def test_more_load_never_passes_the_roofline(capsys: pytest.CaptureFixture[str]) -> None:
    """Each token costs two operations a weight that is multiplied, each step reads those weights once."""
    multiplied = LLAMA_8B_WEIGHTS - EMBEDDING
    rates = []
    for rate in ("1", "20", "400", "8000"):
        report = simulate(capsys, "--num-requests", "150", "--lengths", "128:32", "--rate", rate)
        layers_only = multiplied - EMBEDDING  # the head works for the last token of a prompt only
        assert report["total_tok_per_s"] * 2 * layers_only <= H100["flops"]
        assert report["num_steps"] / report["virtual_s"] * multiplied * 2 <= H100["bytes_per_s"]
        assert report["device_busy"] <= 1
        assert report["output_tokens"] == 150 * 32
        rates.append(report["output_tok_per_s"])
    assert rates == sorted(rates) and rates[0] < 0.1 * rates[-1]


def test_a_faster_device_is_faster(capsys: pytest.CaptureFixture[str]) -> None:
    line = ("--num-requests", "20", "--lengths", "64:16")
    h100, h200, slow = (
        simulate(capsys, *line, *more)
        for more in ((), ("--profile", "h200"), ("--device-option", "bandwidth_efficiency=0.5"))
    )
    assert h200["virtual_s"] < h100["virtual_s"] < slow["virtual_s"]


def test_prefix_caching_shortens_the_first_token(capsys: pytest.CaptureFixture[str]) -> None:
    line = ("--num-requests", "30", "--lengths", "16:8", "--shared-prefix", "2000", "--rate", "5")
    cached, plain = simulate(capsys, *line), simulate(capsys, *line, "--no-prefix-caching")
    assert cached["prefix_cache_hit_rate"] > 0.9 and plain["prefix_cache_hit_rate"] == 0
    assert cached["ttft_ms"]["p50"] < 0.5 * plain["ttft_ms"]["p50"]
    assert cached["peak_kv_usage"] <= plain["peak_kv_usage"]


def test_pressure_preempts_and_everyone_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    line = ("--num-requests", "40", "--lengths", "60:190", "--max-model-len", "256")
    tight, roomy = simulate(capsys, *line, "--num-blocks", "64"), simulate(capsys, *line)
    assert tight["num_preemptions"] > 0 and roomy["num_preemptions"] == 0
    assert tight["output_tokens"] == roomy["output_tokens"] == 40 * 190 and tight["num_failed"] == 0
    assert tight["virtual_s"] > roomy["virtual_s"] and tight["peak_waiting"] > roomy["peak_waiting"]
    assert tight["peak_kv_usage"] > 0.9


def test_a_configuration_file_is_enough(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    path.write_text(json.dumps({**sizes, "vocab_size": 500, "max_position_embeddings": 128, "model_type": "llama"}))
    report = simulate(capsys, "--num-requests", "5", "--dtype", "bfloat16", model=str(path))
    assert report["settings"]["vocab_size"] == 500 and report["num_failed"] == 0


def test_a_plot_in_both_formats(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, magic in (("plot.svg", b"<?xml"), ("plot.png", b"\x89PNG")):
        target = tmp_path / name
        simulate(capsys, "--num-requests", "5", "--lengths", "16:4", "--plot", str(target))
        assert target.read_bytes().startswith(magic)


@pytest.mark.parametrize(
    ("arguments", "code", "what"),
    [
        (["--profile", "b9000"], 2, "has no profile 'b9000'"),
        (["--profile", "h100", "--lengths", "some"], 2, "lengths must be"),
        (["--device", "cpu"], 8, "models no time"),
        (["--profile", "h100", "--plot", "plot.txt"], 2, "must end in .svg or .png"),
        (["--profile", "h100", "--plot", "/no/such/plot.svg"], 2, "no folder /no/such"),
        (["--num-requests", "1"], 8, "models no time"),
        (["--profile", "h100", "--num-requests", "0"], 2, "num-requests"),
    ],
    ids=str,
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, what: str) -> None:
    assert main(["bench", "simulate", "llama-3-8b", *arguments]) == code
    assert what in capsys.readouterr().err


def test_the_simulated_device_is_found_by_its_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert simulated_device() == "enginecore-sim:sim"
    monkeypatch.setattr(bench_simulate, "discover", list)
    with pytest.raises(ParameterError, match="installed: none"):
        simulated_device()


def test_a_long_timeline_is_thinned() -> None:
    timeline = Timeline()
    timeline.at_s = [float(i) for i in range(1001)]
    timeline.waiting = timeline.running = list(range(1001))
    timeline.kv_usage = [0.0] * 1001
    columns = timeline.columns(100)
    assert len(columns["at_s"]) <= 100 and columns["at_s"][:2] == [0.0, 11.0] and columns["waiting"][1] == 11
