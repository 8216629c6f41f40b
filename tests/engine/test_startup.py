"""What starting an engine imports, and whose error is told when that goes wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from enginecore.config import EngineArgs
from enginecore.engine import process
from enginecore.errors import ParameterError

#: Answers a prompt with a fused model and prints its tokens, then which of these were imported for it. Each of them
#: takes as long to import as the model takes to load.
_ANSWER = """
import json, sys
from enginecore.config import EngineArgs
from enginecore.engine.client import InprocClient
from enginecore.request import EngineRequest, SamplingParams

client = InprocClient(EngineArgs(model=sys.argv[1], device="cpu", dtype="float32", num_blocks=64, max_model_len=256))
case = json.load(sys.stdin)
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
client.add(EngineRequest("r", case["prompt_token_ids"], params, 8, eos_token_ids=[]))
tokens, replays = [], 0
while client.has_work():
    step = client.step()
    replays = step.stats.graph_replays
    for output in step.outputs:
        tokens += output.token_ids
heavy = ("transformers", "torch._dynamo", "torch._inductor", "sympy", "gguf", "triton", "huggingface_hub", "tokenizers")
graphs = next(value for name, value, _ in client.ready.config.choices if name == "graphs") != "off"
print(json.dumps([tokens, graphs, replays, [name for name in heavy if name in sys.modules]]))
client.shutdown()
"""


def test_a_fused_model_answers_without_transformers_or_torchs_compiler(
    smollm2: str, greedy_reference: list[dict[str, Any]]
) -> None:
    case = next(case for case in greedy_reference if len(case["output_token_ids"]) >= 8)
    command = [sys.executable, "-c", _ANSWER, smollm2]
    done = subprocess.run(command, input=json.dumps(case), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    tokens, graphs, replays, heavy = json.loads(done.stdout.splitlines()[-1])
    assert tokens == case["output_token_ids"][:8]
    assert (replays > 0) == graphs  # where there are no compiled kernels there is no tape either
    assert heavy == []


def test_what_is_wrong_with_the_device_goes_before_what_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a torch that has been built for other devices: its import fails, and the probe says why."""
    monkeypatch.setitem(sys.modules, "enginecore.engine.start", None)
    with pytest.raises(ParameterError, match="no installed plugin offers the device 'abacus'"):
        process._start(EngineArgs(model="any", device="abacus"))
