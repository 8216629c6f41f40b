"""Installed plugins whose backend does wrong: each is caught by name, with its distribution and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from enginecore.cli.main import main
from enginecore.config import EngineArgs
from enginecore.engine.client import InprocClient
from enginecore.errors import UnsupportedError
from enginecore.request import EngineRequest, SamplingParams
from enginecore.testing.cases import all_cases, select
from enginecore.testing.process import Worker
from enginecore.testing.runner import Runner, groups

from tests.device.packages import Site

#: A sound backend in torch, with one method replaced.
CREATE = """
    from dataclasses import replace
    import torch
    from enginecore.device import GraphRunner, GraphSupport
    from enginecore.ops.torch_backend import TORCH_CAPABILITIES, TorchAttention, TorchBackend

    class Attention(TorchAttention):
        {method}

    class Graphs(GraphRunner):
        def plan(self, keys, budget_bytes): return []
        def capture(self, key, fn, static_inputs): raise RuntimeError("acme: this stream cannot be captured")
        def replay(self, handle): ...
        def memory_bytes(self): return 0
        def release(self): ...

    backend = TorchBackend(ctx)
    backend.attention = Attention()
    {change}
    return backend
"""

IGNORES_WINDOW = """def forward(self, query_THD, kv_cache, metadata, params, out_THD=None):
            return super().forward(query_THD, kv_cache, metadata, replace(params, sliding_window=None), out_THD)"""
LIES_IN_SUPPORTS = """def supports(self, query):
            return Verdict.of([])"""
OUT_OF_BOUNDS = """def reshape_and_cache(self, key_TKD, value_TKD, kv_cache, slot_mapping_T):
            super().reshape_and_cache(key_TKD, value_TKD, kv_cache, slot_mapping_T)
            kv_cache[(int(slot_mapping_T.max()) // kv_cache.shape[2] + 1) % len(kv_cache), 0, 0] = 1.0"""
PAST_THE_OUTPUT = """def forward(self, query_THD, kv_cache, metadata, params, out_THD=None):
            out = super().forward(query_THD, kv_cache, metadata, params, out_THD)
            torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel())[0] = 0.0
            return out"""
RETURNS_NAN = """def forward(self, query_THD, kv_cache, metadata, params, out_THD=None):
            return super().forward(query_THD, kv_cache, metadata, params, out_THD).fill_(float("nan"))"""
CLAIMS_GRAPHS = "backend.capabilities = replace(backend.capabilities, graph_support=GraphSupport.ALWAYS)"

CLAIMS_LITTLE = (
    "backend.capabilities = replace(backend.capabilities, features=frozenset(), dtypes=frozenset({'float32'}))"
)

#: name: (replaced method, change to the backend, the case that catches it, outcome, words of its message)
BROKEN = {
    "claims_and_ignores": (IGNORES_WINDOW, "", "L1/attention/window_15[float32]", "false-claim", "claimed and ignored"),
    "claims_everything": (LIES_IN_SUPPORTS, "", "L0/contract/unknown_feature_refused", "false-claim", "telepathy"),
    "writes_out_of_bounds": (OUT_OF_BOUNDS, "", "L1/attention/shapes_made_up", "fail", "changed"),
    "writes_past_the_output": (PAST_THE_OUTPUT, "", "L1/attention/output_buffer", "fail", "after out_THD"),
    "returns_nan": (RETURNS_NAN, "", "L1/attention/decode[float32]", "fail", "NaN"),
    "capture_fails": (
        "pass", "backend.graphs = Graphs(); " + CLAIMS_GRAPHS, "L3/graphs/replay_equals_eager", "fail", "acme: this"
    ),
    "claims_graphs_has_none": (
        "pass", CLAIMS_GRAPHS, "L0/contract/capabilities_sane", "false-claim", "backend.graphs is None"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One plugin for each fault, with a device of its name, and a sound one."""
    planted = Site(tmp_path_factory.mktemp("site"))
    others = {"sound": ("pass", ""), "claims_nothing": (LIES_IN_SUPPORTS, CLAIMS_LITTLE)}
    for name, (method, change, *_) in {**BROKEN, **others}.items():
        create = CREATE.format(method=method, change=change).strip()
        planted.plugin(f"plugin-{name.replace('_', '-')}", device=name, create=create, more=", accelerator=False")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(planted.root))
        yield planted
    planted.forget()


@pytest.fixture(scope="module")
def worker(site: Site) -> Iterator[Worker]:
    with Worker() as shared:
        yield shared


@pytest.mark.parametrize("fault", BROKEN)
def test_the_kit_catches_it_by_name(worker: Worker, fault: str) -> None:
    _, _, case_id, outcome, words = BROKEN[fault]
    with Runner(fault, worker=worker) as runner:
        [result] = runner.run_group(select(all_cases(), only=case_id))
        assert (runner.about["distribution"], runner.about["version"]) == (
            f"plugin-{fault.replace('_', '-')}", "1.2.3"
        )  # fmt: skip
    assert (result.case_id, result.outcome.value) == (case_id, outcome)
    assert words in result.message


def test_without_a_fault_the_same_cases_pass(worker: Worker) -> None:
    wanted = ",".join(case for _, _, case, _, _ in BROKEN.values() if not case.startswith("L3"))
    with Runner("sound", worker=worker) as runner:
        found = [result for group in groups(select(all_cases(), only=wanted)) for result in runner.run_group(group)]
    assert found and {result.outcome.value for result in found} == {"pass"}


def test_the_command_says_it_with_its_exit_code(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--device", "claims_everything", "--only", "unknown_feature"]) == 1
    told = capfd.readouterr().out
    for words in ("plugin-claims-everything 1.2.3", "false-claim", "L0/contract/unknown_feature_refused", "telepathy"):
        assert words in told


def test_the_engine_refuses_what_is_not_claimed_on_the_plugins_behalf(site: Site, tmp_path: Path) -> None:
    """supports() of this plugin says yes to everything; its capabilities claim no feature, and no float16."""
    from enginecore.testing.tiny_models import write_model

    write_model("gpt_oss_sinks", tmp_path / "model")
    with pytest.raises(UnsupportedError) as raised:
        InprocClient(EngineArgs(model=str(tmp_path / "model"), device="claims_nothing", dtype="float16"))
    assert raised.value.exit_code == 8
    for reason in ("float16", "sliding_window", "sinks"):
        assert reason in str(raised.value), "every reason at once"
    assert "plugin-claims-nothing 1.2.3" in str(raised.value)


def test_nan_of_a_backend_fails_the_request_and_is_never_an_answer(site: Site, tmp_path: Path) -> None:
    from enginecore.testing.tiny_models import write_model

    write_model("llama", tmp_path / "model")
    settings = {"max_model_len": 64, "num_blocks": 16, "dtype": "float32"}
    client = InprocClient(EngineArgs(model=str(tmp_path / "model"), device="returns_nan", **settings))
    try:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        client.add(EngineRequest("one", [5, 6, 7], params, 4))
        outputs = []
        while client.has_work():
            outputs += client.step().outputs
    finally:
        client.shutdown()
    assert outputs[-1].finish_reason == "error" and "not finite" in (outputs[-1].error or ""), outputs
    assert not any(output.token_ids for output in outputs)
