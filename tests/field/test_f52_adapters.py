"""F52: adapters of several ranks in one batch, names that are and are not there, files that do not fit."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from enginecore.models.inspect import inspect_model
from enginecore.models.store import resolve_model

from tests.field.support import COMPLETIONS, PASSIVE, unharmed
from tests.lora.making import make_tensors, write_adapter
from tests.serving import ServerProcess

RANKS = {"four": 4, "eight": 8, "sixty-four": 64}


@pytest.fixture(scope="module")
def root(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good adapters by name, and bad ones."""
    root = tmp_path_factory.mktemp("adapters")
    linears = inspect_model(resolve_model("smollm2-135m"), "float32").linears
    for name, rank in RANKS.items():
        write_adapter(root / name, make_tensors(linears, rank, rank, spread=0.2), rank)
    good = make_tensors(linears, 1, 8)
    write_adapter(root / "keys", {f"other.{name}": tensor for name, tensor in good.items()}, 8)
    write_adapter(root / "shape", {name: tensor[:, :-1].contiguous() for name, tensor in good.items()}, 8)
    write_adapter(root / "rank", make_tensors(linears, 1, 128), 128)
    shutil.copytree(root / "eight", root / "half")
    (root / "half" / "adapter_model.safetensors").unlink()
    return root


@pytest.fixture(scope="module")
def adapted(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Room for two adapters in a batch, for four in all, and an operator's key."""
    log = tmp_path_factory.mktemp("adapted") / "log"
    options = ["--dtype", "float32", "--max-model-len", "256", "--num-blocks", "128", "--max-num-seqs", "8"]
    options += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "64", "--lora-root", str(root)]
    options += ["--max-cpu-loras", "4", "--admin-key", "boss"]
    options += [part for name in RANKS for part in ("--lora-modules", f"{name}={root / name}")]
    with ServerProcess(*options, log=log, env=PASSIVE) as running:
        running.http.headers["Authorization"] = "Bearer boss"
        yield running


def say(server: ServerProcess, model: str, i: int) -> str:
    """What a model or adapter says to prompt i."""
    body = {
        "model": model,
        "prompt": f"Number {i} of the list is",
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }
    reply = server.post(COMPLETIONS, body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == model
    text: str = reply.json()["choices"][0]["text"]
    return text


def load(server: ServerProcess, name: str, path: str) -> Any:
    return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})


@pytest.mark.model
def test_eight_at_once_say_what_each_says_alone(adapted: ServerProcess) -> None:
    """Three adapters and the model, for two places."""
    who = [("smollm2", *RANKS)[i % 4] for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda i: say(adapted, who[i], i), range(8)))
    assert together == [say(adapted, name, i) for i, name in enumerate(who)]
    assert len(set(together)) == 8


@pytest.mark.model
def test_names(adapted: ServerProcess) -> None:
    listed = adapted.http.get("/v1/models").json()["data"]
    assert {each["id"]: each.get("parent") for each in listed} == {"smollm2": None, **dict.fromkeys(RANKS, "smollm2")}
    with unharmed(adapted):
        unknown = adapted.post(COMPLETIONS, {"model": "five", "prompt": "x"})
        assert unknown.status_code == 404 and "five" in unknown.json()["error"]["message"]
        twice = load(adapted, "four", "eight")
        assert twice.status_code == 400 and "four" in twice.json()["error"]["message"]


@pytest.mark.model
@pytest.mark.parametrize(
    ("path", "told"),
    [("keys", "other"), ("shape", "they must be"), ("rank", "128"), ("half", "safetensors"), ("none", "none")],
)
def test_files_that_do_not_fit(adapted: ServerProcess, path: str, told: str) -> None:
    with unharmed(adapted):
        reply = load(adapted, "new", path)
        assert reply.status_code in (400, 404) and told in reply.json()["error"]["message"]
    assert len(adapted.http.get("/v1/models").json()["data"]) == 4
