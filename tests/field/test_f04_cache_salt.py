"""F04: the prefix cache tells nobody what another tenant has sent: a salt isolates every block."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.field.support import CHAT, COMPLETIONS, baseline, refused, scripted, token_prompt, unharmed
from tests.serving import ServerProcess

PROMPT = token_prompt(404, 200)
MESSAGES = [{"role": "user", "content": "Tell me about the lighthouse. " * 20}]


def _cached(server: ServerProcess, path: str, **fields: Any) -> int:
    answer = server.post(path, {"temperature": 0, "max_tokens": 2, **fields})
    assert answer.status_code == 200, answer.text
    count: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, {"prompt": PROMPT}), (CHAT, {"messages": MESSAGES})])
def test_hits_only_under_the_same_salt(sim_server: ServerProcess, path: str, prompt: dict[str, Any]) -> None:
    a, b = {"cache_salt": uuid.uuid4().hex}, {"cache_salt": uuid.uuid4().hex}
    assert _cached(sim_server, path, **prompt, **a) == 0
    assert _cached(sim_server, path, **prompt, **a) > 100
    assert _cached(sim_server, path, **prompt, **b) == 0
    assert _cached(sim_server, path, **prompt) < 32  # what all chats begin with may be there from another test
    assert _cached(sim_server, path, **prompt) > 100
    assert _cached(sim_server, path, **prompt, cache_salt=uuid.uuid4().hex) == 0
    baseline(sim_server)


def test_every_block_is_isolated(sim_server: ServerProcess) -> None:
    """Blocks in the middle do not meet either, and a hit of a part of the prompt is a hit of that part."""
    salt = {"cache_salt": uuid.uuid4().hex}
    prompt = token_prompt(444, 200)
    _cached(sim_server, COMPLETIONS, prompt=prompt)
    _cached(sim_server, COMPLETIONS, prompt=[*prompt[:64], 9], **salt)
    assert _cached(sim_server, COMPLETIONS, prompt=prompt, **salt) == 64
    assert _cached(sim_server, COMPLETIONS, prompt=prompt[16:]) == 0, "position counts: no block by its tokens alone"
    answer = sim_server.complete(prompt=prompt, **salt, return_token_ids=True, ignore_eos=True)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    assert answer["choices"][0]["token_ids"] == scripted(prompt, 5)


def test_no_salt_reads_as_framing(sim_server: ServerProcess) -> None:
    """Salts that begin like one another, or like what the hash puts in front, stay apart."""
    prompt = token_prompt(445, 40)
    for salt in ("s", "s1", "salt", "lora", "s\x00", "\x00", "é", "\u0065\u0301"):
        assert _cached(sim_server, COMPLETIONS, prompt=prompt, cache_salt=salt) == 0
        assert _cached(sim_server, COMPLETIONS, prompt=prompt, cache_salt=salt) == 32
    baseline(sim_server)


@pytest.mark.parametrize("salt", ["", 5, True, 1.5, ["a"], {"a": "b"}, "x" * 100_000])
def test_bad_salts(sim_server: ServerProcess, salt: Any) -> None:
    with unharmed(sim_server):
        for path, prompt in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": MESSAGES})):
            refused(sim_server.post(path, {**prompt, "cache_salt": salt}), 400, "cache_salt")


def test_a_request_may_leave_the_cache_unread(sim_server: ServerProcess) -> None:
    """It computes its whole prompt, whose blocks others may reuse."""
    prompt, skip = token_prompt(446, 100), {"skip_reading_prefix_cache": True}
    assert _cached(sim_server, COMPLETIONS, prompt=prompt, **skip) == 0
    assert _cached(sim_server, COMPLETIONS, prompt=prompt, **skip) == 0
    assert _cached(sim_server, COMPLETIONS, prompt=prompt, skip_reading_prefix_cache=False) == 96
    assert _cached(sim_server, CHAT, messages=MESSAGES, **skip) == 0
    answer = sim_server.complete(prompt=prompt, n=3, **skip, return_token_ids=True, ignore_eos=True)
    assert [choice["token_ids"] for choice in answer["choices"]] == [scripted(prompt, 5)] * 3
    with unharmed(sim_server):
        for value in ("yes", 1, [True]):
            body = {"prompt": prompt, "skip_reading_prefix_cache": value}
            refused(sim_server.post(COMPLETIONS, body), 400, "skip_reading_prefix_cache")


def test_only_an_operator_resets_the_cache(sim_server: ServerProcess) -> None:
    """This server has no keys, so nobody is one."""
    prompt = token_prompt(447, 40)
    _cached(sim_server, COMPLETIONS, prompt=prompt)
    refused(sim_server.post("/reset_prefix_cache", {}), 403)
    assert _cached(sim_server, COMPLETIONS, prompt=prompt) == 32
