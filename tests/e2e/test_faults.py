"""What can go wrong around a server: its engine is killed, its model is broken, its port is taken.

Every failure is one line that names the file or the address, a non-zero exit, and nothing left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from enginecore.cli.main import main

from tests.models.tiny import write_tiny
from tests.server.checkers import check_error, parse_events
from tests.serving import SMALL, ServerProcess, free_port

SIZES = ("--max-model-len", "64", "--num-blocks", "8")

# ---- the engine is killed --------------------------------------------------------------------------------------------


def test_the_engine_is_killed_while_two_streams_run(tmp_path: Path) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 1000, "ignore_eos": True, "stream": True}
    scratch = Path(tempfile.mkdtemp(prefix="scratch-"))  # short: sockets would go elsewhere from under a long path
    env = {"TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}
    options = (*SMALL, "--device-option", "step_time_s=0.02")
    with (
        ServerProcess(*options, device="sim", log=tmp_path / "log", env=env) as server,
        contextlib.ExitStack() as open_,
    ):
        streams = [open_.enter_context(server.http.stream("POST", "/v1/completions", json=body)) for _ in range(2)]
        pieces = [stream.iter_text() for stream in streams]
        texts = [next(piece) for piece in pieces]
        started = psutil.Process(server.process.pid).children(recursive=True)
        (engine,) = [child for child in started if "enginecore.engine.process" in child.cmdline()]
        killed = time.monotonic()
        engine.kill()
        texts = [text + "".join(piece) for text, piece in zip(texts, pieces, strict=True)]
        health = server.http.get("/health")
        assert time.monotonic() - killed < 3
        assert check_error(health.status_code, health.content, 503)["code"] == "engine_dead"
        for path, fields in (("/v1/completions", body), ("/tokenize", {"prompt": "x"})):
            refused = server.post(path, fields)
            check_error(refused.status_code, refused.content, 503)
        for text in texts:
            *chunks, last = parse_events(text)
            assert last["error"]["code"] == "engine_dead" and chunks
            assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
        assert server.process.wait(30) == 1
        assert not psutil.wait_procs(started, timeout=10)[1], "no child is left"
        assert list(scratch.iterdir()) == [], "no socket or file is left"
        log = server.log.read_text()
        assert "the engine process has ended" in log and "Traceback" not in log


# ---- the model is broken ---------------------------------------------------------------------------------------------


def cut(path: Path, size: int) -> None:
    """Keep the first `size` bytes; a negative size drops that many from the end."""
    path.write_bytes(path.read_bytes()[:size])


def change(path: Path, **values: Any) -> None:
    """Set members of a config.json."""
    config = path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **values}))


#: name -> (what is done to a copy of a good model, what the message must name).
FAULTS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "truncated": (lambda d: cut(d / "model-00002-of-00002.safetensors", -100), ("model-00002", "truncated")),
    "cut in the header": (lambda d: cut(d / "model-00001-of-00002.safetensors", 40), ("model-00001", "truncated")),
    "empty file": (lambda d: cut(d / "model-00001-of-00002.safetensors", 0), ("model-00001", "0 bytes")),
    "garbage": (
        lambda d: (d / "model-00001-of-00002.safetensors").write_bytes(b"\xee" * 999),
        ("model-00001", "corrupt"),
    ),
    "missing shard": (lambda d: (d / "model-00002-of-00002.safetensors").unlink(), ("model-00002", "missing")),
    "senseless index": (lambda d: (d / "model.safetensors.index.json").write_text("{}"), ("index.json", "weight_map")),
    "no weights": (lambda d: list(map(os.remove, d.glob("model*"))), ("no weights",)),
    "no config": (lambda d: (d / "config.json").unlink(), ("no config.json",)),
    "config is no JSON": (lambda d: (d / "config.json").write_text("{"), ("config.json", "not valid JSON")),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), ("config.json", "object")),
    "unknown type": (lambda d: change(d, model_type="frobnicator"), ("frobnicator",)),
    "size is a word": (lambda d: change(d, hidden_size="big"), ("hidden_size", "big")),
    "no heads": (lambda d: change(d, num_attention_heads=0), ("config.json",)),
    "other shape": (lambda d: change(d, hidden_size=128), ("shape", "(160, 64)", "(160, 128)")),
    "one more layer": (lambda d: change(d, num_hidden_layers=4), ("layers.3", "missing")),
    "no tokenizer": (lambda d: None, ("tokenizer.json",)),
}


@pytest.fixture(scope="module")
def good_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in two files."""
    path = tmp_path_factory.mktemp("models") / "good"
    write_tiny(path, "llama", max_shard_size="300KB")
    assert (path / "model-00002-of-00002.safetensors").is_file()
    return path


def one_line(stderr: str, words: tuple[str, ...]) -> None:
    """Standard error is an `error:` line with these words and maybe a `fix:` line."""
    lines = stderr.splitlines()
    assert lines and lines[0].startswith("error: "), stderr
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("fix: ")), stderr
    assert all(word in lines[0] for word in words), stderr
    assert len(lines[0]) < 500


def generate(model: Path | str, folder: Path) -> int:
    """`enginecore generate` from a file to a file in `folder`; only the file of prompts may be there afterwards."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "hi"}\n')
    options = ["--prompts", str(prompts), "--out", str(folder / "out.jsonl"), "--no-progress", *SIZES]
    code = main(["generate", str(model), "--device", "cpu", *options])
    assert [each.name for each in folder.iterdir()] == ["prompts.jsonl"]
    return code


@pytest.mark.parametrize("fault", FAULTS)
def test_broken_models(fault: str, good_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spoil, words = FAULTS[fault]
    model, folder = tmp_path / "model", tmp_path / "folder"
    shutil.copytree(good_model, model)
    folder.mkdir()
    spoil(model)
    before = sorted(each.name for each in model.iterdir())
    assert generate(model, folder) == 1
    captured = capfd.readouterr()
    one_line(captured.err, words)
    assert captured.out == "" and sorted(each.name for each in model.iterdir()) == before


@pytest.mark.parametrize("size", [0, 3, 20, 1000, 2_000_000, -1000])
def test_broken_gguf(size: int, smollm2: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with open(smollm2, "rb") as file:
        whole = os.path.getsize(smollm2)
        data = file.read(size if size >= 0 else whole + size)
    for name, content in (("cut", data), ("other-magic", b"XXXX" + data[4:2000]), ("lies", data[:16] + b"\xff" * 64)):
        broken = tmp_path / f"{name}.gguf"
        broken.write_bytes(content)
        folder = tmp_path / name
        folder.mkdir()
        assert generate(broken, folder) == 1
        one_line(capfd.readouterr().err, (f"{name}.gguf",))


@pytest.mark.parametrize(
    "name", ["no-such-model", "no-such/model", "./no/such/folder", "missing.gguf", "/dev/null", ""]
)
def test_unknown_models(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("ENGINECORE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "folder"
    folder.mkdir()
    assert generate(name, folder) in (1, 2)
    one_line(capfd.readouterr().err, (name,))
    assert not (tmp_path / "cache").exists() or not any((tmp_path / "cache").rglob("*.*"))


def test_serving_a_broken_model(good_model: Path, tmp_path: Path) -> None:
    """The engine's process finds it; the command says it once and leaves no socket behind."""
    model, scratch = tmp_path / "model", tmp_path / "scratch"
    shutil.copytree(good_model, model)
    scratch.mkdir()
    cut(model / "model-00002-of-00002.safetensors", -100)
    port = free_port()
    command = [sys.executable, "-m", "enginecore", "serve", str(model), "--device", "cpu", "--port", str(port), *SIZES]
    env = {**os.environ, "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 1 and done.stdout == ""
    one_line(done.stderr, ("model-00002", "truncated"))
    assert list(scratch.iterdir()) == []
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{port}/health")


# ---- the port is taken -----------------------------------------------------------------------------------------------


def test_a_taken_port_is_known_before_anything_is_loaded(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["serve", "no-such-model", "--device", "cpu", "--port", str(port)]) == 1
    one_line(capfd.readouterr().err, (f"127.0.0.1:{port}",))


def test_an_address_that_is_not_ours(capfd: pytest.CaptureFixture[str]) -> None:
    for host in ("192.0.2.1", "no.such.host.invalid"):
        assert main(["serve", "--device", "cpu", "--host", host]) == 1
        one_line(capfd.readouterr().err, (host,))


def test_an_interrupt_while_the_model_loads(tmp_path: Path) -> None:
    scratch = Path(tempfile.mkdtemp(prefix="scratch-"))  # short: sockets would go elsewhere from under a long path
    env = {"TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}
    server = ServerProcess(*SMALL, device="sim", log=tmp_path / "log", env=env)
    try:
        deadline = time.monotonic() + 60
        while not list(scratch.iterdir()):  # the engine's sockets: it is being started
            assert server.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) in (0, 130)
        assert not psutil.wait_procs(children, timeout=10)[1] and list(scratch.iterdir()) == []
    finally:
        server.kill()
        shutil.rmtree(scratch)
