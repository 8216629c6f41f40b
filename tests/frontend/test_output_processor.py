from __future__ import annotations

from typing import Any

import pytest
from enginecore.errors import EngineDeadError, RequestError
from enginecore.frontend.detokenizer import TokenTable
from enginecore.frontend.input_processor import InputProcessor
from enginecore.frontend.output_processor import OutputProcessor
from enginecore.frontend.outputs import RequestOutput
from enginecore.request import EngineOutput, SamplingParams
from hypothesis import given
from hypothesis import strategies as st

from tests.frontend.toy import EOS, ToyTokenizer, config, entry, step

TOKENIZER = ToyTokenizer()


class Sink:
    def __init__(self) -> None:
        self.outputs: list[RequestOutput] = []
        self.errors: list[Exception] = []

    def put(self, key: int, output: RequestOutput) -> None:
        self.outputs.append(output)

    def fail(self, key: int, error: Exception) -> None:
        self.errors.append(error)

    def text(self, index: int = 0) -> str:
        return "".join(o.text for output in self.outputs for o in output.outputs if o.index == index)


class Observer:
    def __init__(self) -> None:
        self.ended: list[tuple[str, int, int]] = []
        self.counted = self.prompt = self.first = self.next = 0

    def first_output(self, num_prompt_tokens: int) -> None:
        self.prompt += num_prompt_tokens

    def first_token(self, seconds: float) -> None:
        self.first += 1

    def next_token(self, seconds: float) -> None:
        self.next += 1

    def tokens(self, count: int) -> None:
        self.counted += count

    def finished(self, reason: str, seconds: float, num_prompt_tokens: int, num_generated: int) -> None:
        self.ended.append((reason, num_prompt_tokens, num_generated))


class Bench:
    """A processor with one request and its sink."""

    def __init__(self, kind: Any = "delta", **params: Any) -> None:
        table = TokenTable(TOKENIZER)
        self.observer = Observer()
        self.processor = OutputProcessor(table, self.observer)
        inputs = InputProcessor(config(), TOKENIZER, table)
        self.sink = Sink()
        prepared = inputs.process("hello", SamplingParams(**{"max_tokens": 40, **params}))
        self.engine_requests = self.processor.add(prepared, request_id="r", internal_id="i", sink=self.sink, kind=kind)

    def send(self, *tokens: int, index: int = 0, **fields: Any) -> list[str]:
        return list(self.processor.process(step(EngineOutput(f"i_{index}", list(tokens), **fields))))


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def test_deltas_add_up_and_the_end_token_has_no_text() -> None:
    bench = Bench()
    for token in ids("the world"):
        bench.send(token)
    bench.send(EOS, finish_reason="stop")
    last = bench.sink.outputs[-1]
    assert bench.sink.text() == "the world" and last.finished and last.outputs[0].finish_reason == "stop"
    assert last.outputs[0].token_ids == [EOS] and last.num_generated_tokens == len(ids("the world")) + 1
    assert bench.processor.num_requests == bench.processor.num_sequences == 0
    assert bench.observer.ended == [("stop", 1, last.num_generated_tokens)]
    assert bench.observer.counted == last.num_generated_tokens and bench.observer.prompt == 1


def test_cumulative_and_final() -> None:
    for kind, count in (("cumulative", 3), ("final", 1)):
        bench = Bench(kind)
        for number, token in enumerate(ids("abcabcabc")):
            bench.send(token, finish_reason="length" if number == 2 else None)
        assert [o.outputs[0].text for o in bench.sink.outputs] == ["abc", "abcabc", "abcabcabc"][-count:]
        assert bench.sink.outputs[0].outputs[0].token_ids == ids("abc") * (1 if count == 3 else 3)


def test_stop_string_across_tokens_aborts_in_the_engine_and_trims() -> None:
    bench = Bench(stop=["wor", "zzz"])
    assert bench.send(*ids("the")) == []
    assert bench.send(*b" w") == []
    assert bench.sink.text() == "the "
    assert bench.send(ord("o")) == []
    news = step(EngineOutput("i_0", [ord("r"), ord("l")]))
    assert bench.processor.process(news) == {"i_0": "stop"}
    last = bench.sink.outputs[-1].outputs[0]
    assert bench.sink.text() == "the " and (last.finish_reason, last.stop_reason) == ("stop", "wor")
    assert last.token_ids == [ord("r")], "tokens after the stop are dropped"
    assert bench.send(ord("x")) == [], "late outputs of an aborted request are ignored"


def test_stop_string_inside_min_tokens_does_not_count() -> None:
    bench = Bench(stop="ab", min_tokens=3)
    bench.send(*b"ab")
    bench.send(*b"xa")
    assert bench.send(ord("b")) == ["i_0"]
    assert bench.sink.text() == "abx"


def test_stop_string_completed_together_with_the_engines_end() -> None:
    bench = Bench(stop="ld")
    assert bench.send(*ids(" world"), finish_reason="length") == []
    assert bench.sink.text() == " wor" and bench.sink.outputs[-1].outputs[0].stop_reason == "ld"


def test_held_text_is_released_at_the_end() -> None:
    bench = Bench(stop="helloX")
    bench.send(*ids("hello"))
    bench.send(EOS, finish_reason="stop")
    assert bench.sink.text() == "hello"


def test_stop_token_text_only_when_included() -> None:
    for include, text in ((False, "ab"), (True, "ab!")):
        bench = Bench(stop_token_ids=[ord("!")], include_stop_str_in_output=include)
        bench.send(*b"ab")
        bench.send(ord("!"), finish_reason="stop", stop_reason=ord("!"))
        assert bench.sink.text() == text and bench.sink.outputs[-1].outputs[0].stop_reason == ord("!")


def test_unfinished_character_at_the_end() -> None:
    bench = Bench()
    bench.send(ord("a"), *"😀".encode()[:3], finish_reason="length")
    assert bench.sink.text() == "a�"


@given(
    st.lists(st.integers(0, 272), min_size=1, max_size=30), st.lists(st.integers(1, 5), max_size=30), st.integers(0, 9)
)
def test_any_grouping_of_tokens_gives_the_same(tokens: list[int], sizes: list[int], min_tokens: int) -> None:
    """Stream equals non-stream, whatever the number of tokens a step."""
    results = []
    for plan in ([len(tokens)], [1] * len(tokens), [*sizes, len(tokens)]):
        bench = Bench(stop=["ab", " w", "\ufffd"], min_tokens=min_tokens, logprobs=0)
        rest = list(tokens)
        for size in plan:
            chunk, rest = rest[:size], rest[size:]
            if chunk and not (bench.sink.outputs and bench.sink.outputs[-1].finished):
                bench.send(*chunk, logprobs=[entry(t, -1.0) for t in chunk], finish_reason=None if rest else "length")
        merged = bench.sink.outputs[0]
        for output in bench.sink.outputs[1:]:
            merged.merge(output)
        results.append(merged.outputs)
    assert results[0] == results[1] == results[2]
    choice = results[0][0]
    assert len(choice.logprobs or []) == len(choice.token_ids) == len(choice.token_texts or [])


def test_several_choices_seeds_and_usage() -> None:
    bench = Bench("final", n=3, seed=2**63 - 1, prompt_logprobs=1)
    requests = bench.engine_requests
    assert [r.request_id for r in requests] == ["i_0", "i_1", "i_2"]
    assert [r.seed for r in requests] == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert [r.params.prompt_logprobs for r in requests] == [1, None, None]
    bench.send(*b"bb", index=1, finish_reason="length")
    bench.send(*b"a", index=0, finish_reason="length", prompt_logprobs=[None], num_cached_tokens=0)
    assert not bench.sink.outputs
    bench.send(*b"ccc", index=2, finish_reason="length")
    (output,) = bench.sink.outputs
    assert [(o.index, o.text) for o in output.outputs] == [(0, "a"), (1, "bb"), (2, "ccc")]
    assert output.num_generated_tokens == 6 and output.prompt_logprobs == [None]


def test_best_of_ranks_by_mean_logprob_and_counts_all() -> None:
    bench = Bench("delta", n=2, best_of=3)
    assert all(r.params.logprobs == 0 for r in bench.engine_requests)
    bench.send(*b"aa", index=0, logprobs=[entry(97, -3.0)] * 2, finish_reason="length")
    bench.send(*b"b", index=1, logprobs=[entry(98, -2.0)], finish_reason="length")
    bench.send(*b"ccc", index=2, logprobs=[entry(99, -1.0)] * 3, finish_reason="length")
    (output,) = bench.sink.outputs
    assert [(o.index, o.text, o.logprobs) for o in output.outputs] == [(0, "ccc", None), (1, "b", None)]
    assert output.num_generated_tokens == 6


def test_logprobs_ranks_and_texts() -> None:
    bench = Bench(logprobs=2)
    smile = "😀".encode()
    bench.send(smile[0], logprobs=[entry(smile[0], -5.0, (97, -0.1), (98, -2.0), rank=9)])
    bench.send(*smile[1:], logprobs=[entry(t, -0.5, (t, -0.5), (97, -1.0)) for t in smile[1:]])
    first, second = (o.outputs[0] for o in bench.sink.outputs)
    position = first.logprobs and first.logprobs[0]
    assert position and position[smile[0]].rank == 9 and [position[t].rank for t in (97, 98)] == [1, 2]
    assert position[smile[0]].decoded_token == "�" and first.token_texts == [""]
    assert second.token_texts == ["", "", "😀"] and second.cumulative_logprob == pytest.approx(-6.5)
    assert second.logprobs and {t: p.rank for t, p in second.logprobs[0].items()} == {smile[1]: 1, 97: 2}


def test_abort_and_failures() -> None:
    bench = Bench(n=2)
    bench.send(ord("a"), index=0, finish_reason="length")
    assert bench.processor.abort(["i", "unknown"]) == ["i_1"]
    assert bench.processor.num_requests == bench.processor.num_sequences == 0
    assert bench.observer.ended == [("abort", 1, 1)]

    bench = Bench(n=2)
    assert bench.send(index=0, finish_reason="error", error="needs 9 blocks") == ["i_1"]
    assert isinstance(bench.sink.errors[0], RequestError) and "9 blocks" in str(bench.sink.errors[0])

    bench = Bench(n=2)
    bench.processor.fail_all(EngineDeadError("gone"))
    assert len(bench.sink.errors) == 1 and bench.processor.num_sequences == 0
