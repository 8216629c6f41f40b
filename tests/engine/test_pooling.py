"""The pooling engine around a scripted runner: errors of one text, of a step, aborts, and what it has no part in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from enginecore.config import EngineArgs
from enginecore.engine.account import MemoryAccount
from enginecore.engine.pooling import PoolingEngine
from enginecore.engine.start import start_engine
from enginecore.errors import OutOfDeviceMemory, UnsupportedError
from enginecore.pooling import Pooled, PoolingModel, PoolingParams
from enginecore.request import EngineOutput, EngineRequest, SamplingParams

from tests.frontend.toy import config
from tests.models.torch_backend import TorchMemory

MODEL = PoolingModel(tasks=("embed",), dimensions=1)


class Runner:
    """A text's number is its length; a text of one token has none, and one of 13 tokens is more than memory holds."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def execute(self, requests: Sequence[EngineRequest]) -> list[Pooled | str]:
        self.batches.append(len(requests))
        lengths = [len(each.prompt_token_ids) for each in requests]
        if 13 in lengths:
            raise OutOfDeviceMemory("no room")
        if 14 in lengths:
            raise RuntimeError("a bug")
        return ["not finite" if length == 1 else Pooled(bytes([length]), [1]) for length in lengths]


def engine(**changes: Any) -> tuple[PoolingEngine, Runner, list[str]]:
    runner, told = Runner(), []
    settings = msgspec.structs.replace(config(pooling=MODEL, num_blocks=0), **changes)
    made = PoolingEngine(
        settings,
        runner,  # type: ignore[arg-type]
        account=MemoryAccount({}, 0, TorchMemory(), []),
        reference_ops=list,
        out_of_memory=lambda error: isinstance(error, OutOfDeviceMemory),
        make_room=lambda: told.append("room"),
        release=lambda: told.append("released"),
    )
    return made, runner, told


def add(target: PoolingEngine, *lengths: int) -> None:
    for length in lengths:
        name = f"r{length}"
        target.add(EngineRequest(name, [1] * length, SamplingParams(max_tokens=0), 0, pooling=PoolingParams()))


def found(outputs: list[EngineOutput]) -> dict[str, Any]:
    return {each.request_id: each.error or (each.pooled and each.pooled.data[0]) for each in outputs}


def test_one_text_s_error_is_its_own() -> None:
    made, runner, _ = engine()
    add(made, 1, 5, 6, 99)
    step = made.step()
    answers = found(step.outputs)
    assert (answers["r5"], answers["r6"], answers["r1"]) == (5, 6, "not finite") and "99" in answers["r99"]
    assert not made.has_work() and runner.batches == [3] and step.stats.prompt_tokens == 11


def test_a_step_out_of_memory_costs_its_own_texts_only() -> None:
    made, _, told = engine(max_num_seqs=2)
    add(made, 13, 2, 3)
    first, second = made.step(), made.step()
    assert "memory" in found(first.outputs)["r13"] and "memory" in found(first.outputs)["r2"] and told == ["room"]
    assert found(second.outputs) == {"r3": 3} and second.stats.lost_steps == 1


def test_a_bug_is_not_taken_for_exhausted_memory() -> None:
    made, _, _ = engine()
    add(made, 14)
    with pytest.raises(RuntimeError, match="bug"):
        made.step()


def test_aborts_and_explanations() -> None:
    made, runner, told = engine()
    add(made, 2, 3)
    assert made.abort(["r2", "unknown"]) == ["r2"]
    assert found(made.step().outputs) == {"r3": 3} and runner.batches == [1]
    (entry, other) = made.explain(["r3", "r2", "unknown"])
    assert entry["finish_reason"] == "stop" and entry["prefill"]["prompt_tokens"] == 3
    assert other["finish_reason"] == "abort"
    with pytest.raises(UnsupportedError, match="nothing to pin"):
        made.pin([1, 2], 5.0)
    made.shutdown()
    assert told == ["released"]


def test_a_device_that_runs_whole_models_itself_refuses() -> None:
    with pytest.raises(UnsupportedError, match="whole models"):
        start_engine(EngineArgs(model="all-minilm-l6-v2", device="sim"))
