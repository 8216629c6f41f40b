"""While the device is at a step the host books the last one and plans the next: the order, and the results."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from enginecore.config import EngineArgs, EngineConfig
from enginecore.engine.client import InprocClient
from enginecore.engine.engine import Engine
from enginecore.errors import OutOfDeviceMemory, ParameterError, UnsupportedError
from enginecore.plan import StepPlan, StepResult
from enginecore.request import EngineOutput, EngineRequest, SamplingParams
from enginecore.runner.transfers import StagedTransfers
from enginecore.testing.case import Case, CaseContext
from enginecore.testing.cases.memory import arrays_travel_beside_the_work
from enginecore.testing.fake_runtime import FakeRuntime
from enginecore.testing.profile import ConformanceProfile
from enginecore_sim import expected_tokens

from tests.engine import accelerated
from tests.models.tiny import tiny_tokens, write_tiny
from tests.scheduler.fake_executor import BAD_TOKEN, FakeExecutor, expected, request

MIB = 2**20


def config(**fields: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "model": "m", "model_path": "", "served_model_name": "m", "device": "d", "plugin": "p", "dtype": "float32",
        "vocab_size": 41, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 64,
        "block_size": 4, "long_prefill_token_threshold": 0, "enable_prefix_caching": True, "seed": 0,
        "scheduling_policy": "fcfs", "max_logprobs": 20,
    }  # fmt: skip
    return EngineConfig(**{**values, **fields})


class Device:
    """Runs steps on a thread of its own. None ends before the host has either given it the next one or come to wait for
    it, so what the host does in between lies within the step whatever the machine's pace. `lost` steps find no memory.
    """

    def __init__(self, engine_config: EngineConfig, lost: tuple[int, ...] = (), when: str = "collect") -> None:
        self.trace: list[tuple[str, int]] = []
        self._inner = FakeExecutor(engine_config)  # type: ignore[arg-type]
        self._thread = ThreadPoolExecutor(1)
        self._may_end: dict[int, threading.Event] = {}
        self._lost, self._when = lost, when
        self._count = 0

    def submit(self, plan: StepPlan) -> tuple[int, Future[StepResult]]:
        number, self._count = self._count, self._count + 1
        self.trace.append(("submit", number))
        if number in self._lost and self._when == "submit":
            raise OutOfDeviceMemory("no memory")
        self._may_end[number] = threading.Event()
        if number - 1 in self._may_end:
            self._may_end[number - 1].set()
        return number, self._thread.submit(self._run, number, plan)

    def _run(self, number: int, plan: StepPlan) -> StepResult:
        assert self._may_end[number].wait(60)
        result = self._inner.execute(plan)
        self.trace.append(("end", number))
        if number in self._lost:
            raise OutOfDeviceMemory("no memory")
        return result

    def collect(self, handle: tuple[int, Future[StepResult]]) -> StepResult:
        number, future = handle
        self._may_end[number].set()
        result = future.result()
        self.trace.append(("collect", number))
        return result

    def execute(self, plan: StepPlan) -> StepResult:
        raise AssertionError("a step that is not overlapped")

    def reference_ops(self) -> list[str]:
        return []

    def shutdown(self) -> None:
        self._thread.shutdown()


def take(engine: Any, outputs: dict[str, list[EngineOutput]]) -> None:
    for output in engine.step().outputs:
        assert outputs[output.request_id][-1:] == [] or outputs[output.request_id][-1].finish_reason is None
        outputs[output.request_id].append(output)


def told(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_the_host_works_within_the_devices_step() -> None:
    device = Device(config())
    engine = Engine(config(), device, overlap=True)
    requests = [request(f"r{i}", [i, 2, 3], max_tokens=12) for i in range(3)]
    outputs: dict[str, list[EngineOutput]] = {each.request_id: [] for each in requests}
    for each in requests:
        engine.add(each)
    while engine.has_work():
        take(engine, outputs)
        device.trace.append(("delivered", len(told(outputs["r0"]))))
    for each in requests:
        assert told(outputs[each.request_id]) == expected(each)[0]
    at = {event: place for place, event in enumerate(device.trace)}
    steps = 12
    for n in range(steps - 1):
        assert at["submit", n + 1] < at["end", n] < at["collect", n], "the next step was planned while one ran"
        assert at["collect", n] < at["delivered", n + 1] < at["end", n + 1], "what came of one went out during the next"
    assert ("submit", steps) not in at, "the end by length is foreseen: no step in vain"
    assert engine.stats().steps_ahead == steps - 1
    engine.shutdown()


def mixed(rng: random.Random, number: int) -> EngineRequest:
    prompt = rng.choice([[], [1, 2, 3, 4, 5, 6, 7, 8, 9], [5] * 17]) + [rng.randrange(3) for _ in range(3)]
    if rng.random() < 0.1:
        prompt.append(BAD_TOKEN)
    params = {"stop_token_ids": rng.choice([None, [7], list(range(20, 32))]), "logprobs": rng.choice([None, 0]),
              "presence_penalty": rng.choice([0, 0, 0, 0, 0, 1.0])}  # fmt: skip
    return request(f"r{number}", prompt, rng.choice([0, 1, 5, 16]), eos_token_ids=[3], params=params)


@pytest.mark.parametrize("num_blocks", [16, 64])
@pytest.mark.parametrize("when", ["submit", "collect"])
def test_ends_aborts_preemption_and_lost_steps(num_blocks: int, when: str) -> None:
    """Random traffic: everybody gets their own tokens, or the error of the step that they had a part in."""
    settings = config(num_blocks=num_blocks)
    device = Device(settings, lost=(20, 41, 42, 90), when=when)
    engine = Engine(settings, device, overlap=True)
    rng = random.Random(num_blocks)
    requests: dict[str, EngineRequest] = {}
    outputs: dict[str, list[EngineOutput]] = {}
    for number in range(120):
        requests[f"r{number}"] = mixed(rng, number)
        outputs[f"r{number}"] = []
        engine.add(requests[f"r{number}"])
        for _ in range(rng.randint(0, 4)):
            take(engine, outputs)
        live = [name for name in requests if not outputs[name] or outputs[name][-1].finish_reason is None]
        if live and rng.random() < 0.2:
            gone = rng.choice(live)
            assert engine.abort([gone]) == [gone]
            del requests[gone]
    while engine.has_work():
        take(engine, outputs)
    lost = [name for name in requests if "no memory" in str(outputs[name][-1].error)]
    assert 4 <= len(lost) <= 16 and engine.stats().lost_steps == 4
    for name, each in requests.items():
        tokens, reason, stop = expected(each)
        if name in lost:
            assert told(outputs[name]) == tokens[: len(told(outputs[name]))]
            continue
        assert told(outputs[name]) == tokens
        assert (outputs[name][-1].finish_reason, outputs[name][-1].stop_reason) == (reason, stop)
        if each.params.logprobs is not None and reason != "error":
            assert sum(len(output.logprobs or []) for output in outputs[name]) == len(tokens)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert (stats.num_preemptions > 0) == (num_blocks == 16) and stats.steps_ahead > 60
    engine.scheduler.pool.check()
    engine.shutdown()


# ---- the tokens in between stay on the device ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_tiny(folder, "llama")
    return str(folder)


def traffic() -> list[EngineRequest]:
    """Greedy and sampled, stops that come at different times, log-probabilities, rules that need the tokens and others,
    a prompt several times (n > 1), prompts longer than a step."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0}, {"seed": 7}, {"seed": 8, "top_p": 0.8, "logprobs": 3}, {"temperature": 0, "logprobs": 0},
        {"seed": 9, "frequency_penalty": 1.5}, {"seed": 3, "min_tokens": 4, "logit_bias": {5: 4.0}},
        {"seed": 4, "top_k": 5, "stop_token_ids": list(range(0, 96, 9))}, {"temperature": 0, "prompt_logprobs": 1},
    ]  # fmt: skip
    requests = []
    for i in range(16):
        params = SamplingParams(**{"ignore_eos": bool(i % 3), **kinds[i % len(kinds)]})
        requests.append(EngineRequest(f"r{i}", tiny_tokens(3 + 5 * i, seed=i), params, 6 + i % 5, eos_token_ids=[2, 9]))
    for i in range(16, 20):
        params = SamplingParams(seed=i, ignore_eos=True)
        prompt = requests[12].prompt_token_ids
        requests.append(EngineRequest(f"r{i}", prompt, params, 8, fork_of="r16" if i > 16 else None))
    return requests


def answers(client: InprocClient, aborted: tuple[str, ...] = ()) -> dict[str, Any]:
    got: dict[str, list[EngineOutput]] = {}
    for each in traffic():
        client.add(each)
    steps = 0
    while client.has_work():
        steps += 1
        if steps == 9:
            client.abort(aborted)
        for output in client.step().outputs:
            got.setdefault(output.request_id, []).append(output)
    return {name: (facts(outs), figures(outs)) for name, outs in got.items() if name not in aborted}


def facts(outputs: list[EngineOutput]) -> Any:
    entries = [entry for output in outputs for entry in (output.logprobs or []) + (output.prompt_logprobs or [])]
    best = [(entry.token_ids[0], entry.rank) for entry in entries if entry is not None]
    return told(outputs), best, outputs[-1].finish_reason, outputs[-1].stop_reason


def figures(outputs: list[EngineOutput]) -> Any:
    """Log-probabilities, which rounding changes with the size of a batch."""
    entries = [entry for output in outputs for entry in (output.logprobs or []) + (output.prompt_logprobs or [])]
    return pytest.approx([value for entry in entries if entry is not None for value in entry.logprobs], abs=1e-4)


@pytest.fixture
def start(tiny: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    def start(*, graphs: bool = True, **settings: Any) -> InprocClient:
        capabilities = replace(accelerated.CAPABILITIES, asynchronous=True)
        monkeypatch.setattr(accelerated, "CAPABILITIES", capabilities)
        return accelerated.start(monkeypatch, tiny, FakeRuntime(64 * MIB, graphs=graphs), **settings)

    return start


@pytest.mark.parametrize(
    ("graphs", "settings"),
    [
        (True, {}),
        (False, {"num_blocks": 9, "max_model_len": 128, "max_num_seqs": 8}),
        (True, {"enable_prefix_caching": False}),
    ],
    ids=["graphs", "eager, preempted", "no prefix cache"],
)
def test_with_and_without_overlap_answers_are_the_same(start: Any, graphs: bool, settings: dict[str, Any]) -> None:
    client = start(graphs=graphs, overlap="off", **settings)
    right = answers(client)
    assert client.step().stats.steps_ahead == 0
    client.shutdown()
    for aborted in ((), ("r3", "r11", "r16")):
        client = start(graphs=graphs, **settings)
        assert ("overlap", "ahead") in {choice[:2] for choice in client.ready.config.choices}
        got = answers(client, aborted)
        assert set(got) == set(right) - set(aborted)
        for name, (exact, near) in got.items():
            assert exact == right[name][0] and list(near.expected) == right[name][1]
        stats = client.step().stats
        assert stats.steps_ahead > 10 and stats.num_used_blocks == 0 and not client.has_work()
        assert (stats.graph_replays > 10) == graphs and (stats.num_preemptions > 0) == ("num_blocks" in settings)
        client.shutdown()


def test_a_late_token_does_not_meet_who_has_its_slot_now(start: Any) -> None:
    """A long prompt enters the only slot while the aborted request's token is on its way, for a place within the prompt
    that is computed in a later step."""
    client = start(max_num_seqs=1, max_model_len=128)
    prompt = tiny_tokens(90, seed=3)
    alone = accelerated.run(client, [prompt])
    client.call("reset_prefix_cache")
    client.add(EngineRequest("a", tiny_tokens(50, seed=4), SamplingParams(temperature=0, ignore_eos=True), 30))
    while not client.step().outputs:
        pass
    client.abort(["a"])
    assert accelerated.run(client, [prompt], name="b") == alone
    client.shutdown()


def test_decode_steps_are_submitted_without_asking_the_device(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever brings numbers to the host waits for the device: none of it may happen between two tokens' steps."""
    client = start()
    runner = client._engine.executor._worker._worker
    submit, asked = runner.submit, []

    def watched(plan: StepPlan) -> Any:
        with monkeypatch.context() as patch:
            if (plan.num_new_N == 1).all() and not plan.new:
                for name in ("tolist", "item", "cpu", "__bool__", "__int__"):
                    real = getattr(torch.Tensor, name)
                    patch.setattr(torch.Tensor, name, lambda t, *a, n=name, r=real: (asked.append(n), r(t, *a))[1])
            return submit(plan)

    monkeypatch.setattr(runner, "submit", watched)
    client.add(EngineRequest("a", [1, 5, 7], SamplingParams(temperature=0, ignore_eos=True, logprobs=2), 20))
    while client.has_work():
        client.step()
    assert client.step().stats.steps_ahead > 15
    # The reference of sampling looks whether any row is not greedy; kernels do not.
    assert asked == ["__bool__"] * len(asked)
    client.shutdown()


def test_sleep_ends_what_is_underway(start: Any) -> None:
    client = start()
    client.add(EngineRequest("a", [1, 5, 7], SamplingParams(temperature=0, ignore_eos=True), 20))
    for _ in range(4):
        client.step()
    with pytest.raises(UnsupportedError, match="running"):
        client.call("sleep", 1)
    client.abort(["a"])
    assert client.has_work(), "a step is underway"
    client.call("sleep", 1)
    assert not client.has_work() and client.call("is_sleeping")
    client.call("wake_up")
    assert len(accelerated.run(client, [[1, 5, 7]])[0]) == 6
    client.shutdown()


def test_arrays_arrive_as_they_were_sent() -> None:
    backend = accelerated.Accelerator(FakeRuntime(64 * MIB))
    transfers = StagedTransfers(backend)
    rng = torch.Generator().manual_seed(0)
    for size in (1, 0, 300, 7):
        arrays = [
            torch.randint(0, 9, (size,), generator=rng).numpy(),
            torch.rand(3, size, generator=rng).double().numpy(),
        ]
        sent = transfers.send(*arrays, arrays[1].T)
        again = transfers.fetch(*sent)()
        for array, there, back in zip([*arrays, arrays[1].T], sent, again, strict=True):
            assert (there.numpy() == array).all() and (back.numpy() == array).all() and back.shape == array.shape


def test_the_kit_finds_copies_that_overtake_each_other() -> None:
    backend = accelerated.Accelerator(FakeRuntime(64 * MIB))
    backend.capabilities = replace(backend.capabilities, asynchronous=True)
    case = Case(2, "memory", "arrays_travel_beside_the_work", arrays_travel_beside_the_work)
    ctx = CaseContext(case, backend, ConformanceProfile(), {})
    arrays_travel_beside_the_work(ctx)
    one_for_all = torch.empty(2**16, dtype=torch.uint8)

    def pinned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return one_for_all[: torch.empty(shape, dtype=dtype).nbytes].view(dtype).view(shape)

    backend.memory.host_alloc_pinned = pinned  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="not what has arrived"):
        arrays_travel_beside_the_work(ctx)


# ---- in a thread -----------------------------------------------------------------------------------------------------

PROMPTS = [[i, 2, 3] * (5 + 2 * i) for i in range(12)]


@pytest.mark.parametrize("num_blocks", [64, 17])
def test_steps_in_a_thread_of_their_own(config_only: str, num_blocks: int) -> None:
    args = EngineArgs(model=config_only, device="sim", overlap="on", num_blocks=num_blocks, max_model_len=256,
                      max_num_seqs=8, max_num_batched_tokens=64)  # fmt: skip
    client = InprocClient(args)
    outputs: dict[str, list[EngineOutput]] = {f"r{i}": [] for i in range(12)}
    for i, prompt in enumerate(PROMPTS):
        client.add(EngineRequest(f"r{i}", prompt, SamplingParams(temperature=0), 60))
    while client.has_work():
        take(client, outputs)
    for i, prompt in enumerate(PROMPTS):
        assert told(outputs[f"r{i}"]) == expected_tokens(prompt, 60, vocab_size=1000)
    stats = client.step().stats
    assert stats.num_used_blocks == 0 and stats.steps_ahead > 60
    assert (stats.num_preemptions > 0) == (num_blocks == 17)
    client.shutdown()


def test_what_overlap_may_be(config_only: str) -> None:
    with pytest.raises(ParameterError, match="overlap must be auto, on or off"):
        EngineArgs(model=config_only, overlap="yes")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="overlap on"):
        InprocClient(EngineArgs(model=config_only, device="sim", overlap="on", kv_host_memory=2**20))
    client = InprocClient(EngineArgs(model=config_only, device="sim", num_blocks=64, max_model_len=256))
    assert "overlap" not in {name for name, _, _ in client.ready.config.choices}, "nothing was chosen"
    client.shutdown()
