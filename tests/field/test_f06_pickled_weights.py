"""F06: loading a model runs no code that came with it."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from enginecore.config import EngineArgs
from enginecore.engine.client import InprocClient
from enginecore.errors import ModelError
from enginecore.request import EngineRequest, SamplingParams

from tests.models.tiny import tiny_tokens, write_tiny


class _Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, sentinel: Path) -> None:
        self._sentinel = str(sentinel)

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self._sentinel, "w")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose safetensors are in place; the cases take them away or put something beside them."""
    write_tiny(tmp_path / "model", "llama")
    return tmp_path / "model"


def _load(folder: Path, *, allow_pickle: bool = False) -> list[int]:
    """Load the model and let it say four tokens."""
    client = InprocClient(
        EngineArgs(model=str(folder), device="cpu", dtype="float32", num_blocks=16, allow_pickle=allow_pickle)
    )
    try:
        params = SamplingParams(temperature=0, max_tokens=4)
        client.add(EngineRequest("r", tiny_tokens(5), params, 4))
        tokens: list[int] = []
        while client.has_work():
            tokens += client.step().outputs[0].token_ids
        return tokens
    finally:
        client.shutdown()


def _poison(path: Path, sentinel: Path, *, how: str) -> None:
    if how == "torch":
        torch.save({"model.norm.weight": _Payload(sentinel)}, path)
    else:
        path.write_bytes(pickle.dumps({"model.norm.weight": _Payload(sentinel)}))


@pytest.mark.parametrize("how", ["torch", "pickle"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00001.bin", "model.pt", "weights.ckpt"])
@pytest.mark.parametrize("allow_pickle", [False, True])
def test_the_payload_is_refused_and_not_run(
    folder: Path, tmp_path: Path, name: str, how: str, allow_pickle: bool
) -> None:
    (folder / "model.safetensors").unlink()
    _poison(folder / name, tmp_path / "sentinel", how=how)
    if "-of-" in name:
        index = {"metadata": {}, "weight_map": {"model.norm.weight": name}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError) as caught:
        _load(folder, allow_pickle=allow_pickle)
    assert name in str(caught.value), "the message names the file"
    assert not (tmp_path / "sentinel").exists()


def test_safetensors_beside_it_are_taken(folder: Path, tmp_path: Path) -> None:
    clean = _load(folder)
    _poison(folder / "pytorch_model.bin", tmp_path / "sentinel", how="torch")
    assert _load(folder) == _load(folder, allow_pickle=True) == clean
    assert not (tmp_path / "sentinel").exists()


def test_honest_pickles_load_where_allowed(folder: Path) -> None:
    wanted = _load(folder)
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert _load(folder, allow_pickle=True) == wanted
    with pytest.raises(ModelError, match="--allow-pickle"):
        _load(folder)


def test_a_server_says_so_in_one_line_and_ends(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    _poison(folder / "pytorch_model.bin", tmp_path / "sentinel", how="torch")
    command = [sys.executable, "-m", "enginecore.cli.main", "serve", str(folder), "--device", "cpu", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode not in (0, -11), done.stderr
    assert "pytorch_model.bin" in done.stderr and "Traceback" not in done.stderr + done.stdout
    assert not (tmp_path / "sentinel").exists()
