"""`enginecore generate`, on the simulated device and once on the real model."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from enginecore.cli.main import main

SIM = ["--device", "sim", "--max-model-len", "256", "--num-blocks", "64"]


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and "Traceback" not in shown
    return shown


@pytest.mark.model
def test_one_prompt_on_the_real_model(smollm2: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", smollm2, "--device", "cpu", "--dtype", "float32", "--max-model-len", "64", "--num-blocks", "8"]
    assert main([*line, "--prompt", "The capital of France is", "--max-tokens", "3", "--temperature", "0"]) == 0
    assert "Paris" in capsys.readouterr().out


def test_a_prompt_from_standard_input(
    smollm2: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert main(["generate", smollm2, *SIM, "--prompt", "-", "--max-tokens", "4"]) == 0
    assert capsys.readouterr().out.strip()


def test_a_file_of_prompts(smollm2: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(
        tmp_path / "in.jsonl",
        {"id": "first", "prompt": "Hello", "max_tokens": 5, "ignore_eos": True},
        "",
        {"id": 2, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True},
        {"prompt_token_ids": [1, 2, 3], "n": 2, "logprobs": 1, "ignore_eos": True, "logit_bias": {"5": -100}},
    )
    out = tmp_path / "out.jsonl"
    line = ["generate", smollm2, *SIM, "--prompts", str(source), "--out", str(out), "--max-tokens", "2"]
    assert main([*line, "--no-progress"]) == 0
    first, second, third = read_lines(out)
    assert (first["id"], first["num_output_tokens"], first["finish_reason"]) == ("first", 5, "length")
    assert first["text"] and len(first["token_ids"]) == 5
    assert (second["id"], second["num_output_tokens"]) == (2, 3)
    assert "id" not in third and third["num_prompt_tokens"] == 3
    assert [len(choice["token_ids"]) for choice in third["choices"]] == [2, 2]
    assert all(len(choice["logprobs"]) == 2 for choice in third["choices"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    assert "3 answers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "not JSON"),
        ("[1, 2]", "not a JSON object"),
        ("{}", "exactly one of"),
        ({"prompt": "a", "messages": []}, "exactly one of"),
        ({"prompt": ""}, "not empty"),
        ({"prompt": 5}, "must be text"),
        ({"prompt_token_ids": ["a"]}, "list of token ids"),
        ({"prompt_token_ids": []}, "list of token ids"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"prompt": "a", "temprature": 1}, "temprature"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "top_p": 2}, "top_p"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "min_tokens": 9}, "min_tokens"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_is_refused_with_its_number_before_the_model_is_looked_for(
    line: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"prompt": "fine"}, "", line)
    out = tmp_path / "out.jsonl"
    arguments = ["generate", "no-such-model", "--prompts", str(source), "--out", str(out), "--max-tokens", "8"]
    assert main(arguments) == 2
    shown = refused(capsys)
    assert "in.jsonl, line 3: " in shown and said in shown
    assert not out.exists()


@pytest.mark.parametrize("others", [0, 2])
def test_what_only_the_model_can_refuse_has_its_line_too(
    others: int, smollm2: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [{"prompt": "fine"}] * others
    source = write_lines(tmp_path / "in.jsonl", "", *good, {"prompt_token_ids": [10**6]}, *good)
    out = tmp_path / "out.jsonl"
    out.write_text("old\n")
    assert main(["generate", smollm2, *SIM, "--prompts", str(source), "--out", str(out), "--no-progress"]) == 2
    assert f"line {others + 2}: " in refused(capsys)
    assert out.read_text() == "old\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text(text)
    line = ["generate", "--prompts", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    assert main(line) == 2
    assert "no requests" in refused(capsys)


def test_a_file_that_is_not_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "\xff"}')
    line = ["generate", "--prompts", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    assert main(line) == 2
    assert "UTF-8" in refused(capsys)


def test_a_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", "--prompts", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    assert main(line) == 1
    assert "in.jsonl" in refused(capsys)


def test_an_output_that_cannot_be_written_is_found_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "in.jsonl", {"prompt": "fine"})
    for out in (tmp_path, tmp_path / "nowhere" / "out.jsonl"):
        assert main(["generate", "no-such-model", "--prompts", str(source), "--out", str(out)]) == 2
        assert "--out" in refused(capsys)
