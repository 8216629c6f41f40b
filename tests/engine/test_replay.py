"""Virtual time: a simulated device's steps, and requests that arrive while they run."""

from __future__ import annotations

from typing import Any

import pytest
from enginecore.clock import RealClock, VirtualClock
from enginecore.config import EngineArgs
from enginecore.engine.build import build_engine
from enginecore.engine.engine import Engine
from enginecore.engine.replay import replay
from enginecore.errors import KVCacheTooSmall, UnsupportedError
from enginecore.request import EngineRequest, SamplingParams
from enginecore_sim import expected_tokens

STEP = {"step_time_s": 1.0}


def engine(model: str, clock: Any = None, options: dict[str, Any] | None = None, **fields: Any) -> Engine:
    defaults: dict[str, Any] = {"num_blocks": 64, "max_model_len": 256, "max_num_seqs": 8}
    args = EngineArgs(model=model, device="sim", device_options=options or STEP, **{**defaults, **fields})
    return build_engine(args, clock or VirtualClock())[0]


def request(name: str, arrival: float, count: int = 3) -> EngineRequest:
    prompt = [len(name), 2, 3]
    return EngineRequest(name, prompt, SamplingParams(temperature=0), count, arrival_time=arrival)


def test_requests_come_when_the_clock_reaches_them(config_only: str) -> None:
    """Steps of a second: "a" runs through 1 .. 3, idle until "b" at 7, whose steps "cc" joins at its second's end."""
    loop = engine(config_only)
    seen = [
        (now, sorted(output.request_id for output in outputs.outputs))
        for now, outputs in replay(loop, [request("b", 7.0), request("cc", 7.5), request("a", 0.0)])
    ]
    assert seen == [
        (1.0, ["a"]),
        (2.0, ["a"]),
        (3.0, ["a"]),
        (8.0, ["b"]),
        (9.0, ["b", "cc"]),
        (10.0, ["b", "cc"]),
        (11.0, ["cc"]),
    ]
    assert loop.clock.now() == 11.0 and loop.clock.busy_s == 7.0  # type: ignore[attr-defined]


def test_arrivals_count_from_the_clock_of_the_moment(config_only: str) -> None:
    clock = VirtualClock()
    clock.wait_until(0.1 + 0.2)
    times = [now for now, _ in replay(engine(config_only, clock), [request("a", 0.7, count=1)])]
    assert times == [pytest.approx(1.7)]


def test_the_answers_are_those_of_real_time(config_only: str) -> None:
    tokens: dict[str, list[int]] = {}
    for _, outputs in replay(engine(config_only), [request("a", 0.0, 9), request("bb", 2.0, 9)]):
        for output in outputs.outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert tokens == {name: expected_tokens([len(name), 2, 3], 9, vocab_size=1000) for name in ("a", "bb")}


def test_a_refused_request_is_answered_and_the_rest_goes_on(config_only: str) -> None:
    loop = engine(config_only)
    outputs = [one for _, step in replay(loop, [request("a", 0.0, 999), request("b", 0.0)]) for one in step.outputs]
    assert outputs[0].finish_reason == "error" and outputs[-1].finish_reason == "length"


class Noting(RealClock):
    """A real clock that is told of time instead of sleeping through it."""

    def __init__(self) -> None:
        self.spent: list[float] = []

    def spend(self, seconds: float) -> None:
        self.spent.append(seconds)


def test_in_real_time_the_engine_passes_what_the_device_says(config_only: str) -> None:
    clock = Noting()
    loop = engine(config_only, clock, {"step_time_s": 0.5, "token_time_s": 0.25})
    assert len(list(replay(loop, [request("a", 0.0, 2)]))) == 2
    assert clock.spent == [0.5 + 3 * 0.25, 0.5 + 0.25]


def test_a_device_without_modelled_time_cannot_be_virtual(config_only: str) -> None:
    with pytest.raises(UnsupportedError, match="models no time"):
        engine(config_only, VirtualClock(), {"output": "tokens"})
    engine(config_only, RealClock(), {"output": "tokens"}).shutdown()


def test_a_model_that_the_device_brings_is_sized_like_any_other() -> None:
    args = EngineArgs(model="llama-3-8b", device="sim", device_options={"profile": "h100", "output": "hash"})
    loop, ready = build_engine(args, VirtualClock())
    ledger = ready.ledger
    assert ready.config.max_model_len == 8192 and ready.config.dtype == "bfloat16"
    assert ledger["budget"] == int(0.9 * 80e9) and ledger["weights"] == 16_059_990_016
    assert ledger["kv_cache"] == ready.config.num_blocks * 16 * 131_072
    left = ledger["budget"] - ledger["weights"] - ledger["activations"] - ledger["kv_cache"]
    assert 0 <= left < 16 * 131_072 and ledger["process_base"] == 0
    loop.shutdown()


def test_weights_that_exceed_the_device_are_refused_with_figures() -> None:
    args = EngineArgs(model="llama-3-70b", device="sim", device_options={"profile": "h100"})
    with pytest.raises(KVCacheTooSmall, match=r"the weights \(141104775168 bytes\).*budget of 72000000000"):
        build_engine(args, VirtualClock())
