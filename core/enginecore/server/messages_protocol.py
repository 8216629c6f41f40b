"""The bodies of Anthropic's Messages API, as schemas."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from enginecore.server.turn import EXTRA_FIELDS


class MessageInput(msgspec.Struct):
    """One message: `content` is text or a list of blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Any]


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """The body of /v1/messages/count_tokens."""

    model: str
    messages: list[MessageInput]
    system: str | list[Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body of /v1/messages. The fields named in `turn.EXTRA_FIELDS` are taken as for a chat."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None


KNOWN_COUNT = frozenset(CountTokensRequest.__struct_fields__)
KNOWN_MESSAGES = frozenset(MessagesRequest.__struct_fields__) | frozenset(EXTRA_FIELDS)

#: Field -> values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": (),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "user_profile_id": (),
    "workspace_id": (),
    "chat_template": (),
    "n": (1,),
}
