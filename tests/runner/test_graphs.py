"""Captured steps: replay is used, tokens are those of eager steps, and whatever prevents a graph is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from enginecore.config import EngineArgs
from enginecore.device import GraphKey, GraphRunner
from enginecore.device.discovery import InstalledPlugin
from enginecore.device.select import SelectedDevice
from enginecore.engine import build, resolve, site
from enginecore.engine.engine import Engine
from enginecore.errors import ParameterError, UnsupportedError
from enginecore.metrics import Metrics
from enginecore.request import EngineRequest, EngineStats, SamplingParams
from enginecore.runner.graphs import decode_sizes
from enginecore.runner.guessing import StepCost

from tests.models.tiny import tiny_tokens, write_tiny
from tests.testing.recording import HELD, RecordingBackend, create

Start = Callable[..., tuple[Engine, Any, RecordingBackend]]
PROMPTS = [tiny_tokens(length, seed=length) for length in (5, 17, 9, 30, 1)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny") / "llama"
    write_tiny(path, "llama")
    return str(path)


@pytest.fixture
def start(tiny: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """An engine on the recording backend, whose fault is chosen."""
    engines: list[Engine] = []

    def start(fault: str = "", **settings: Any) -> tuple[Engine, Any, RecordingBackend]:
        backend = create(fault)
        plugin = InstalledPlugin(distribution="enginecore-recorder", version="1", entry_point="recorder", value="")
        selected = SelectedDevice(plugin=plugin, device="recorder")
        monkeypatch.setattr(site, "select_device", lambda spec: selected)
        monkeypatch.setattr(site, "create_backend", lambda selected, **_: backend)
        monkeypatch.setattr(resolve, "config_defaults", lambda selected, context: {})
        defaults = {"dtype": "float32", "max_model_len": 64, "num_blocks": 24, "max_num_seqs": 6}
        engine, ready = build.build_engine(EngineArgs(model=tiny, device="recorder", **{**defaults, **settings}))
        engines.append(engine)
        return engine, ready, backend

    yield start
    for engine in engines:
        engine.shutdown()


def generate(engine: Engine, prompts: list[list[int]], count: int = 12) -> tuple[dict[str, list[int]], EngineStats]:
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=1)
        engine.add(EngineRequest(f"r{index}", prompt, params, count - index))
    answers: dict[str, list[int]] = {}
    while engine.has_work():
        for output in engine.step().outputs:
            assert output.error is None
            answers.setdefault(output.request_id, []).extend(output.token_ids)
    return answers, engine.stats()


def choice(ready: Any) -> tuple[str, str]:
    return next((value, reason) for setting, value, reason in ready.config.choices if setting == "graphs")


def test_sizes() -> None:
    assert decode_sizes(1) == [1]
    assert decode_sizes(3) == [1, 2, 3]
    assert decode_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert decode_sizes(256) == [1, 2, 4, *range(8, 257, 8)]
    assert decode_sizes(4096)[-1] == 512


def test_replayed_steps_give_the_tokens_of_eager_ones(start: Start) -> None:
    eager, stats = generate(start("", enforce_eager=True)[0], PROMPTS)
    assert stats.graph_replays == 0 and stats.eager_steps > 10
    engine, ready, backend = start()
    assert [key.num_seqs for key in backend.graphs.captured] == [6, 4, 2, 1], "the largest first, as planned"
    answers, stats = generate(engine, PROMPTS)
    assert answers == eager
    assert backend.graphs.replays == stats.graph_replays > 8
    assert stats.eager_steps == 1, "the prompts; then five, four, three, two, one sequences go in graphs of 6 to 1"
    again, stats = generate(engine, PROMPTS[::-1])
    assert [again[f"r{4 - i}"][:6] for i in range(5)] == [eager[f"r{i}"][:6] for i in range(5)]
    assert choice(ready) == ("4 batch sizes up to 6", "the device's graph support is 'uniform_single_token_decode'")


def test_steps_with_guesses_are_replayed_token_by_token(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCost, "relative_slope", lambda self, rows: 0.0)  # every guess is made
    prompts = [tiny_tokens(5, seed=3) * 3, tiny_tokens(20, seed=4), tiny_tokens(7, seed=5)]
    eager, _ = generate(start("", enforce_eager=True)[0], prompts, 40)
    engine, _, backend = start(speculation="ngram", num_speculative_tokens=3, max_num_batched_tokens=18)
    assert max(key.num_seqs for key in backend.graphs.captured) == 24, "six sequences with three guesses each"
    answers, stats = generate(engine, prompts, 40)
    assert answers == eager
    assert stats.num_drafted > stats.num_accepted > 0
    assert stats.eager_steps == 3, "those with prompts"
    assert backend.graphs.replays == stats.graph_replays == stats.num_steps - 3


def test_memory_is_reserved_and_shrinks_to_what_is_held(start: Start) -> None:
    _, ready, _ = start(num_blocks=None, memory_utilization=0.5)
    ledger = ready.ledger
    assert ledger["graphs"] == 4 * HELD
    plan = build.plan_engine(EngineArgs(model=ready.config.model, device="recorder", dtype="float32", max_num_seqs=6))
    assert plan.ledger["graphs"] > 4 * GraphRunner.bytes_each, "the prediction holds what may be needed"
    assert "graphs" not in start("", enforce_eager=True)[1].ledger


@pytest.mark.parametrize(
    ("fault", "sizes", "words"),
    [
        ("third_fails", [6, 4], "no third graph today"),
        ("host_reads", [], "reads device memory from the host"),
        ("stale_state", [], "refresh_metadata"),
        ("greedy", [6, 4], "are reserved for all"),
    ],
)
def test_a_capture_that_fails_is_told_and_the_rest_runs(
    start: Start, caplog: pytest.LogCaptureFixture, fault: str, sizes: list[int], words: str
) -> None:
    expected, _ = generate(start("", enforce_eager=True)[0], PROMPTS[:3])
    engine, ready, backend = start(fault)
    assert [key.num_seqs for key in backend.graphs.captured] == sizes
    assert words in caplog.text and "other steps run eagerly" in caplog.text
    assert words in choice(ready)[1]
    answers, stats = generate(engine, PROMPTS[:3])
    assert answers == expected
    assert (stats.graph_replays > 0) == bool(sizes)
    assert ready.ledger["graphs"] == len(sizes) * HELD
    with pytest.raises(UnsupportedError, match=words) as caught:
        start(fault, require_graphs=True)
    assert caught.value.exit_code == 8


def test_required_graphs_that_a_device_lacks_are_refused_before_weights_are_read(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "load_model", None)
    with pytest.raises(UnsupportedError, match="graph support is 'never'"):
        start("never", require_graphs=True)
    with pytest.raises(ParameterError, match="enforce_eager or require_graphs"):
        start("", require_graphs=True, enforce_eager=True)


def test_metadata_with_state_is_renewed_before_a_replay(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.testing import recording

    renewed = []
    monkeypatch.setattr(recording.TensorAttention, "refresh_metadata", lambda self, metadata: renewed.append(metadata))
    engine, _, backend = start("stale_state")
    _, stats = generate(engine, PROMPTS[:2])
    assert len(renewed) == stats.graph_replays == backend.graphs.replays > 0
    assert all(torch.is_tensor(metadata.state) for metadata in renewed)


def test_metrics_tell_replays_from_eager_steps() -> None:
    metrics = Metrics("m", 1)
    metrics.stats = lambda: EngineStats(graph_replays=7, eager_steps=2)
    text = metrics.render().decode()
    assert 'enginecore:graph_replays_total{model_name="m"} 7.0' in text
    assert 'enginecore:eager_steps_total{model_name="m"} 2.0' in text


def test_keys_are_the_same_whatever_their_estimate() -> None:
    assert GraphKey(2, 2, 1) == GraphKey(2, 2, 1, activation_bytes=9)
    assert sorted([GraphKey(2, 2, 1, activation_bytes=1), GraphKey(1, 1, 1, activation_bytes=9)])[0].num_seqs == 1
