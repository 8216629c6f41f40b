"""A plugin that was built against contract 1.0, long ago, works with this enginecore: see tests/fixtures/README.md."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import pytest
from enginecore.device.discovery import discover
from enginecore.testing.case import CaseResult, Outcome
from enginecore.testing.cases import all_cases, select
from enginecore.testing.process import Worker
from enginecore.testing.runner import Runner, groups

FIXTURES = Path(__file__).parents[1] / "fixtures"

#: Wheel: the device it serves and its checksum. What vendors have shipped cannot be changed, so neither can these.
FROZEN = {
    "enginecore_frozen10-0.1.0-py3-none-any.whl": (
        "frozen10", "612714e7952379c1fbc0f6bfe7442baeba4d0d02594f7c4a4fd6de42a9b20aa4"
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=FROZEN)
def device(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The wheel unpacked as pip would install it (pure Python: its files are its installation)."""
    name, checksum = FROZEN[request.param]
    wheel = FIXTURES / request.param
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() == checksum, "a frozen plugin is never built again"
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        [plugin] = discover(distributions(path=[str(site)]))
        assert plugin.fault is None and plugin.manifest is not None and plugin.manifest.contract == "1.0"
        yield name


@pytest.fixture(scope="module")
def worker(device: str) -> Iterator[Worker]:
    with Worker() as shared:
        yield shared


def run(device: str, worker: Worker, level: str, only: str | None = None) -> list[CaseResult]:
    with Runner(device, worker=worker) as runner:
        return [r for group in groups(select(all_cases(), level, only)) for r in runner.run_group(group)]


def test_it_meets_the_contract(device: str, worker: Worker) -> None:
    found = run(device, worker, "0")
    assert len(found) > 12
    assert not [result for result in found if result.outcome is not Outcome.PASS]


def test_its_ops_memory_and_attention_are_right(device: str, worker: Worker) -> None:
    chosen = "attention/mixed[float32],silu_and_mul/*[bfloat16],rms_norm/*[float32],copy_on_write,shared_block,memory"
    found = run(device, worker, "1,2", chosen)
    wrong = [result for result in found if not result.outcome.ok]
    assert not wrong
    assert sum(result.outcome is Outcome.PASS for result in found) > 15


def test_a_model_generates_with_it(device: str, worker: Worker) -> None:
    [result] = run(device, worker, "5", "tiny_models/llama_alone")
    assert result.outcome is Outcome.PASS, result
