"""Lower tiers under a whole engine: through the simulated device's cache, and through real kernels and their layout."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from enginecore.config import EngineArgs
from enginecore.engine.client import InprocClient
from enginecore.errors import ParameterError
from enginecore.request import EngineOutput, EngineRequest, SamplingParams
from enginecore_sim import expected_tokens

Start = Callable[..., InprocClient]
PROMPT = [*[7, 1, 9, 4] * 12, 5]


@pytest.fixture
def start(config_only: str) -> Iterator[Start]:
    clients: list[InprocClient] = []

    def start(**fields: Any) -> InprocClient:
        defaults = {"model": config_only, "device": "sim", "num_blocks": 16, "max_model_len": 256, "max_num_seqs": 8}
        clients.append(InprocClient(EngineArgs(**{**defaults, **fields})))
        return clients[-1]

    yield start
    for client in clients:
        client.shutdown()


def ask(client: InprocClient, prompt: list[int], count: int = 4, name: str = "a", **fields: Any) -> list[EngineOutput]:
    client.add(EngineRequest(name, prompt, SamplingParams(temperature=0), count, **fields))
    outputs = []
    while client.has_work():
        outputs += client.step().outputs
    return outputs


def tokens(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def settle(client: InprocClient) -> dict[str, int]:
    while client._engine.tidy():
        pass
    figures: dict[str, int] = client.call("memory")
    return figures


def flood(client: InprocClient) -> None:
    ask(client, [3] * 250, 2, "flood")


def test_prompts_come_back_from_host_memory(start: Start) -> None:
    client = start(kv_host_memory=1 << 20)
    first = tokens(ask(client, PROMPT))
    settle(client)
    flood(client)
    again = ask(client, PROMPT)
    assert tokens(again) == first == expected_tokens(PROMPT, 4, vocab_size=1000)
    assert again[0].num_cached_tokens == 48
    figures = settle(client)
    assert figures["host_loaded"] == 3 and figures["in_use"] == 0 and figures["host_slots"] == (1 << 20) // 128
    stats = client.step().stats
    assert stats.lifted_tokens == 48 and stats.host_blocks == figures["host_blocks"] > 2


def test_a_restart_finds_prompts_on_disk(start: Start, tmp_path: Path, config_only: str) -> None:
    first = start(kv_disk=str(tmp_path / "kv"))
    answer = tokens(ask(first, PROMPT))
    first.shutdown()  # what is under way is written first
    again = start(kv_disk=str(tmp_path / "kv"))
    outputs = ask(again, PROMPT)
    assert tokens(outputs) == answer and outputs[0].num_cached_tokens == 48
    assert settle(again)["disk_read"] == 3
    other = start(kv_disk=str(tmp_path / "kv"), block_size=8, num_blocks=32)
    assert settle(other)["disk_blocks"] == 0, "another layout has nothing in common with it"
    (told,) = again.call("explain", ["a"])
    assert [move["from"] for move in told["transfers"]] == ["disk", "host"]


def test_other_weights_of_the_same_name_and_size_find_nothing(start: Start, tmp_path: Path, config_only: str) -> None:
    weights = Path(config_only) / "model.safetensors"
    ask(start(kv_disk=str(tmp_path)), PROMPT)
    before = weights.read_bytes()
    same = start(kv_disk=str(tmp_path))
    first_folder = same._engine.scheduler.tiers.disk.folder
    try:
        weights.write_bytes(b"\0")
        assert start(kv_disk=str(tmp_path))._engine.scheduler.tiers.disk.folder != first_folder
    finally:
        weights.write_bytes(before)
    assert start(kv_disk=str(tmp_path))._engine.scheduler.tiers.disk.folder == first_folder


def test_a_folder_that_cannot_be_used_is_a_warning(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("mine")
    with caplog.at_level(logging.WARNING, "enginecore"):
        client = start(kv_disk=str(tmp_path / "file"), kv_host_memory=1 << 16)
    assert "cannot be used" in caplog.text
    assert tokens(ask(client, PROMPT)) == expected_tokens(PROMPT, 4, vocab_size=1000)
    assert "disk_blocks" not in settle(client)
    assert start(kv_disk=str(tmp_path / "file"))._engine.scheduler.tiers is None


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"kv_host_memory": 100}, "one block has 128"),
        ({"kv_host_memory": 0}, "at least 1"),
        ({"kv_host_memory": 10**15}, "this machine has"),
        ({"kv_disk": " "}, "must name a folder"),
        ({"kv_disk": "x", "kv_disk_size": 0}, "at least 1"),
        ({"kv_disk": "x", "enable_prefix_caching": False}, "needs prefix caching"),
    ],
)
def test_settings_that_cannot_be(start: Start, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ParameterError, match=text):
        start(**fields)


@pytest.mark.model
def test_the_real_model_through_every_tier(
    tmp_path: Path, smollm2: str, greedy_reference: list[dict[str, Any]]
) -> None:
    """The tokens are those of an independent implementation, whichever tier the prefix comes from."""
    case = next(case for case in greedy_reference if len(case["prompt_token_ids"]) == 65)
    prompt, wanted = case["prompt_token_ids"], case["output_token_ids"][:8]
    args = EngineArgs(
        model=smollm2, device="cpu", dtype="float32", max_model_len=80, num_blocks=5, max_num_seqs=2,
        kv_host_memory=1 << 26, kv_disk=str(tmp_path),
    )  # fmt: skip
    hit = (len(prompt) - 1) // 16 * 16
    assert hit >= 16
    for found in (0, hit):  # the second engine finds everything on disk
        client = InprocClient(args)
        try:
            outputs = ask(client, prompt, len(wanted))
            assert tokens(outputs) == wanted and outputs[0].num_cached_tokens == found
            settle(client)
            ask(client, [5] * 76, 2, "flood")
            outputs = ask(client, prompt, len(wanted), "again")
            assert tokens(outputs) == wanted and outputs[0].num_cached_tokens == hit
            assert settle(client)["host_loaded"] >= hit // 16
        finally:
            client.shutdown()
