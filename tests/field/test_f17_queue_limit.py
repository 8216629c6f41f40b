"""F17: the queue has a limit, counted in sequences. What is beyond it is refused at once, the rest finishes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.field.support import (
    CHAT,
    COMPLETIONS,
    ONE_THREAD,
    InFlight,
    baseline,
    gauges,
    live,
    refused,
    scripted,
    together,
    token_prompt,
    wait_until,
)
from tests.serving import ServerProcess

RUNNING, WAITING = 2, 4
ROOM = RUNNING + WAITING


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    log: Path = tmp_path_factory.mktemp("narrow") / "log"
    limits = ("--max-num-seqs", str(RUNNING), "--max-waiting", str(WAITING))
    options = ("--max-model-len", "1024", "--num-blocks", "256", "--device-option", "step_time_s=0.01")
    with ServerProcess(*options, *limits, device="sim", log=log, env=ONE_THREAD) as running:
        yield running


def _ask(server: ServerProcess, prompt: Any, tokens: int, **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return server.post(COMPLETIONS, {**body, **fields})


def _full(answer: httpx.Response) -> None:
    assert answer.status_code in (429, 503)
    error = refused(answer, answer.status_code)
    assert error["code"] == "queue_full" and int(answer.headers["retry-after"]) > 0


def test_exactly_the_surplus_is_refused(narrow: ServerProcess) -> None:
    prompts = [token_prompt(1700 + index, 10) for index in range(20)]
    answers = together([functools.partial(_ask, narrow, prompt, 120) for prompt in prompts])
    accepted = [index for index, answer in enumerate(answers) if answer.status_code == 200]
    assert len(accepted) == ROOM
    for index, answer in enumerate(answers):
        if index in accepted:
            assert answer.json()["choices"][0]["token_ids"] == scripted(prompts[index], 120)
        else:
            _full(answer)
    live(narrow)
    baseline(narrow)
    again = together([functools.partial(_ask, narrow, prompt, 5) for prompt in prompts[:ROOM]])
    assert [answer.status_code for answer in again] == [200] * ROOM


def test_sequences_count_not_requests(narrow: ServerProcess) -> None:
    """n=4 is four, three prompts are three, best_of counts as n does. Nothing is half accepted."""
    blocker = functools.partial(_ask, narrow, token_prompt(1750, 10), 200, n=3)
    with InFlight([blocker]):
        wait_until(lambda: sum(gauges(narrow)[:2]) == 3, "three are in")
        _full(_ask(narrow, token_prompt(1751, 10), 5, n=4))
        _full(_ask(narrow, [[5], [6], [7], [8]], 5))
        _full(_ask(narrow, [[5], [6]], 5, n=2))
        _full(_ask(narrow, [5], 5, best_of=4))
        _full(narrow.post(CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "n": 4}))
        _full(_ask(narrow, [5], 5, n=4, stream=True))
        assert sum(gauges(narrow)[:2]) == 3
        assert _ask(narrow, [[5], [6], [7]], 5).status_code == 200
    _full(_ask(narrow, [5], 5, n=ROOM + 1))
    baseline(narrow)


def test_hanging_up_makes_room(narrow: ServerProcess) -> None:
    prompts = [token_prompt(1760 + index, 10) for index in range(ROOM)]

    def give_up(prompt: list[int]) -> None:
        with pytest.raises(httpx.ReadTimeout):
            narrow.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 900, "ignore_eos": True}, timeout=2)

    with InFlight([functools.partial(give_up, prompt) for prompt in prompts]):
        wait_until(lambda: sum(gauges(narrow)[:2]) == ROOM, "all are in")
        _full(_ask(narrow, [5], 5))
    baseline(narrow)
    answers = together([functools.partial(_ask, narrow, prompt, 5) for prompt in prompts])
    assert [answer.status_code for answer in answers] == [200] * ROOM
    baseline(narrow)


def test_refused_requests_cost_no_room(narrow: ServerProcess) -> None:
    for _ in range(2 * ROOM):
        refused(_ask(narrow, [5], 5, temperature=-1), 400, "temperature")
        refused(_ask(narrow, [], 5), 400, "prompt")
    assert _ask(narrow, [[5]] * ROOM, 5).status_code == 200
    baseline(narrow)
