"""The engine in this process, on the simulated device, whose answers are known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from enginecore.config import EngineArgs
from enginecore.engine.client import InprocClient
from enginecore.errors import KVCacheTooSmall, ModelError, ParameterError
from enginecore.request import EngineOutput, EngineRequest, SamplingParams
from enginecore_sim import RAISE_PROMPT, candidates, expected_tokens

VOCAB = 1000
Start = Callable[..., InprocClient]


@pytest.fixture
def start(config_only: str) -> Iterator[Start]:
    clients: list[InprocClient] = []

    def start(**fields: Any) -> InprocClient:
        defaults = {"num_blocks": 64, "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64}
        clients.append(InprocClient(EngineArgs(model=config_only, device="sim", **{**defaults, **fields})))
        return clients[-1]

    yield start
    for client in clients:
        client.shutdown()


def request(name: str, prompt: list[int], count: int, **params: Any) -> EngineRequest:
    return EngineRequest(name, prompt, SamplingParams(**{"temperature": 0, **params}), count)


def run(client: InprocClient) -> dict[str, list[EngineOutput]]:
    outputs: dict[str, list[EngineOutput]] = {}
    while client.has_work():
        for output in client.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


PROMPTS = [[i, 2, 3] * (5 + 2 * i) for i in range(12)]


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("num_blocks", [64, 17])
@pytest.mark.parametrize("output", ["logits", "tokens"])
def test_twelve_requests(start: Start, num_blocks: int, prefix_caching: bool, output: str) -> None:
    client = start(num_blocks=num_blocks, enable_prefix_caching=prefix_caching, device_options={"output": output})
    for i, prompt in enumerate(PROMPTS):
        client.add(request(f"r{i}", prompt, 60))
    outputs = run(client)
    for i, prompt in enumerate(PROMPTS):
        assert tokens(outputs[f"r{i}"]) == expected_tokens(prompt, 60, vocab_size=VOCAB)
    stats = client.step().stats
    assert (stats.num_preemptions > 0) == (num_blocks == 17)
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)
    assert stats.num_free_blocks == stats.num_blocks == num_blocks


def test_logprobs_and_prompt_logprobs(start: Start) -> None:
    client = start(max_num_batched_tokens=16)
    prompt = PROMPTS[6]
    client.add(request("a", prompt, 4, logprobs=3, prompt_logprobs=1))
    outputs = run(client)["a"]
    whole = prompt + tokens(outputs)
    prompt_logprobs = outputs[0].prompt_logprobs
    assert prompt_logprobs is not None and len(prompt_logprobs) == len(prompt) and prompt_logprobs[0] is None
    for position, entry in enumerate(prompt_logprobs[1:], start=1):
        assert entry is not None
        assert entry.token_ids == [prompt[position], candidates(prompt[:position], VOCAB)[0]]
    for i, output in enumerate(outputs):
        assert output.logprobs is not None
        best = candidates(whole[: len(prompt) + i], VOCAB)[:3]
        assert output.logprobs[0].token_ids == [best[0], *best] and output.logprobs[0].rank == 1


def test_what_can_never_fit_is_refused_and_the_rest_goes_on(start: Start) -> None:
    client = start(num_blocks=16)
    client.add(request("long", [1] * 250, 20))
    client.add(request("good", [1, 2, 3], 5))
    outputs = run(client)
    assert [(output.finish_reason, output.token_ids) for output in outputs["long"]] == [("error", [])]
    assert "exceed max_model_len 256" in str(outputs["long"][0].error)
    assert tokens(outputs["good"]) == expected_tokens([1, 2, 3], 5, vocab_size=VOCAB)


def test_stop_and_abort(start: Start) -> None:
    client = start()
    answer = expected_tokens([1, 2, 3], 20, vocab_size=VOCAB)
    client.add(EngineRequest("eos", [1, 2, 3], SamplingParams(temperature=0), 20, eos_token_ids=[answer[6]]))
    client.add(request("gone", [4, 5], 200))
    client.add(request("waiting", [4, 5], 200))
    client.step()
    client.abort(["gone", "waiting", "unknown"])
    outputs = run(client)
    assert tokens(outputs["eos"]) == answer[1:7] and outputs["eos"][-1].finish_reason == "stop"
    assert set(outputs) == {"eos"} and client.step().stats.num_used_blocks == 0


def test_prefix_cache_and_its_reset(start: Start) -> None:
    client = start()
    for name, hit in (("a", 0), ("b", 64)):
        client.add(request(name, PROMPTS[9], 2))
        assert run(client)[name][0].num_cached_tokens == hit
    forgotten = client.call("reset_prefix_cache")
    assert forgotten > 0 and client.call("reset_prefix_cache") == 0
    client.add(request("c", PROMPTS[9], 2))
    assert run(client)["c"][0].num_cached_tokens == 0


def test_a_step_with_nothing_to_do_reports_figures(start: Start) -> None:
    client = start()
    assert not client.has_work()
    step = client.step()
    assert step.outputs == [] and step.stats.num_blocks == 64 and step.stats.num_steps == 0


def test_a_failing_step_raises(start: Start) -> None:
    client = start()
    client.add(request("a", list(RAISE_PROMPT), 5))
    with pytest.raises(RuntimeError, match="asked to fail"):
        client.step()


def test_ready_says_what_was_decided(start: Start, config_only: str) -> None:
    client = start(max_model_len=None, num_blocks=None, max_num_seqs=None)
    config = client.ready.config
    assert (config.device, config.vocab_size, config.max_model_len) == ("sim", VOCAB, 512)
    assert config.model_path == config_only and config.plugin.startswith("enginecore-sim")
    assert {"max_model_len", "max_num_seqs", "memory_utilization", "dtype"} <= {name for name, _, _ in config.choices}
    assert "max_num_batched_tokens" not in {name for name, _, _ in config.choices}, "the user chose it"
    assert client.ready.ledger["runtime"] > 0


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"model": "/no/such/model"}, ModelError, "does not exist"),
        ({"device": "nonesuch"}, ParameterError, "nonesuch"),
        ({"num_blocks": 15}, KVCacheTooSmall, "needed 16 blocks"),
        ({"max_model_len": 513}, ParameterError, "512 positions"),
        ({"device_options": {"speed": 1}}, ParameterError, "speed"),
    ],
)
def test_what_cannot_be_built(start: Start, config_only: str, fields: dict[str, Any], error: type, text: str) -> None:
    args: dict[str, Any] = {"model": config_only, "device": "sim", "max_model_len": 256, "num_blocks": 64, **fields}
    with pytest.raises(error, match=text):
        InprocClient(EngineArgs(**args))


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("num_blocks", [64, 20])
def test_choices_of_one_prompt_share_its_blocks(start: Start, num_blocks: int, prefix_caching: bool) -> None:
    """Answers as of requests on their own; 20 blocks are too few for all at once."""
    client = start(num_blocks=num_blocks, enable_prefix_caching=prefix_caching)
    prompt = [7, 1, 9] * 31
    for i in range(8):
        child = request(f"r{i}", prompt, 60 + i)
        child.fork_of = "r0" if i else None
        client.add(child)
    steps = [client.step() for _ in range(3)]
    assert steps[-1].stats.num_forks > 0 and steps[-1].stats.num_used_blocks <= 5 + 8
    while client.has_work():
        steps.append(client.step())
    outputs: dict[str, list[EngineOutput]] = {}
    for output in (output for step in steps for output in step.outputs):
        outputs.setdefault(output.request_id, []).append(output)
    for i in range(8):
        assert tokens(outputs[f"r{i}"]) == expected_tokens(prompt, 60 + i, vocab_size=VOCAB)
    stats = client.step().stats
    assert stats.num_used_blocks == 0 and stats.forked_tokens == stats.num_forks * 92


def test_memory_by_state_and_what_became_of_a_request(start: Start) -> None:
    client = start()
    client.add(request("a", [5] * 40, 8))
    client.step()
    memory = client.call("memory")
    assert (memory["in_use"], memory["cached"], memory["free"]) == (3, 0, 61)
    assert (memory["slots_held"], memory["tokens_held"]) == (48, 40)
    run(client)
    memory = client.call("memory")
    assert (memory["in_use"], memory["cached"], memory["free"]) == (0, 2, 62)
    client.add(request("b", [5] * 40, 8))
    run(client)
    a, b = client.call("explain", ["a", "b", "unknown"])
    assert (a["prefill"]["computed_tokens"], b["prefill"]["computed_tokens"]) == (40, 8)
    assert b["prefill"]["prefix_match_ended"]["block"] == 2 and b["batch"]["steps"] == 8
