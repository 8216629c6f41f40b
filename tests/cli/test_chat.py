"""`enginecore chat` through a pipe, against a scripted server, and once with a server of its own."""

from __future__ import annotations

import io
from typing import Any

import pytest
from enginecore.cli import chat_session
from enginecore.cli.chat_session import ChatSession
from enginecore.cli.main import main
from rich.console import Console

from tests.cli.stub_server import StubServer


def say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))


def test_turns_system_reset_and_quit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    say(
        monkeypatch,
        "one",
        "",
        "two",
        "/system be brief",
        "three",
        "/reset",
        "/system",
        "four",
        "/help",
        "/quit",
        "never",
    )
    with StubServer(["Hi", " [bold]there[/bold]"]) as stub:
        assert main(["chat", "--url", stub.url, "--max-tokens", "7", "--temperature", "0", "--system", "first"]) == 0
    assert capsys.readouterr().out == "Hi [bold]there[/bold]\n" * 4
    asked = [[(message["role"], message["content"]) for message in body["messages"]] for body in stub.bodies]
    answer = ("assistant", "Hi [bold]there[/bold]")
    assert asked[0] == [("system", "first"), ("user", "one")]
    assert asked[1] == [("system", "first"), ("user", "one"), answer, ("user", "two")]
    assert asked[2][0] == ("system", "be brief") and asked[2][-1] == ("user", "three")
    assert asked[3] == [("user", "four")]
    assert len(asked) == 4
    assert all((body["max_tokens"], body["temperature"], body["model"]) == (7, 0, "stub") for body in stub.bodies)


@pytest.mark.parametrize(
    ("stub", "said"),
    [
        (StubServer([], status=400, message="too long"), "400: too long"),
        (StubServer(["a"], cut=True), "without saying so"),
        (StubServer(["a"], api_key="key"), "fix: give its key with --api-key"),
    ],
)
def test_a_script_gets_the_error(
    stub: StubServer, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(monkeypatch, "hello", "again")
    with stub:
        assert main(["chat", "--url", stub.url]) == 1
    assert said in capsys.readouterr().err
    assert len(stub.bodies) == 1


def test_a_refused_question_is_forgotten() -> None:
    console = Console(file=io.StringIO())
    with StubServer(["a"], status=400) as stub:
        session = ChatSession(stub.url, None, None, {})
        with pytest.raises(chat_session.sse.ServerReplyError):
            session.ask("bad", console)
        assert session.messages == []
        stub.status = 200
        session.ask("good", console)
    assert [message["content"] for message in session.messages] == ["good", "a"]


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def write(console: Any, text: str) -> None:
        shown.append(text)
        if text == "b":
            raise KeyboardInterrupt

    monkeypatch.setattr(chat_session, "_write", write)
    with StubServer(["a", "b", "c"]) as stub:
        session = ChatSession(stub.url, None, None, {})
        session.ask("go", Console(file=io.StringIO()))
    assert [message["content"] for message in session.messages] == ["go", "ab"]
    assert shown == ["a", "b", "\n"]


def test_with_a_server_of_its_own(
    smollm2: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(monkeypatch, "hello")
    line = ["chat", smollm2, "--device", "sim", "--max-model-len", "256", "--num-blocks", "32", "--max-tokens", "4"]
    assert main(line) == 0
    assert capsys.readouterr().out.strip()
