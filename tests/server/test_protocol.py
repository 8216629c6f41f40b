from __future__ import annotations

from pathlib import Path

from enginecore.server import protocol
from enginecore.server.protocol import ChatRequest, CompletionRequest, field_names

PAGE = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()


def test_every_field_is_documented() -> None:
    fields = field_names(ChatRequest) | field_names(CompletionRequest)
    unsupported = set(protocol.UNSUPPORTED_CHAT) | set(protocol.UNSUPPORTED_COMPLETION)
    names = {"guided_*" if name.startswith("guided_") else name for name in fields | unsupported}
    assert [name for name in sorted(names) if name != "model" and f"`{name}`" not in PAGE] == []


def test_nothing_is_both_supported_and_refused() -> None:
    assert not field_names(ChatRequest) & set(protocol.UNSUPPORTED_CHAT)
    assert not field_names(CompletionRequest) & set(protocol.UNSUPPORTED_COMPLETION)
    assert not field_names(protocol.TokenizeRequest) & set(protocol.UNSUPPORTED_TOKENIZE)
