"""F09: integers of any size and values of any type give an answer or a 400 that names the field."""

from __future__ import annotations

from typing import Any

import pytest
from enginecore.server.protocol import (
    UNSUPPORTED_CHAT,
    UNSUPPORTED_COMPLETION,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

from tests.field.support import CHAT, COMPLETIONS, DETOKENIZE, TOKENIZE, post_raw, refused, unharmed
from tests.serving import ServerProcess

#: As written in JSON: 10^400 is no number that a parser must know.
HUGE = [str(2**31), str(2**63), str(2**64), "1" + "0" * 400, "-1" + "0" * 400, str(-(2**63) - 1)]
WRONG_TYPES = ["true", "1.5", '"5"', "[1]", '{"a": 1}']
FIELDS = ["n", "max_tokens", "min_tokens", "top_k", "seed", "priority", "prompt_logprobs", "truncate_prompt_tokens"]
#: Values that are right after all: a seed is 64 bits wide, and truncating to more than there is changes nothing.
FINE = {("seed", HUGE[0]), ("truncate_prompt_tokens", HUGE[0])}


def _body(path: str, field: str, value: str) -> bytes:
    prompt = '"prompt": "a"' if path == COMPLETIONS else '"messages": [{"role": "user", "content": "a"}]'
    other = "max_tokens" if field == "max_completion_tokens" else "max_completion_tokens"
    limit = f', "{other if path == CHAT else "max_tokens"}": 2' if path == CHAT or field != "max_tokens" else ""
    return f'{{{prompt}{limit}, "{field}": {value}}}'.encode()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_every_field(sim_server: ServerProcess, path: str) -> None:
    more = ["logprobs", "best_of"] if path == COMPLETIONS else ["top_logprobs", "max_completion_tokens"]
    with unharmed(sim_server):
        for field in [*FIELDS, *more]:
            for value in [*HUGE, *WRONG_TYPES]:
                answer = post_raw(sim_server, path, _body(path, field, value))
                if answer.status_code == 200 and (field, value) in FINE:
                    continue
                error = refused(answer)
                # 10^400 is refused by the parser, which does not know fields.
                assert error["param"] == field or (error["param"] is None and len(value) > 20), (field, value, error)
            assert post_raw(sim_server, path, _body(path, field, "null")).status_code == 200, field


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_extreme_seeds_are_reproducible(sim_server: ServerProcess, seed: int) -> None:
    body: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 5, "seed": seed, "n": 2}
    first, second = (sim_server.complete(**body, return_token_ids=True)["choices"] for _ in range(2))
    assert first == second
    other = sim_server.complete(**{**body, "seed": 12345}, return_token_ids=True)["choices"]
    assert [choice["token_ids"] for choice in other] != [choice["token_ids"] for choice in first]


def test_numbers_that_do_not_fit_are_not_echoed(sim_server: ServerProcess) -> None:
    answer = post_raw(sim_server, COMPLETIONS, b'{"prompt": "a", "n": ' + b"7" * 100_000 + b"}")
    assert len(refused(answer)["message"]) < 500


ROUTES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    COMPLETIONS: (CompletionRequest, UNSUPPORTED_COMPLETION, {"prompt": "a"}),
    CHAT: (ChatRequest, UNSUPPORTED_CHAT, {"messages": [{"role": "user", "content": "a"}]}),
    TOKENIZE: (TokenizeRequest, {}, {"prompt": "a"}),
    DETOKENIZE: (DetokenizeRequest, {}, {"tokens": [1]}),
}
ANYTHING: list[Any] = [
    True, 0, -1, 1.5, "", "5", "\x00", [], [None], [True], [1.5], [""], [[]], [[[1]]], [{}], {}, {"a": None},
    {"1": "a"}, [1, "a"], [[1], ["a"]], [[1], []], {"include_usage": "x"}, [{"role": "user"}],
    [{"role": "user", "content": 5}], [{"role": "assistant", "tool_calls": [{}]}],
    [{"type": "function", "function": None}],
]  # fmt: skip


@pytest.mark.parametrize("path", ROUTES)
def test_any_value_in_any_field(sim_server: ServerProcess, path: str) -> None:
    """An answer, or a 400 that names the field (404 for a model): never a 500, never a 400 that does not say what."""
    schema, unsupported, good = ROUTES[path]
    limit = {"max_tokens": 2} if path in (COMPLETIONS, CHAT) else {}
    with unharmed(sim_server):
        for field in [*schema.__struct_fields__, *unsupported]:
            for value in ANYTHING:
                answer = sim_server.post(path, {**good, **limit, field: value})
                if answer.status_code == 400:
                    assert refused(answer)["param"], (field, value, answer.text)
                else:
                    assert answer.status_code == (404 if field == "model" else 200), (field, value, answer.text)
