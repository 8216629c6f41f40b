"""The body of OpenAI's Responses API, as a schema.

Accepted without effect: include (but for message.output_text.logprobs), max_tool_calls, reasoning.summary (reasoning is
given as it is), stream_options, user, safety_identifier, prompt_cache_key.
"""

from __future__ import annotations

from typing import Any

import msgspec

from enginecore.server.turn import EXTRA_FIELDS


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/responses. The fields named in `turn.EXTRA_FIELDS` are taken as for a chat."""

    input: str | list[Any] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool = False
    store: bool = True
    background: bool = False
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: str = "disabled"
    metadata: dict[str, str] | None = None
    stream_options: dict[str, Any] | None = None
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


KNOWN_RESPONSES = frozenset(ResponsesRequest.__struct_fields__) | frozenset(EXTRA_FIELDS)

#: Field -> values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "access_programs": (),
    "background_options": (),
    "chat_template": (),
    "context_management": ([],),
    "conversation": (),
    "image": (),
    "moderation": (),
    "n": (1,),
    "prompt": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": ("in_memory",),
    "messages": (),
}
