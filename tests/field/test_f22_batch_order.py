"""F22: output i belongs to prompt i, whatever else is in the batch."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from enginecore import LLM, SamplingParams

from tests.field.answers import text, texts
from tests.field.support import COMPLETIONS, refused, scripted, token_prompt, unharmed
from tests.serving import ServerProcess

MAX_LEN = 128
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The simulated device with a pool for two and a half full sequences."""
    with LLM("smollm2-135m", device="sim", max_model_len=MAX_LEN, num_blocks=20, max_num_seqs=16) as llm:
        yield llm


def test_fifty_prompts_in_a_tiny_pool(llm: LLM) -> None:
    lengths = random.Random(22)
    prompts = [token_prompt(100 + index, lengths.randint(1, MAX_LEN - 12)) for index in range(50)]
    before = llm._client.call("stats").num_preemptions
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert llm._client.call("stats").num_preemptions > before, "the pool is so small that sequences gave way"
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [output.outputs[0].token_ids for output in outputs] == [scripted(prompt, 12) for prompt in prompts]


def test_identical_prompts(llm: LLM) -> None:
    prompt = token_prompt(7, 30)
    outputs = llm.generate([prompt] * 3, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [scripted(prompt, 12)] * 3


def test_a_bad_prompt_in_the_middle_leaves_nothing_behind(llm: LLM) -> None:
    good = [token_prompt(index, 10) for index in (1, 2)]
    for bad in ([5] * (MAX_LEN + 1), [], "", [-1], [49152]):
        with pytest.raises(ValueError, match="prompt 1: "):
            llm.generate([good[0], bad, good[1]], GREEDY, use_tqdm=False)
        assert not llm._client.has_work()
    params = [GREEDY, SamplingParams(allowed_token_ids=[49152]), GREEDY]
    with pytest.raises(ValueError, match=r"prompt 1: .*allowed_token_ids"):
        llm.generate([*good, good[0]], params, use_tqdm=False)
    outputs = llm.generate(good, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [scripted(prompt, 12) for prompt in good]
    assert llm._client.call("stats").num_used_blocks == 0


def test_a_request_that_the_engine_gives_up_is_named(llm: LLM) -> None:
    """Found only while it runs: the only token allowed is a bad word."""
    word = llm.get_tokenizer().decode([338])
    dead_end = SamplingParams(allowed_token_ids=[338], bad_words=[word])
    prompts = [token_prompt(index, 10) for index in (3, 4)]
    with pytest.raises(ValueError, match="prompt 1: no token is left"):
        llm.generate(prompts, [GREEDY, dead_end], use_tqdm=False)
    assert not llm._client.has_work() and llm._client.call("stats").num_used_blocks == 0
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [scripted(prompt, 12) for prompt in prompts]


def test_choices_are_numbered_prompt_by_prompt(sim_server: ServerProcess) -> None:
    prompts = [token_prompt(50 + index, 5 + 20 * index) for index in range(3)]
    body = {"temperature": 1, "seed": 3, "max_tokens": 6, "ignore_eos": True}
    answer = sim_server.complete(prompt=prompts, n=2, **body)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    alone = [text(sim_server.complete(prompt=prompt, **{**body, "seed": 3 + j})) for prompt in prompts for j in (0, 1)]
    assert texts(answer) == alone


def test_one_long_prompt_refuses_the_whole_call(sim_server: ServerProcess) -> None:
    with unharmed(sim_server):
        for stream in (False, True):
            body = {"prompt": [[5], [5] * 1025, [5]], "stream": stream}
            error = refused(sim_server.post(COMPLETIONS, body), param="prompt[1]")
            assert error["code"] == "context_length_exceeded"
