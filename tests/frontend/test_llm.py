"""`LLM` on the simulated device: the real scheduler, cache and tokenizer, and tokens that are known beforehand."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
from enginecore import LLM, SamplingParams
from enginecore.errors import ParameterError
from enginecore.frontend.input_processor import Prompt
from enginecore_sim import expected_tokens

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(smollm2: str) -> Iterator[LLM]:
    with LLM(smollm2, device="sim", max_model_len=256, num_blocks=20, max_num_seqs=8) as llm:
        yield llm


def test_order_with_a_tiny_pool(llm: LLM) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 49152) for _ in range(rng.randrange(1, 60))] for _ in range(30)] + [[5, 6, 7]] * 3
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [o.outputs[0].token_ids for o in outputs] == [expected_tokens(p, 8, vocab_size=49152) for p in prompts]


def test_prompt_forms_and_a_list_of_params(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("Hello")
    forms: tuple[Prompt, ...] = ("Hello", ids, {"prompt": "Hello"})
    texts = [llm.generate(p, GREEDY, use_tqdm=False)[0].outputs[0].text for p in forms]
    assert len(set(texts)) == 1
    both: list[Prompt] = ["Hello", ids]
    one, two = llm.generate(both, [GREEDY, SamplingParams(max_tokens=3, temperature=0)], use_tqdm=False)
    assert len(one.outputs[0].token_ids) == 8 and len(two.outputs[0].token_ids) == 3 and one.prompt == "Hello"
    assert llm.generate([], GREEDY) == []


def test_choices_and_logprobs(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    first, second = (llm.generate([[9, 8, 7]], params, use_tqdm=False)[0] for _ in range(2))
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in second.outputs]
    assert [o.index for o in first.outputs] == [0, 1, 2] and len({tuple(o.token_ids) for o in first.outputs}) == 3
    for choice in first.outputs:
        assert choice.logprobs is not None and len(choice.logprobs) == 6 and choice.cumulative_logprob is not None
        chosen = [position[token] for token, position in zip(choice.token_ids, choice.logprobs, strict=True)]
        assert choice.cumulative_logprob == pytest.approx(sum(each.logprob for each in chosen))
    assert first.prompt_logprobs is not None and first.prompt_logprobs[0] is None and len(first.prompt_logprobs) == 3


def test_a_bad_prompt_is_named_and_nothing_is_left(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"prompt 1: .*49152"):
        llm.generate([[1], [49152], [2]], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match=r"prompt 2: .*256 tokens"):
        llm.generate([[1], [2], [3] * 300], GREEDY, use_tqdm=False)
    assert not llm._client.has_work()
    (output,) = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == expected_tokens([5, 6, 7], 8, vocab_size=49152)


def test_an_interrupt_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(3))

    def interrupted() -> object:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return real()

    real = llm._client.step
    with monkeypatch.context() as patch:
        patch.setattr(llm._client, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1, 2], [3, 4]], GREEDY, use_tqdm=False)
    assert not llm._client.has_work()
    assert len(llm.generate([[1, 2]], GREEDY, use_tqdm=False)) == 1


def test_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    single = llm.chat(messages, GREEDY, use_tqdm=False)
    several = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert len(single) == 1 and len(several) == 2 and several[1].prompt == single[0].prompt
    assert single[0].prompt is not None and single[0].prompt.endswith("<|im_start|>assistant\n")
    with pytest.raises(ValueError, match="conversation 1"):
        llm.chat([messages, [{"role": "bad"}]], GREEDY, use_tqdm=False)


def test_wrong_counts_and_defaults(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="2 prompts, but 1"):
        llm.generate([[1], [2]], [GREEDY], use_tqdm=False)
    with pytest.raises(ParameterError, match="2 prompts, but 1 priorities"):
        llm.generate([[1], [2]], GREEDY, use_tqdm=False, priority=[1])
    assert llm.get_default_sampling_params() == SamplingParams()
    assert len(llm.generate([[1, 2]], use_tqdm=False)[0].outputs[0].token_ids) <= 16


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([[1, 2], [3]], GREEDY)
    assert "2/2" in capsys.readouterr().err


def test_a_script_without_shutdown_exits(smollm2: str) -> None:
    script = (
        "from enginecore import LLM, SamplingParams\n"
        f"llm = LLM({smollm2!r}, device='sim', max_model_len=64, num_blocks=8, gpu_memory_utilization=0.5)\n"
        "print(len(llm.generate('Hello', SamplingParams(max_tokens=2))))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout == "1\n", done.stderr


def test_after_shutdown(smollm2: str) -> None:
    llm = LLM(smollm2, device="sim", max_model_len=64, num_blocks=8)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(RuntimeError, match="shut down"):
        llm.generate("Hello", GREEDY)
