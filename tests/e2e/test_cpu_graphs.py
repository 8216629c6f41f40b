"""The real model on the CPU: decode steps replay tapes, with the same bits as eager steps."""

from __future__ import annotations

import pytest
from enginecore.config import EngineArgs
from enginecore.engine.build import build_engine
from enginecore.request import EngineRequest, SamplingParams

pytestmark = pytest.mark.model


@pytest.mark.parametrize("quantization", ["auto", "gguf"])
def test_replays_give_the_same_tokens_and_logprobs(smollm2, quantization):
    answers = []
    for eager in (False, True):
        args = EngineArgs(model=smollm2, device="cpu", quantization=quantization, max_model_len=256, max_num_seqs=3,
                          num_blocks=64, enforce_eager=eager, require_graphs=not eager, speculation="off")  # fmt: skip
        engine, _ = build_engine(args)
        try:
            for i in range(3):
                params = SamplingParams(temperature=0, ignore_eos=True, logprobs=2)
                prompt = list(range(10 + i, 40 + 7 * i))
                engine.add(EngineRequest(f"r{i}", prompt, params, max_tokens=12 + i))
            got: dict[str, list] = {}
            while engine.has_work():
                for out in engine.step().outputs:
                    got.setdefault(out.request_id, []).append((out.token_ids, out.logprobs))
            answers.append(got)
            assert (engine.stats().graph_replays > 0) is not eager
        finally:
            engine.shutdown()
    assert answers[0] == answers[1]
