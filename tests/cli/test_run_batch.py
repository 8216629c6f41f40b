"""`enginecore run-batch`: on the simulated device, and once on the real model."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from enginecore.cli.main import main
from enginecore.cli.run_batch import SOME_FAILED
from enginecore.cli.run_batch_file import Files
from openai.types.chat import ChatCompletion

SIM = ["--device", "sim", "--max-model-len", "256", "--num-blocks", "64", "--served-model-name", "toy"]


def request(custom_id: str, **body: Any) -> str:
    body = {"model": "toy", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body})


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def batch(model: str, *options: Any) -> list[str]:
    return ["run-batch", "--model", model, *SIM, *map(str, options)]


@pytest.mark.model
def test_the_real_model_says_what_it_says_elsewhere(
    smollm2: str, tmp_path: Path, greedy_reference: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """All of the reference's prompts at once, beside lines that are wrong."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    cases = {f"case-{number}": case for number, case in enumerate(greedy_reference[:6])}
    lines = ["{"]
    for name, case in cases.items():
        ask = {"prompt": case["prompt_token_ids"], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        ask["ignore_eos"] = True
        lines += ["", json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": ask})]
    chat = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 12}
    body = {**chat, "temperature": 0}
    lines += [json.dumps({"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": body})]
    source.write_text("\n".join(lines))
    line = ["run-batch", str(source), str(out), "--model", smollm2, "--device", "cpu", "--dtype", "float32"]
    sizes = ["--max-model-len", "512", "--num-blocks", "128", "--json"]
    assert main([*line, *sizes]) == SOME_FAILED
    summary = json.loads(capsys.readouterr().out)
    assert (summary["succeeded"], summary["invalid"], summary["failures"]) == (7, 1, {"invalid_json": 1})
    found = {entry["custom_id"]: entry["response"] for entry in read(out)}
    assert set(found) == {*cases, "chat", None}
    for name, case in cases.items():
        choice = found[name]["body"]["choices"][0]
        assert choice["token_ids"] == case["output_token_ids"][:8], name
    answer = ChatCompletion.model_validate(found["chat"]["body"])
    assert "Paris" in (answer.choices[0].message.content or "") and answer.usage is not None


def test_standard_streams(smollm2: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = "\n".join(request(str(number)) for number in range(5))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    out = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr("sys.stdout", out)
    assert main([*batch(smollm2, "-", "-"), "--json"]) == 0
    written = [json.loads(line) for line in out.buffer.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert sorted(entry["custom_id"] for entry in written) == ["0", "1", "2", "3", "4"]
    assert json.loads(capsys.readouterr().err)["generated_tokens"] == 20


def test_it_goes_on_where_it_was_cut_off(smollm2: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What has an answer stays as it is, what failed for now is tried again, and half a line is forgotten."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([request("a"), request("b"), request("c", temperature=-1), request("d"), "nonsense"]))
    kept = {"id": "x", "custom_id": "a", "response": {"status_code": 200, "request_id": "r", "body": {}}, "error": None}
    lost = {**kept, "custom_id": "b", "response": {"status_code": 503, "request_id": "r", "body": {}}}
    out.write_text("\n".join([json.dumps(kept), json.dumps(lost), json.dumps({**kept, "custom_id": "d"})[:40]]))
    assert main(batch(smollm2, source, out)) == 2 and "--resume" in capsys.readouterr().err
    assert main([*batch(smollm2, source, out), "--resume", "--json"]) == SOME_FAILED
    summary = json.loads(capsys.readouterr().out)
    counted = {name: summary[name] for name in ("skipped", "succeeded", "failed", "invalid")}
    assert counted == {"skipped": 1, "succeeded": 2, "failed": 1, "invalid": 1}
    entries = read(out)
    assert sorted(str(entry["custom_id"]) for entry in entries) == ["None", "a", "b", "c", "d"] and entries[0] == kept
    by_id = {entry["custom_id"]: entry["response"] for entry in entries}
    with Files(str(source), out, resume=True, overwrite=False) as files:
        assert files.done == {"a", "b", "c", "d"}, "nothing is left for another time"
    assert by_id["b"]["status_code"] == by_id["d"]["status_code"] == 200 and by_id["c"]["status_code"] == 400


def test_refused_before_the_model_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, other = tmp_path / "in.jsonl", tmp_path / "other.jsonl"
    source.write_text(request("a"))
    other.write_text("something else\n")
    for options, word in (
        ([source, source], "is the input too"),
        ([source, tmp_path], "is a directory"),
        ([source, "-", "--resume"], "standard output"),
        ([source, other, "--resume"], "line 1"),
        ([source, other, "--resume", "--overwrite"], "either"),
    ):
        assert main(batch("no-such-model", *options)) == 2
        assert word in capsys.readouterr().err
    assert main(batch("no-such-model", tmp_path / "none.jsonl", "-")) == 1
    assert "none.jsonl" in capsys.readouterr().err and other.read_text() == "something else\n"


def test_interrupted(smollm2: str, tmp_path: Path) -> None:
    """A pipe that stays open, a signal: what was answered is there, and the exit code tells."""
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "enginecore", *batch(smollm2, "-", out), "--json"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(request("a").encode() + b"\n")
        process.stdin.flush()
        deadline = time.monotonic() + 120
        while not out.exists() or not out.read_bytes().endswith(b"\n"):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        summary = json.loads(process.stdout.read())
        assert process.wait(60) == 130
    assert (summary["finished"], summary["succeeded"]) == (False, 1) and read(out)[0]["custom_id"] == "a"
