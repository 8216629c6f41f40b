"""F02: cached blocks belong to one load of one adapter; neither names nor salts make two the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from enginecore.models.inspect import inspect_model
from enginecore.models.store import resolve_model

from tests.field.support import COMPLETIONS, PASSIVE
from tests.lora.making import make_tensors, write_adapter
from tests.serving import MODEL_NAME, ServerProcess

PROMPT = [(7 * i) % 4000 + 100 for i in range(100)]


@pytest.fixture(scope="module")
def folder(smollm2: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters that change a lot; `s1` and `a` are the same weights."""
    root = tmp_path_factory.mktemp("adapters")
    linears = inspect_model(resolve_model("smollm2-135m"), "float32").linears
    for name, seed in (("a", 1), ("b", 2), ("s1", 1)):
        write_adapter(root / name, make_tensors(linears, seed, spread=0.3))
    return root


@pytest.fixture(scope="module")
def adapted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("adapted") / "log"
    options = ["--dtype", "float32", "--num-blocks", "128", "--max-model-len", "256", "--enable-lora"]
    options += ["--lora-root", str(folder), "--admin-key", "boss", "--max-cpu-loras", "8"]
    options += [part for name in ("a", "b", "s1") for part in ("--lora-modules", f"{name}={folder / name}")]
    with ServerProcess(*options, log=log, env=PASSIVE) as running:
        running.http.headers["Authorization"] = "Bearer boss"
        yield running


def ask(server: ServerProcess, adapter: str | None, salt: str | None = None) -> tuple[str, int]:
    """(text, how many of the prompt's tokens were found cached)"""
    body = {"model": adapter or MODEL_NAME, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    reply = server.post(COMPLETIONS, {**body, **({"cache_salt": salt} if salt else {})})
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def operate(server: ServerProcess, route: str, **fields: str) -> None:
    assert server.post(f"/v1/{route}_lora_adapter", {"lora_name": "x", **fields}).status_code == 200


def forget(server: ServerProcess) -> None:
    assert server.post("/reset_prefix_cache", {}).status_code == 200


@pytest.mark.model
def test_each_finds_its_own_blocks_only(adapted: ServerProcess) -> None:
    cold = {}
    for name in ("a", "b", None):
        forget(adapted)
        cold[name] = ask(adapted, name)[0]
    assert len(set(cold.values())) == 3, "the adapters change what is said"
    forget(adapted)
    first = {name: ask(adapted, name) for name in ("a", "b", None)}
    assert first == {name: (text, 0) for name, text in cold.items()}
    again = {name: ask(adapted, name) for name in ("a", "b", None, "a")}
    assert all(again[name][0] == text and again[name][1] >= 96 for name, text in cold.items())


@pytest.mark.model
def test_the_same_name_for_other_weights(adapted: ServerProcess) -> None:
    forget(adapted)
    wanted = ask(adapted, "b")[0]
    operate(adapted, "load", lora_path="a")
    old = ask(adapted, "x")
    assert old[1] == 0 and ask(adapted, "x") == (old[0], 96)
    operate(adapted, "unload")
    operate(adapted, "load", lora_path="b")
    assert ask(adapted, "x") == (wanted, 0)
    operate(adapted, "unload")


@pytest.mark.model
def test_a_name_is_no_salt(adapted: ServerProcess) -> None:
    forget(adapted)
    asked = [ask(adapted, *who)[1] for who in (("s1", None), (None, "s1"), ("s1", "s1"), ("a", None))]
    assert asked == [0, 0, 0, 0]
    assert [ask(adapted, *who)[1] for who in (("s1", None), (None, "s1"), ("s1", "s1"), ("a", None))] == [96] * 4
