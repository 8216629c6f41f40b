"""F05: a request brings no template, and the operator's template runs in a sandbox, in bounds, away from the loop."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.field.support import CHAT, COMPLETIONS, ONE_THREAD, TOKENIZE, InFlight, live, refused, unharmed
from tests.serving import SMALL, ServerProcess

LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}"
USER = [{"role": "user", "content": "hi"}]

#: What a hostile or careless template might do, chosen by the first message.
HOSTILE = """{% set what = messages[0]['content'] %}
{%- if what == 'walk' %}{{ ''.__class__.__mro__[1].__subclasses__() }}
{%- elif what == 'globals' %}{{ raise_exception.__globals__['__builtins__']['open'](SENTINEL, 'w') }}
{%- elif what == 'attr' %}{{ ''|attr('__class__') }}
{%- elif what == 'format' %}{{ '{0.__class__.__mro__}'.format('') }}
{%- elif what == 'mutate' %}{{ messages.append(1) }}
{%- elif what == 'refuse' %}{{ raise_exception('only users here') }}
{%- elif what == 'divide' %}{{ 1 // 0 }}
{%- elif what == 'memory' %}{{ 'x' * 10000000000 }}
{%- elif what == 'undefined' %}{{ nothing.at.all }}
{%- elif what == 'loop' %}""" + LOOP + "{%- else %}{{ what }}:{% endif %}"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("hostile")
    template = folder / "template.jinja"
    template.write_text(HOSTILE.replace("SENTINEL", repr(str(folder / "sentinel"))))
    options = (*SMALL, "--chat-template", str(template))
    with ServerProcess(*options, device="sim", log=folder / "log", env=ONE_THREAD) as running:
        yield running


def _bodies(path: str) -> dict[str, Any]:
    return {"prompt": "hi"} if path == COMPLETIONS else {"messages": USER}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, TOKENIZE])
@pytest.mark.parametrize("template", [LOOP, "", "{{ messages }}"])
def test_no_template_in_the_body(sim_server: ServerProcess, path: str, template: str) -> None:
    with unharmed(sim_server):
        refused(sim_server.post(path, {**_bodies(path), "chat_template": template}), 400, "chat_template")


@pytest.mark.parametrize(
    "name",
    [
        "chat_template", "tokenize", "messages", "tools", "conversation", "add_generation_prompt", "bos_token",
        "raise_exception", "strftime_now", "__class__", "self", "not an identifier",
    ],
)  # fmt: skip
def test_no_render_arguments_in_kwargs(sim_server: ServerProcess, name: str) -> None:
    with unharmed(sim_server):
        for path in (CHAT, TOKENIZE):
            body = {**_bodies(path), "chat_template_kwargs": {name: LOOP}}
            refused(sim_server.post(path, body), 400, f"chat_template_kwargs.{name}")


@pytest.mark.parametrize("kwargs", [[], "x", 1, True])
def test_kwargs_must_be_an_object(sim_server: ServerProcess, kwargs: Any) -> None:
    refused(sim_server.post(CHAT, {"messages": USER, "chat_template_kwargs": kwargs}), 400, "chat_template_kwargs")


def test_switches_of_the_template_itself_pass(sim_server: ServerProcess) -> None:
    answer = sim_server.post(
        CHAT, {"messages": USER, "max_tokens": 1, "chat_template_kwargs": {"enable_thinking": False}}
    )
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("what", ["walk", "globals", "format", "mutate", "refuse", "divide", "memory"])
def test_a_template_that_misbehaves_is_a_400(hostile: ServerProcess, what: str) -> None:
    with unharmed(hostile):
        for path in (CHAT, TOKENIZE):
            error = refused(hostile.post(path, {"messages": [{"role": "user", "content": what}]}), 400, "messages")
            assert "<class" not in error["message"]
    assert not (Path(hostile.log).parent / "sentinel").exists()
    if what == "refuse":
        assert "only users here" in error["message"], "the template's own words"


def test_an_attribute_that_the_sandbox_hides_is_nothing(hostile: ServerProcess) -> None:
    answer = hostile.post(TOKENIZE, {"messages": [{"role": "user", "content": "attr"}]})
    assert answer.status_code == 200 and answer.json()["tokens"] == []


def test_an_endless_template_ends_and_blocks_nobody(hostile: ServerProcess) -> None:
    """Two at once, and everything else goes on meanwhile: /health, chats with the same template, completions."""
    gaps = []

    def endless() -> None:
        error = refused(hostile.post(CHAT, {"messages": [{"role": "user", "content": "loop"}]}), 400, "messages")
        assert "took longer" in error["message"]

    with unharmed(hostile), InFlight([endless]):
        end = time.monotonic() + 4
        while time.monotonic() < end:
            start = time.monotonic()
            assert hostile.http.get("/health").status_code == 200
            gaps.append(time.monotonic() - start)
            time.sleep(0.05)
        live(hostile)
        answer = hostile.post(CHAT, {"messages": USER, "max_tokens": 2})
        assert answer.status_code == 200, answer.text
    assert sorted(gaps)[len(gaps) * 9 // 10] < 1.0, "nine of ten polls, on a machine that may be busy"
