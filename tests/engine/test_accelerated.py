"""Budget, graphs, faults and sleep of an engine on an accelerator, from its loading to its tokens."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from enginecore.errors import KVCacheTooSmall, OutOfDeviceMemory, UnsupportedError
from enginecore.testing.fake_runtime import FakeRuntime

from tests.engine.accelerated import MIB, SCRATCH, run, start
from tests.models.tiny import tiny_tokens, write_tiny

PROMPTS = [tiny_tokens(n, seed=n) for n in (3, 19, 40)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[int]]]:
    """The model's folder, and what transformers answers to the prompts."""
    folder: Path = tmp_path_factory.mktemp("tiny")
    model = write_tiny(folder, "llama")
    right = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(6):
            with torch.inference_mode():
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        right.append(tokens[len(prompt) :])
    return str(folder), right


def test_the_budget_holds_everything_and_activations_are_measured(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(512 * MIB, others=64 * MIB)
    client = start(monkeypatch, tiny[0], runtime, memory_utilization=0.5, max_num_seqs=64)
    ledger = client.ready.ledger
    assert ledger["budget"] == 256 * MIB, "what others hold does not enter it"
    left = ledger["process_base"] - MIB
    assert 0 < left <= 64 * SCRATCH, "what the rehearsal has left in the allocator"
    assert ledger["activations"] == SCRATCH * 32
    pool = runtime.graph_bytes + runtime.graph_bytes // 16 * (_captured(client) - 1)
    assert pool <= ledger["graphs"] < 2 * pool, "shrunk from the estimate to what they hold"
    parts = ("process_base", "weights", "activations", "graphs", "kv_cache")
    assert sum(ledger[name] for name in parts) <= ledger["budget"]
    assert runtime.reserved == ledger["kv_cache"] + pool
    assert [kind for kind, _ in runtime.events].count("allocate") > 0
    client.shutdown()


def _captured(client) -> int:
    [told] = [value for name, value, _ in client.ready.config.choices if name == "graphs"]
    return int(told.split()[0])


def test_replayed_steps_answer_as_transformers_before_and_after_sleep(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(64 * MIB)
    client = start(monkeypatch, tiny[0], runtime)
    assert run(client, PROMPTS) == tiny[1]
    assert client.step().stats.graph_replays >= 5
    held = runtime.reserved_bytes()
    client.call("sleep", 1)
    assert client.call("is_sleeping") and runtime.reserved_bytes() == 0 < held
    assert "asleep" in run(client, PROMPTS[:1], name="early")[0]
    runtime.others = 64 * MIB
    with pytest.raises(OutOfDeviceMemory, match="waking needs"):
        client.call("wake_up")
    runtime.others = 0
    client.call("wake_up")
    replays = client.step().stats.graph_replays
    assert run(client, PROMPTS, name="late") == tiny[1], "nothing of the lost cache was used"
    assert client.step().stats.graph_replays > replays
    with pytest.raises(UnsupportedError, match="level 3"):
        client.call("sleep", 3)
    client.shutdown()
    assert runtime.reserved_bytes() == 0


def test_weights_that_are_dropped_are_read_again(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(64 * MIB)
    client = start(monkeypatch, tiny[0], runtime)
    assert run(client, PROMPTS) == tiny[1]
    held, paged = runtime.reserved_bytes(), client._engine.executor._worker._worker.model.paged
    model = weakref.ref(paged.model)
    client.call("sleep", 2)
    assert model() is None, "somebody still holds the weights"
    assert client.call("is_sleeping") and runtime.reserved_bytes() == 0 < held
    runtime.others = 64 * MIB
    with pytest.raises(OutOfDeviceMemory, match="wake again"):
        client.call("wake_up")
    runtime.others = 0
    client.call("wake_up")
    replays = client.step().stats.graph_replays
    assert run(client, PROMPTS, name="late") == tiny[1] and runtime.reserved_bytes() == held
    assert client.step().stats.graph_replays > replays, "graphs were captured anew"
    client.call("sleep", 1)
    client.call("wake_up")
    assert run(client, PROMPTS[:1], name="last") == tiny[1][:1], "the first level works on what was read again"
    client.shutdown()


def test_a_capture_that_fails_runs_eagerly_with_the_reason(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(64 * MIB)
    runtime.capture_fails = "operation not permitted when stream is capturing"
    client = start(monkeypatch, tiny[0], runtime)
    [(value, reason)] = [(value, why) for name, value, why in client.ready.config.choices if name == "graphs"]
    assert value == "no batch size" and "not permitted" in reason
    assert run(client, PROMPTS) == tiny[1] and client.step().stats.graph_replays == 0
    client.shutdown()
    with pytest.raises(UnsupportedError, match=r"require_graphs.*not permitted"):
        start(monkeypatch, tiny[0], runtime, require_graphs=True)


def test_memory_that_runs_out_costs_its_step_alone(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime(64 * MIB, graphs=False)
    client = start(monkeypatch, tiny[0], runtime)
    runtime.others = runtime.memory_info()[0] - 8 * SCRATCH  # another process takes all but room for eight tokens
    short, long = run(client, [PROMPTS[0], PROMPTS[1]], name="full")
    assert "ran out of the device's memory" in short and "ran out of the device's memory" in long
    assert run(client, PROMPTS[:1], name="small") == tiny[1][:1]
    runtime.others = 0
    assert run(client, PROMPTS, name="again") == tiny[1]
    assert client.step().stats.lost_steps == 1 and client.step().stats.num_used_blocks == 0
    client.shutdown()


def test_another_process_that_holds_the_memory(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KVCacheTooSmall, match="other processes hold the rest"):
        start(monkeypatch, tiny[0], FakeRuntime(8 * MIB, others=8 * MIB - 100_000, graphs=False))
    with pytest.raises(OutOfDeviceMemory, match="the largest step, 48 tokens in 4 sequences, does not fit"):
        settings = {"max_num_batched_tokens": 48}
        start(monkeypatch, tiny[0], FakeRuntime(8 * MIB, others=8 * MIB - 50_000, graphs=False), **settings)
    with pytest.raises(OutOfDeviceMemory, match="no memory for the smallest attention call"):
        start(monkeypatch, tiny[0], FakeRuntime(8 * MIB, others=8 * MIB - 2_000, graphs=False))


def test_the_cache_takes_less_where_others_hold_memory_unless_the_user_chose(
    tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = start(monkeypatch, tiny[0], FakeRuntime(8 * MIB, graphs=False), memory_utilization=None)
    whole = alone.ready.ledger["kv_cache"]
    others = 8 * MIB - int(0.9 * whole)
    alone.shutdown()
    with pytest.raises(KVCacheTooSmall, match="other processes hold the rest"):
        start(monkeypatch, tiny[0], FakeRuntime(8 * MIB, others=others, graphs=False), memory_utilization=0.9)
    client = start(monkeypatch, tiny[0], FakeRuntime(8 * MIB, others=others, graphs=False), memory_utilization=None)
    assert 0 < client.ready.ledger["kv_cache"] < whole
    assert any(name == "kv_cache_memory" and "other processes" in why for name, _, why in client.ready.config.choices)
    assert run(client, PROMPTS, name="crowded") == tiny[1]
    client.shutdown()


def test_refusals_come_before_weights_with_all_reasons_and_the_nearest_setting(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny(tmp_path, "llama", head_dim=24)
    (tmp_path / "model.safetensors").write_bytes(b"never read")
    with pytest.raises(UnsupportedError) as error:
        start(monkeypatch, str(tmp_path), FakeRuntime(64 * MIB), dtype="float16", block_size=8)
    assert error.value.exit_code == 8
    assert all(told in " ".join(error.value.reasons) for told in ("float16", "block size 8", "head size 24"))
    assert error.value.fix == "try --dtype bfloat16 --block-size 16"


def test_attention_without_kernels_is_counted_and_strict_forbids_it(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    why = "Triton is not installed"
    client = start(monkeypatch, tiny[0], FakeRuntime(64 * MIB, graphs=False), why_none=why)
    assert "attention" in client.step().stats.reference_ops
    client.shutdown()
    with pytest.raises(UnsupportedError, match=why):
        start(monkeypatch, tiny[0], FakeRuntime(64 * MIB, graphs=False), why_none=why, strict_ops=True)
