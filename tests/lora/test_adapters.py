"""Adapters on the real model: what is generated is what the merged weights generate, whoever else is in the batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from enginecore import LLM, SamplingParams
from enginecore.engine.engine import Engine
from enginecore.errors import EngineCoreError, ModelError, ParameterError, UnsupportedError
from enginecore.models.inspect import inspect_model
from enginecore.models.store import resolve_model
from enginecore.request import EngineRequest

from tests.lora.making import ADAPTERS, DATA, make_tensors, write_adapter, write_known

NAMES = (None, *ADAPTERS)
TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)

Oracle = dict[str | None, list[list[int]]]


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """What the PEFT library generated in float32 (tools/write_adapter_reference.py)."""
    known: dict[str, Any] = json.loads((DATA / "adapters_float32.json").read_text())
    return known


@pytest.fixture(scope="module")
def prompts(reference: dict[str, Any]) -> list[list[int]]:
    """Two short ones and one that fills blocks."""
    found: list[list[int]] = reference["prompts"]
    return found


@pytest.fixture(scope="module")
def oracle(reference: dict[str, Any]) -> Oracle:
    found = {name or None: tokens for name, tokens in reference["outputs"].items()}
    assert set(found) == set(NAMES)
    for answers in zip(*found.values(), strict=True):
        assert len({str(tokens) for tokens in answers}) == len(NAMES), "adapters that change nothing prove nothing"
    return found


@pytest.fixture(scope="module")
def linears(smollm2: str) -> tuple[tuple[str, int, int], ...]:
    found = inspect_model(resolve_model("smollm2-135m"), "float32").linears
    assert len(found) == 7 * 30
    return found


@pytest.fixture(scope="module")
def folder(linears: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    write_known(root, linears)
    return root


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    modules = {name: str(folder / name) for name in ("a", "b")}
    with LLM(
        "smollm2-135m", device="cpu", dtype="float32", kv_cache_memory=120_000_000, max_model_len=256, max_num_seqs=16,
        enable_lora=True, lora_modules=modules, max_loras=2, max_cpu_loras=3,
    ) as made:  # fmt: skip
        made.load_adapter("c", str(folder / "c"))
        yield made


def engine_of(llm: LLM) -> Engine:
    return llm._client._engine


def run(llm: LLM, prompts: list[list[int]], adapters: Any) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, adapter=adapters)
    return [output.outputs[0].token_ids for output in outputs]


def test_a_mixed_batch_equals_the_merged_weights(llm: LLM, prompts: list[list[int]], oracle: Oracle) -> None:
    """Base, a and b in one batch, and c, which finds both slots taken and comes in as one of them is done."""
    llm.reset_prefix_cache()
    before = engine_of(llm).stats()
    who = [name for name in NAMES for _ in prompts]
    assert run(llm, prompts * len(NAMES), who) == [tokens for name in NAMES for tokens in oracle[name]]
    after = engine_of(llm).stats()
    assert after.adapter_steps > before.adapter_steps and after.adapter_swaps - before.adapter_swaps >= 1
    # c waited for a place: the steps are those of two batches, and fewer than if nothing had run side by side.
    assert TOKENS < after.num_steps - before.num_steps < 3 * TOKENS


@pytest.mark.parametrize("name", NAMES)
def test_alone_they_say_the_same(llm: LLM, prompts: list[list[int]], oracle: Oracle, name: str | None) -> None:
    llm.reset_prefix_cache()
    before = engine_of(llm).stats()
    assert run(llm, prompts, name) == oracle[name]
    after = engine_of(llm).stats()
    steps = after.num_steps - before.num_steps
    assert after.adapter_steps - before.adapter_steps == (0 if name is None else steps)
    replays = after.graph_replays - before.graph_replays
    assert replays == (steps - 1 if name is None else 0), "a base model beside adapters replays its decode steps"


def test_nobody_finds_what_another_adapter_has_cached(llm: LLM, prompts: list[list[int]], oracle: Oracle) -> None:
    llm.reset_prefix_cache()
    prompt = prompts[2]
    cached = {}
    for turn in range(2):
        for place, name in enumerate(NAMES):
            (output,) = llm.generate([prompt], GREEDY, use_tqdm=False, adapter=name)
            assert output.outputs[0].token_ids == oracle[name][2]
            cached[turn, place] = output.num_cached_tokens
    first = [cached[0, place] for place in range(len(NAMES))]
    second = [cached[1, place] for place in range(len(NAMES))]
    assert first == [0] * len(NAMES) and all(count >= 32 for count in second)


def test_other_weights_under_an_old_name(llm: LLM, folder: Path, prompts: list[list[int]], oracle: Oracle) -> None:
    """Nothing that is cached of the old weights is found under the new, nor under the old ones loaded again."""
    prompt = prompts[2]
    with pytest.raises(ParameterError, match="loaded already"):
        llm.load_adapter("c", str(folder / "a"))
    with pytest.raises(ParameterError, match="no more may be"):
        llm.load_adapter("d", str(folder / "a"))
    assert run(llm, [prompt], "c") == [oracle["c"][2]]
    llm.unload_adapter("c")
    with pytest.raises(ParameterError, match="there is no adapter 'c'; loaded: a, b"):
        run(llm, [prompt], "c")
    for source in ("a", "b", "c"):
        llm.load_adapter("c", str(folder / source), in_place=source != "a")
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False, adapter="c")
        assert output.num_cached_tokens == 0
        assert output.outputs[0].token_ids == oracle[source][2]


def _request(engine: Engine, name: str, prompt: list[int], count: int = TOKENS) -> EngineRequest:
    assert engine.adapters is not None
    (key,) = [info.key for info in engine.adapters.names() if info.name == name]
    params = SamplingParams(temperature=0, max_tokens=count)
    return EngineRequest(f"r-{name}-{key[1]}", prompt, params, count, adapter=key)


def test_an_adapter_stays_for_those_that_have_it(
    llm: LLM, folder: Path, prompts: list[list[int]], oracle: Oracle
) -> None:
    """Unloaded in the middle of an answer, and the name taken by other weights: the answer ends as it began."""
    engine, prompt, tokens = engine_of(llm), prompts[2], []
    assert engine.adapters is not None
    llm.load_adapter("c", str(folder / "c"), in_place=True)
    first = _request(engine, "c", prompt)
    engine.add(first)
    for _ in range(3):
        tokens += engine.step().outputs
    assert engine.unload_adapter("c") == 1
    assert first.adapter in engine.adapters._runner.loaded
    llm.unload_adapter("b")
    llm.load_adapter("c", str(folder / "b"))
    second = _request(engine, "c", prompt)
    engine.add(second)
    while engine.has_work():
        tokens += engine.step().outputs
    said = {
        request.request_id: [t for out in tokens if out.request_id == request.request_id for t in out.token_ids]
        for request in (first, second)
    }
    assert said[first.request_id] == oracle["c"][2] and said[second.request_id] == oracle["b"][2]
    assert first.adapter not in engine.adapters._runner.loaded, "its last sequence has ended"
    engine.add(first)  # late: made before the adapter was unloaded
    (output,) = engine.step().outputs
    assert output.finish_reason == "error" and "has been unloaded" in str(output.error)
    llm.load_adapter("b", str(folder / "b"))


def test_a_broken_adapter_changes_nothing(
    llm: LLM, folder: Path, linears: Any, prompts: list[list[int]], oracle: Oracle, tmp_path: Path
) -> None:
    nan = make_tensors(linears, *ADAPTERS["a"][:3])
    name = next(iter(nan))
    nan[name] = nan[name] * float("nan")
    broken = [
        (write_adapter(tmp_path / "nan", nan, 8, ADAPTERS["a"][2]), UnsupportedError, "NaN"),
        (write_adapter(tmp_path / "rank", {name: torch.zeros(4096, 576)}, 4096), UnsupportedError, "max_lora_rank 16"),
        (write_adapter(tmp_path / "names", {"model.x.lora_A.weight": torch.ones(8, 8)}), UnsupportedError, "no module"),
        (tmp_path / "nothing", ParameterError, "no folder"),
        (tmp_path, ModelError, "adapter_config.json"),
    ]
    before = engine_of(llm).list_adapters()
    for path, kind, told in broken:
        with pytest.raises(kind) as caught:
            llm.load_adapter("a", str(path), in_place=True)
        assert told in str(caught.value)
    with pytest.raises(ParameterError, match="lora_name"):
        llm.load_adapter("../a", str(folder / "a"))
    assert engine_of(llm).list_adapters() == before
    assert run(llm, prompts[:1], "a") == oracle["a"][:1]


def test_preempted_sequences_keep_their_adapter(folder: Path, prompts: list[list[int]], oracle: Oracle) -> None:
    """In a cache too small for two of the four sequences, with places for two of the three adapters, unfused."""
    with LLM(
        "smollm2-135m", device="cpu", dtype="float32", num_blocks=7, max_model_len=64, max_num_seqs=4,
        enable_lora=True, lora_modules={name: str(folder / name) for name in ADAPTERS}, max_loras=2, max_cpu_loras=3,
        enable_prefix_caching=False, fuse=False,
    ) as small:  # fmt: skip
        who = [None, "a", "b", "c"]
        assert run(small, [prompts[2]] * 4, who) == [oracle[name][2] for name in who]
        assert run(small, [prompts[0]] * 4, who) == [oracle[name][0] for name in who]
        stats = engine_of(small).stats()
        assert stats.num_preemptions > 0 and stats.adapter_swaps > 3


def test_settings_that_do_not_fit_together(folder: Path) -> None:
    for settings, param in (
        ({"lora_modules": {"a": "x"}}, "lora_modules"),
        ({"lora_root": "x"}, "lora_root"),
        ({"enable_lora": True, "max_lora_rank": 24}, "max_lora_rank"),
        ({"enable_lora": True, "max_loras": 0}, "max_loras"),
        ({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 3}, "max_cpu_loras"),
        ({"enable_lora": True, "lora_modules": {"a b": "x"}}, "lora_modules"),
    ):
        with pytest.raises(ParameterError) as caught:
            LLM("smollm2-135m", device="cpu", **settings)
        assert caught.value.param == param
    with pytest.raises(EngineCoreError, match="without adapters"):
        LLM("smollm2-135m", device="sim", enable_lora=True)
