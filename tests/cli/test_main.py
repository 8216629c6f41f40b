"""The command itself: quick help, and failures that are one line and the right exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from enginecore import __version__
from enginecore.cli.main import main

HEAVY = ("torch", "transformers", "fastapi", "uvicorn", "numpy", "zmq", "httpx", "tokenizers")
COMMANDS = ("serve", "generate", "chat", "bench", "devices", "doctor", "conformance", "plugin")


def test_help_imports_nothing_heavy() -> None:
    lines = [[], *([command] for command in COMMANDS), ["bench", "throughput"], ["plugin", "new"]]
    script = (
        "import sys\n"
        "from enginecore.cli.main import main\n"
        f"codes = [main([*line, '--help']) for line in {lines!r}]\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "assert not heavy, heavy\n"
        "assert not any(codes), codes\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage") == len(lines)


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(command in shown for command in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"enginecore {__version__}"


def test_python_dash_m() -> None:
    done = subprocess.run([sys.executable, "-m", "enginecore", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, f"enginecore {__version__}")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["frobnicate"], 2, "No such command"),
        (["serve", "--nope"], 2, "--nope"),
        (["serve", "--port", "70000"], 2, "65535"),
        (["serve", "--port", "x"], 2, "--port"),
        (["generate", "--prompt", "hi", "--dtype", "int4"], 2, "int4"),
        (["generate", "--prompt", "hi", "--max-model-len", "-3"], 2, "max_model_len"),
        (["generate", "--prompt", "hi", "--max-model-len", "lots"], 2, "lots"),
        (["generate", "--prompt", "hi", "--kv-cache-memory", "2 elephants"], 2, "2 elephants"),
        (["generate", "--prompt", "hi", "--kv-cache-memory", "1GiB", "--num-blocks", "9"], 2, "not both"),
        (["generate", "--prompt", "hi", "--block-size", "17"], 2, "block_size"),
        (["generate", "--prompt", "hi", "--device-option", "oops"], 2, "NAME=VALUE"),
        (["generate", "--prompt", "hi", "--scheduling-policy", "lottery"], 2, "lottery"),
        (["generate", "--prompt", "hi", "--temperature", "-1"], 2, "temperature"),
        (["generate", "--prompt", "hi", "--device", "warp"], 2, "warp"),
        (["generate"], 2, "--prompt"),
        (["generate", "--prompts", "in.jsonl"], 2, "--out"),
        (["bench", "latency", "--batch-sizes", "1,x"], 2, "batch_sizes"),
        (["bench", "throughput", "--workload", "missing.json"], 2, "missing.json"),
        (["serve", "--override-generation-config", "[]"], 2, "override_generation_config"),
        (["generate", "no-such-model", "--prompt", "hi"], 1, "no-such-model"),
        (["generate", "missing.gguf", "--prompt", "hi"], 1, "missing.gguf"),
    ],
)
def test_a_failure_is_one_line_and_an_exit_code(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(arguments) == code
    shown = capsys.readouterr()
    assert not shown.out
    lines = shown.err.splitlines()
    assert lines[0].startswith("error: ") and said in lines[0]
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("fix: "))
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    assert main(["generate", str(tmp_path), "--prompt", "hi", "--device", "cpu"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and "Traceback" not in shown


def test_a_file_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\x03\x00\x00\x00\xff")
    assert main(["generate", str(tmp_path / "broken.gguf"), "--prompt", "hi", "--device", "cpu"]) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and "broken.gguf" in shown and "Traceback" not in shown


@pytest.mark.parametrize("arguments", [["--debug", "generate"], ["generate", "--debug"]])
def test_debug_adds_the_traceback(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr().err
    assert "Traceback" in shown and "\nerror: " in shown


def test_a_bug_is_one_line_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("enginecore.cli.bench_workload.load_workload", broken)
    assert main(["bench", "throughput"]) == 1
    shown = capsys.readouterr().err
    assert "ZeroDivisionError: oops" in shown and "--debug" in shown and "Traceback" not in shown


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("enginecore.cli.bench_workload.load_workload", interrupted)
    assert main(["bench", "throughput"]) == 130
    assert "Traceback" not in capsys.readouterr().err
