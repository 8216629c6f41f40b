"""A step that runs out of device memory: it costs its own requests and nobody else's."""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from enginecore.config import EngineArgs
from enginecore.device import BackendContext
from enginecore.engine.client import InprocClient
from enginecore.errors import OutOfDeviceMemory
from enginecore.metrics import Metrics
from enginecore.ops.torch_backend import TorchBackend
from enginecore.plan import StepPlan, StepResult
from enginecore.request import EngineOutput, EngineRequest, SamplingParams
from enginecore.runner.exhausted import MemoryGuard
from enginecore_sim import expected_tokens

VOCAB = 1000
FULL = torch.OutOfMemoryError("device out of memory. Tried to allocate 2.00 GiB\nmore lines")


def request(name: str, prompt: list[int]) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams(temperature=0), 30)


def test_the_offending_batch_pays_and_the_engine_goes_on(
    config_only: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    args = EngineArgs(
        model=config_only, device="sim", num_blocks=64, max_model_len=256, max_num_seqs=2, max_num_batched_tokens=24
    )
    client = InprocClient(args)
    runner: Any = client._engine.executor._worker._worker  # type: ignore[attr-defined]
    steps, real = iter(range(99)), runner.execute

    def execute(plan: StepPlan) -> StepResult:
        if next(steps) == 3:
            raise FULL
        return real(plan)

    monkeypatch.setattr(runner, "execute", execute)
    prompts = {name: [seed, 2, 3] * 12 for seed, name in enumerate(("a", "b", "c", "d"))}
    for name, prompt in prompts.items():
        client.add(request(name, prompt))
    outputs: dict[str, list[EngineOutput]] = {}
    with caplog.at_level(logging.ERROR, "enginecore.engine"):
        while client.has_work():
            for output in client.step().outputs:
                outputs.setdefault(output.request_id, []).append(output)
    lost = [name for name in prompts if outputs[name][-1].finish_reason == "error"]
    assert lost == ["a", "b"], "two sequences ran at the fourth step, two waited"
    assert "Tried to allocate 2.00 GiB" in str(outputs["a"][-1].error) and "more lines" not in caplog.text
    assert "The ledger, in bytes" in caplog.text and "max_num_batched_tokens" in caplog.text
    # The same prompts again, with what the lost step may have left behind in the prefix cache.
    for name in ("a", "b"):
        client.add(request(name + "2", prompts[name]))
    while client.has_work():
        for output in client.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    for name, prompt in (("c", prompts["c"]), ("d", prompts["d"]), ("a2", prompts["a"]), ("b2", prompts["b"])):
        told = [token for output in outputs[name] for token in output.token_ids]
        assert told == expected_tokens(prompt, 30, vocab_size=VOCAB)
    stats = client.step().stats
    assert stats.lost_steps == 1 and stats.num_used_blocks == 0
    [why] = client.call("explain", ["a"])
    assert why["finish_reason"] == "error"
    metrics = Metrics("m", 64)
    metrics.stats = lambda: stats
    assert 'enginecore:lost_steps_total{model_name="m"} 1.0' in metrics.render().decode()
    client.shutdown()


def test_other_errors_pass_and_tensors_of_the_lost_step_are_gone() -> None:
    plan = StepPlan(np.arange(2), np.zeros(2, np.int64), np.array([3, 4]), np.ones(2, bool))
    held: list[weakref.ref[torch.Tensor]] = []

    class Worker:
        error: Exception = FULL

        def execute(self, plan: StepPlan) -> StepResult:
            activations = torch.zeros(8)
            held.append(weakref.ref(activations))
            raise self.error

        def reference_ops(self) -> list[str]:
            return []

    worker, backend = Worker(), TorchBackend(BackendContext(device="toy"))
    emptied: list[bool] = []
    backend.memory.empty_cache = lambda: emptied.append(held[0]() is None)  # type: ignore[method-assign]
    gc.disable()
    try:
        with pytest.raises(OutOfDeviceMemory, match="7 tokens in 2 sequences"):
            MemoryGuard(worker, backend).execute(plan)
    finally:
        gc.enable()
    assert emptied == [True], "memory was asked back while the step's tensors were alive"
    worker.error = RuntimeError("shapes do not match")
    with pytest.raises(RuntimeError, match="shapes"):
        MemoryGuard(worker, backend).execute(plan)
