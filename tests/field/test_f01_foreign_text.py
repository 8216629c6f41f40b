"""F01: under concurrency, hang-ups and preemption every answer is its own."""

from __future__ import annotations

import functools
import random
import re

import pytest

from tests.field.support import COMPLETIONS, Solo, baseline, counter, cut_stream, scripted, together, token_prompt
from tests.serving import ServerProcess

THREADS, ROUNDS = 16, 3


def _mark(index: int) -> str:
    return f"MARK{index * 37 + 101}"


def _prompt(index: int) -> str:
    return f"The code word is {_mark(index)}. Repeat the code word: {_mark(index)}. The code word is"


def test_answers_equal_their_solo_runs(server: ServerProcess, solo: Solo) -> None:
    """The real model: greedy text as alone, and nobody else's marker in it."""
    alone = [solo.text(_prompt(index), 10) for index in range(THREADS)]
    assert sum(_mark(index) in text for index, text in enumerate(alone)) > THREADS // 2, "the model does repeat markers"

    def ask(index: int, hang_up: bool) -> str:
        body = {"prompt": _prompt(index), "max_tokens": 10, "temperature": 0}
        if hang_up:
            return cut_stream(server, COMPLETIONS, body, chunks=2)
        text: str = server.complete(**body)["choices"][0]["text"]
        return text

    for turn in range(ROUNDS):
        cut = [(index + turn) % 3 == 0 for index in range(THREADS)]
        texts = together([functools.partial(ask, index, cut[index]) for index in range(THREADS)])
        for index, text in enumerate(texts):
            assert alone[index].startswith(text) if cut[index] else text == alone[index]
            whole = text.rpartition("MARK")[0] if cut[index] else text  # an event may end within a marker
            assert set(re.findall(r"MARK\d+", whole)) <= set(re.findall(r"MARK\d+", alone[index]))
    assert counter(server, "prefix_cache_hits_total") > 0, "rounds after the first meet cached blocks"
    baseline(server)


@pytest.mark.parametrize("kind", ["sim_server", "tiny_server", "tiny_priority_server"])
def test_answers_are_the_scripted_ones(kind: str, request: pytest.FixtureRequest) -> None:
    """The simulated device: a block read by its next owner, or a foreign one, would change every later token."""
    server: ServerProcess = request.getfixturevalue(kind)
    chance = random.Random(kind)
    prompts = [token_prompt(index, chance.randrange(20, 60)) for index in range(THREADS)]
    prompts[1] = prompts[0][:40]  # shares blocks, then goes its own way
    preemptions = counter(server, "num_preemptions_total")

    def ask(index: int, hang_up: bool) -> None:
        body = {"prompt": prompts[index], "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        if hang_up:
            cut_stream(server, COMPLETIONS, body, chunks=2)
        else:
            answer = server.complete(**body, return_token_ids=True)
            assert answer["choices"][0]["token_ids"] == scripted(prompts[index], 40)

    for turn in range(ROUNDS):
        together([functools.partial(ask, index, (index + turn) % 3 == 0) for index in range(THREADS)])
    baseline(server)
    if kind != "sim_server":
        assert counter(server, "num_preemptions_total") > preemptions, "the pool was small enough to preempt"
