"""F25: a bad word never appears, however it is spelled in tokens."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from tests.field.answers import both, text, tokens_of
from tests.field.support import CHAT, COMPLETIONS, refused, together, unharmed
from tests.serving import ServerProcess

STORY: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 16}


def test_each_word_of_the_greedy_answer_can_be_banned(server: ServerProcess) -> None:
    plain = text(server.complete(**STORY))
    words = list(dict.fromkeys(re.findall(r"\w{4,}", plain)))
    assert len(words) >= 4
    answers = together([functools.partial(both, server, **STORY, bad_words=[word]) for word in words])
    for word, answer in zip(words, answers, strict=True):
        assert word not in text(answer) and text(answer) != plain, (word, answer)
    kept = text(both(server, **STORY, bad_words=[",", *words]))
    assert not any(word in kept for word in (",", *words)), "the first token included"


def test_several_tokens_and_the_first_token(server: ServerProcess) -> None:
    body: dict[str, Any] = {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 6}
    assert text(server.complete(**body)).startswith(" Paris")
    assert "Paris" not in text(both(server, **body, bad_words=["Paris"]))
    plain = text(server.complete(**STORY))
    phrase = " ".join(plain.split(" ")[1:4])
    assert len(tokens_of(server, phrase)) > 2
    kept = text(both(server, **STORY, bad_words=[phrase]))
    assert phrase not in kept
    assert kept.startswith(plain[: plain.index(phrase.rsplit(" ", 1)[1])]), "only the end of the phrase is avoided"


def test_with_allowed_ids(server: ServerProcess) -> None:
    one, other = tokens_of(server, " one"), tokens_of(server, " two")
    assert len(one) == len(other) == 1
    allowed = {"allowed_token_ids": [*one, *other], "max_tokens": 4}
    answer = both(server, **{**STORY, **allowed}, bad_words=["two"])
    assert text(answer) == " one" * 4
    with unharmed(server):
        for stream in (False, True):
            body = {**STORY, **allowed, "bad_words": ["one", "two"], "stream": stream}
            error = refused(server.post(COMPLETIONS, body))
            assert "no token is left" in error["message"]


@pytest.mark.parametrize("words", [[""], [" "], ["\n\t"], ["fine", ""], "word", [5], [None]])
def test_invalid_entries(server: ServerProcess, words: Any) -> None:
    for path, content in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
        error = refused(server.post(path, {**content, "bad_words": words}))
        assert error["param"].startswith("bad_words")
