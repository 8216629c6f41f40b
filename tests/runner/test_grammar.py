"""Grammars in the engine, on the real model: masks, forced tokens, preemption, siblings, and failures."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from enginecore import LLM, SamplingParams
from enginecore.constraints import Thinking
from enginecore.plan import NewRequest
from enginecore.request import EngineRequest
from enginecore.runner.grammar import Grammars, GrammarStore
from enginecore.runner.thinking import ThinkingBudget

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 99},
                   "color": {"enum": ["red", "green", "blue"]}},
    "required": ["name", "age", "color"], "additionalProperties": False,
}  # fmt: skip
COMPACT = {"json": SCHEMA, "whitespace_pattern": "\\x20"}
PROMPT = "<|im_start|>user\nA person as JSON, please.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def llm(smollm2: str) -> Iterator[LLM]:
    with LLM(smollm2, device="cpu", dtype="float32", max_model_len=256, num_blocks=18, max_num_seqs=8) as llm:
        yield llm


def forced(llm: LLM) -> int:
    return llm._client._engine.stats().grammar_fast_forward


def generate(llm: LLM, wanted: dict[str, Any], **params: Any) -> Any:
    sampling = SamplingParams(**{"max_tokens": 60, "seed": 7, "structured_outputs": wanted, **params})
    return llm.generate(PROMPT, sampling, use_tqdm=False)[0].outputs


def test_forced_tokens_cost_no_steps_and_change_nothing(llm: LLM) -> None:
    """Log-probabilities need every token computed: with them the same seeds give the same answers, token by token."""
    wanted = {"json": SCHEMA, "disable_any_whitespace": True}
    same = 0
    for seed in range(4):
        before, steps = forced(llm), llm._client._engine.stats().num_steps
        (fast,) = generate(llm, wanted, seed=seed, temperature=1)
        jumped, took = forced(llm) - before, llm._client._engine.stats().num_steps - steps
        assert jumped >= 6 and took <= len(fast.token_ids) - jumped + 1
        (slow,) = generate(llm, wanted, seed=seed, temperature=1, logprobs=0)
        assert forced(llm) - before == jumped, "the second time nothing is forced"
        assert set(json.loads(fast.text)) == {"name", "age", "color"} and fast.finish_reason == "stop"
        same += fast.token_ids == slow.token_ids
    assert same >= 3, "the model spells forced text as the tokenizer does, nearly always"


def test_the_distribution_is_kept(llm: LLM) -> None:
    """The share of an answer over many seeds, with and without fast-forward, and by the model's own probabilities."""
    wanted = {"regex": r"My favourite city is (Paris|London|Rome)\."}
    counts = []
    for extra in ({}, {"logprobs": 0}):
        outputs = generate(llm, wanted, n=32, seed=1, temperature=1, max_tokens=20, **extra)
        counts.append(Counter(output.text for output in outputs))
    assert sum((counts[0] - counts[1]).values()) <= 3, counts
    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.encode(PROMPT + "My favourite city is", add_special_tokens=False)
    best = llm.generate(
        {"prompt_token_ids": prompt}, SamplingParams(max_tokens=1, logprobs=20, temperature=0), use_tqdm=False
    )[0].outputs[0].logprobs  # fmt: skip
    weight = {city: np.exp(best[0][token].logprob) for city in ("Paris", "London", "Rome")
              for token in tokenizer.encode(" " + city, add_special_tokens=False)[:1] if token in best[0]}  # fmt: skip
    total = sum(weight.values())
    for city, share in weight.items():
        seen = counts[0][f"My favourite city is {city}."] / 32
        assert abs(seen - share / total) < 0.28, (city, seen, share / total)


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ({"regex": r"[A-Z][a-z]{2,8} is [1-9][0-9]? years old\."}, lambda text: text.endswith(" years old.")),
        ({"choice": ["yes", "no", "pêut-être 😀"]}, lambda text: text in ("yes", "no", "pêut-être 😀")),
        ({"grammar": 'start: "a" word\nword: /[b-d]{2}/'}, lambda text: len(text) == 3 and text[0] == "a"),
        ({"grammar": 'root ::= ("x" | "y") "!"'}, lambda text: text in ("x!", "y!")),
        ({"json": {"enum": ["a", 1, None]}}, lambda text: json.loads(text) in ("a", 1, None)),
    ],
)
def test_every_kind(llm: LLM, wanted: dict[str, Any], fits: Callable[[str], bool]) -> None:
    for output in generate(llm, wanted, n=3, temperature=1.5, max_tokens=40):
        assert fits(output.text) and output.finish_reason == "stop" and output.stop_reason is None, output


def test_special_tokens_by_number(llm: LLM) -> None:
    """Text cannot spell them; a grammar names them by their ids."""
    token = llm.get_tokenizer().special_token_id("<|im_start|>")
    (output,) = generate(llm, {"grammar": f'start: "go" <[{token}]> "on"'}, skip_special_tokens=False)
    assert output.text.startswith("go<|im_start|>on") and token in output.token_ids
    with pytest.raises(ValueError, match="grammar cannot be used"):
        generate(llm, {"grammar": "start: <[999999]>"})


def test_thinking_budget_is_for_models_that_think(llm: LLM) -> None:
    with pytest.raises(ValueError, match="not known to think"):
        generate(llm, {"choice": ["a"]}, thinking_token_budget=5)


def test_a_tag_constrains_only_what_it_opens(llm: LLM) -> None:
    tag = {"structures": [{"begin": "<f=a>", "schema": {"const": {"x": 1}}, "end": "</f>"}], "triggers": ["<f="]}
    (output,) = generate(llm, {"structural_tag": tag}, temperature=0, max_tokens=12)
    assert output.text and output.finish_reason == "length"
    bias = {llm.get_tokenizer().encode(text, add_special_tokens=False)[0]: 100 for text in ("<",)}
    (output,) = generate(llm, {"structural_tag": tag}, temperature=0, logit_bias=bias, max_tokens=12)
    assert output.text.startswith("<")


def test_a_complete_answer_ends(llm: LLM) -> None:
    """Whatever ignore_eos and min_tokens say: nothing may follow."""
    (plain,) = generate(llm, {"choice": ["Paris"]})
    assert plain.text == "Paris" and plain.token_ids[-1] in llm.get_tokenizer().eos_token_ids
    for extra in ({"ignore_eos": True}, {"min_tokens": 30}, {"logprobs": 1}, {"ignore_eos": True, "logprobs": 1}):
        (output,) = generate(llm, {"choice": ["Paris"]}, **extra)
        assert (output.text, output.finish_reason, output.token_ids) == ("Paris", "stop", plain.token_ids), extra
    (cut,) = generate(llm, {"json": SCHEMA}, max_tokens=3)
    assert cut.finish_reason == "length" and len(cut.token_ids) == 3


def test_min_tokens_holds_where_the_grammar_lets_it(llm: LLM) -> None:
    (output,) = generate(llm, {"regex": "[ab]{1,40}"}, min_tokens=12, temperature=1)
    assert len(output.token_ids) > 12 and set(output.text) <= {"a", "b"}


def test_stop_strings_and_tokens_inside_forced_text(llm: LLM) -> None:
    (output,) = generate(llm, {"choice": ["one two three four five"]}, stop=["three"])
    assert (output.text, output.finish_reason, output.stop_reason) == ("one two ", "stop", "three")
    token = llm.get_tokenizer().encode("one two three", add_special_tokens=False)[-1]
    (output,) = generate(llm, {"choice": ["one two three four five"]}, stop_token_ids=[token])
    assert output.stop_reason == token and output.token_ids[-1] == token


def test_bans_count_too_and_harm_nobody_else(llm: LLM) -> None:
    """A ban can lead into a dead end: then the request fails, and no other."""
    tokenizer = llm.get_tokenizer()
    (output,) = generate(llm, {"choice": ["yes", "no"]}, temperature=0, bad_words=["yes"])
    assert output.text == "no"
    only_x = tokenizer.encode("x", add_special_tokens=False)
    params = [
        SamplingParams(max_tokens=8, temperature=0),
        SamplingParams(max_tokens=8, allowed_token_ids=only_x, structured_outputs={"choice": ["Paris"]}),
    ]
    with pytest.raises(ValueError, match="prompt 1: no token is left"):
        llm.generate([PROMPT, PROMPT], params, use_tqdm=False)
    assert llm.generate(PROMPT, params[0], use_tqdm=False)[0].outputs[0].token_ids, "the engine goes on"


def test_preemption_and_neighbours_change_nothing(llm: LLM) -> None:
    """18 blocks for 7 sequences: some are preempted, and their matchers are fed again."""
    jobs = [SamplingParams(max_tokens=50, seed=i, temperature=1, structured_outputs=COMPACT if i % 3 else
                           {"regex": "([a-z]{2,9} ){12}[a-z]{2,9}"}) for i in range(6)]  # fmt: skip
    jobs.append(SamplingParams(max_tokens=50, temperature=0, ignore_eos=True))
    alone = [llm.generate(PROMPT, job, use_tqdm=False)[0].outputs[0] for job in jobs]
    before = llm._client._engine.stats().num_preemptions
    llm.reset_prefix_cache()
    together = llm.generate([PROMPT] * len(jobs), jobs, use_tqdm=False)
    assert llm._client._engine.stats().num_preemptions > before, "the pool was too roomy to show anything"
    assert [out.outputs[0].token_ids for out in together] == [out.token_ids for out in alone]


def test_penalties_count_forced_tokens(llm: LLM) -> None:
    wanted = {"regex": "(yes yes yes yes|yes yes no no)"}
    (output,) = generate(llm, wanted, temperature=0, presence_penalty=2.0, frequency_penalty=2.0)
    (slow,) = generate(llm, wanted, temperature=0, presence_penalty=2.0, frequency_penalty=2.0, logprobs=0)
    assert output.text == slow.text


# ---- without a model -------------------------------------------------------------------------------------------------


def store_of(llm: LLM) -> GrammarStore:
    store: GrammarStore = llm._client._engine._grammars._store  # type: ignore[union-attr,assignment]
    return store


def test_a_grammar_is_compiled_once(llm: LLM) -> None:
    store, grammar = store_of(llm), 'start: "once" "and" "never" "again"'
    first = store.compile(grammar)
    assert store.compile(grammar) is first or first.done()
    assert first.result(30) is None and grammar in store._compiled
    kept = store._compiled[grammar]
    assert store.compile(grammar).result(0) is None and store._compiled[grammar] is kept
    assert "unknown name" in str(store.compile("start: nothing").result(30))


def test_requests_wait_for_their_grammar_and_others_do_not(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compilation that never ends holds up its request only; giving up takes it out."""
    engine, never = llm._client._engine, Future[Any]()
    monkeypatch.setattr(store_of(llm), "compile", lambda grammar: never)
    ids = llm.get_tokenizer().encode("Hello", add_special_tokens=False)
    params = SamplingParams(max_tokens=4, temperature=0)
    engine.add(EngineRequest("slow", ids, params, 4, grammar="start: /x/"))
    engine.add(EngineRequest("quick", ids, params, 4, cached_prompt=False))
    news = [output for _ in range(4) for output in engine.step().outputs]
    assert {output.request_id for output in news} == {"quick"} and news[-1].finish_reason == "length"
    assert engine.has_work() and engine.abort(["slow"]) == ["slow"] and not engine.has_work()
    failed = Future[Any]()
    failed.set_exception(RuntimeError("boom"))
    monkeypatch.setattr(store_of(llm), "compile", lambda grammar: failed)
    engine.add(EngineRequest("broken", ids, params, 4, grammar="start: /x/"))
    (output,) = engine.step().outputs
    assert output.finish_reason == "error" and "boom" in str(output.error)


def test_no_tokenizer_no_grammar() -> None:
    store = GrammarStore(64)
    assert "no tokenizer" in str(store.compile('start: "a"').result(10))
    store.use_tokenizer("{}", [0])
    store.warm_up()
    assert "cannot follow a grammar" in str(store.compile('start: "a"').result(10))
    store.shutdown()


def test_masks_on_plain_logits(llm: LLM) -> None:
    """Rows without a grammar stay as they are; a model's padding rows, which the tokenizer lacks, are never allowed."""
    store, tokenizer = store_of(llm), llm.get_tokenizer()
    grammars = Grammars(store, torch.device("cpu"))
    assert store.compile('start: "a" | "b"').result(30) is None
    request = EngineRequest("r", [1], SamplingParams(), 5, list(tokenizer.eos_token_ids), grammar='start: "a" | "b"')
    grammars.enter(NewRequest(3, request, [1], 1, 0, None))
    assert grammars and 3 in grammars and 0 not in grammars
    grammars.begin([0, 3])
    logits = torch.zeros(2, tokenizer.vocab_size)
    assert grammars.apply(logits, [0, 3]) == (frozenset(), {})
    allowed = torch.isfinite(logits[1]).nonzero().flatten().tolist()
    assert torch.isfinite(logits[0]).all() and {tokenizer.token_text(token) for token in allowed} == {"a", "b"}
    forced = grammars.advance([0, 3], np.array([1, 1]), [5, allowed[0]], {})
    assert forced == {1: [tokenizer.eos_token_ids[0]]}, "the answer is complete"


@pytest.mark.parametrize(("begin", "budget", "tokens", "want"), [
    ([], 3, [5, 6], None), ([], 3, [5, 6, 7], 1), ([], 3, [5, 6, 7, 1], 2), ([], 3, [5, 1, 2, 7, 8, 9], None),
    ([], 0, [], 1), ([9], 2, [5, 5, 5, 5], None), ([9], 2, [9, 5], None), ([9], 2, [9, 5, 5], 1),
    ([9], 2, [9, 5, 5, 1, 2, 5, 5, 5], None),
])  # fmt: skip
def test_thinking_ends_when_its_budget_is_spent(
    begin: list[int], budget: int, tokens: list[int], want: int | None
) -> None:
    """The end of thinking is the tokens 1, 2."""
    thinking = Thinking(begin, [1, 2], budget)
    assert ThinkingBudget(thinking, 2).forced(np.array([8, 8, *tokens])) == want
    step_by_step = ThinkingBudget(thinking, 2)
    answers = [step_by_step.forced(np.array([8, 8, *tokens[:count]])) for count in range(len(tokens) + 1)]
    assert answers[-1] == want


def test_thinking_is_bounded_in_the_engine(llm: LLM) -> None:
    engine, tokenizer = llm._client._engine, llm.get_tokenizer()
    end = tokenizer.encode("</think>", add_special_tokens=False)
    ids = tokenizer.encode(PROMPT + "<think>", add_special_tokens=False)
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    engine.add(EngineRequest("think", ids, params, 30, thinking=Thinking([], end, 8)))
    tokens: list[int] = []
    while engine.has_work():
        tokens += [token for output in engine.step().outputs for token in output.token_ids]
    assert tokens[8 : 8 + len(end)] == end and len(tokens) == 30
