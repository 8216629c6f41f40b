"""From Anthropic's messages to a chat's. Every refusal names the place, as in `messages[2].content[0].type`.

- `system`, a text or text blocks, becomes a system message in front.
- Messages of one role that follow each other are one turn, as at Anthropic.
- `tool_use` blocks become tool calls, `tool_result` blocks messages of the role tool, `thinking` blocks the reasoning
  of the assistant's turn; `redacted_thinking` says nothing to a model here and is left out. Documents of plain text
  become text.
- A last message of the assistant's is a prefill: the answer goes on from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from enginecore.errors import ParameterError
from enginecore.frontend.messages import PART_SEPARATOR
from enginecore.server.messages_protocol import CountTokensRequest, MessagesRequest

#: Seconds that a cached prefix stays pinned, by the `ttl` of a cache_control.
TTL_SECONDS = {"5m": 300, "1h": 3600}
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """Where a cache_control stands: behind the first `chars` characters of the content of chat message `index`."""

    index: int
    chars: int
    ttl: str


@dataclass(slots=True)
class Conversation:
    """Chat messages, and the last cache_control in them (which covers the earlier ones)."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    breakpoint: Breakpoint | None = None

    def add(self, role: str, text: str, ttl: str | None = None, *, extend: bool = True, **members: Any) -> None:
        """Say something: in the last message when that is one of the same role, and `extend`."""
        last = self.messages[-1] if self.messages else None
        if last is None or not extend or last["role"] != role:
            last = {"role": role, "content": text, **members}
            self.messages.append(last)
        elif text:
            last["content"] += (PART_SEPARATOR if last["content"] else "") + text
        self.mark(ttl)

    def mark(self, ttl: str | None) -> None:
        if ttl is not None:
            self.breakpoint = Breakpoint(len(self.messages) - 1, len(self.messages[-1]["content"]), ttl)


def convert_conversation(body: CountTokensRequest) -> Conversation:
    """The conversation as chat messages. Raises ParameterError."""
    if not body.messages:
        raise ParameterError("messages must hold at least one message", param="messages")
    chat = Conversation()
    tools_ttl = _last_ttl(body.tools or [], "tools")
    if body.system is not None:
        for text, ttl in _texts(body.system, "system"):
            chat.add("system", text, ttl)
    if tools_ttl is not None and chat.breakpoint is None and chat.messages:
        chat.mark(tools_ttl)  # templates show tools in front of the conversation or in its system message
    for index, message in enumerate(body.messages):
        where = f"messages[{index}].content"
        blocks = message.content if isinstance(message.content, list) else [{"type": "text", "text": message.content}]
        if not blocks and not (message.role == "assistant" and index == len(body.messages) - 1):
            raise ParameterError(f"{where} must not be empty", param=where)
        for number, block in enumerate(blocks):
            _add_block(chat, message.role, block, f"{where}[{number}]" if blocks is message.content else where)
    ttl = _ttl({"cache_control": body.cache_control}, "")
    if ttl is not None and chat.messages:
        chat.mark(ttl)
    return chat


def is_prefill(chat: Conversation) -> bool:
    """Whether the answer goes on from the last message."""
    last = chat.messages[-1]
    return last["role"] == "assistant" and not last.get("tool_calls")


def _add_block(chat: Conversation, role: str, block: Any, where: str) -> None:
    if not isinstance(block, dict):
        raise ParameterError(f"{where} must be an object", param=where)
    kind = block.get("type")
    ttl = _ttl(block, where)
    if kind in ("text", "document", "search_result"):
        chat.add(role, _block_text(block, where), ttl)
    elif role == "user" and kind == "tool_result":
        text = PART_SEPARATOR.join(t for t, _ in _texts(block.get("content") or "", f"{where}.content"))
        if block.get("is_error"):
            text = f"Error: {text}" if text else "Error"
        chat.add("tool", text, ttl, extend=False, tool_call_id=_string(block, "tool_use_id", where))
    elif role == "assistant" and kind == "tool_use":
        given = block.get("input")
        if not isinstance(given, dict):
            raise ParameterError(f"{where}.input must be an object", param=f"{where}.input")
        function = {"name": _string(block, "name", where), "arguments": given}
        call = {"id": _string(block, "id", where), "type": "function", "function": function}
        chat.add(role, "")
        chat.messages[-1].setdefault("tool_calls", []).append(call)
        chat.mark(ttl)
    elif role == "assistant" and kind == "thinking":
        thought = _string(block, "thinking", where, empty=True)
        chat.add(role, "")
        last = chat.messages[-1]
        last["reasoning_content"] = PART_SEPARATOR.join(filter(None, (last.get("reasoning_content"), thought)))
    elif role == "assistant" and kind == "redacted_thinking":
        chat.add(role, "")
    else:
        shown = repr(kind[:64]) if isinstance(kind, str) else "no type"
        told = f"{where}: blocks of type {shown} are not supported in a message of the role {role}"
        raise ParameterError(told, param=f"{where}.type")


def _block_text(block: dict[str, Any], where: str) -> str:
    """What a block of words says."""
    kind = block["type"]
    if kind == "text":
        return _string(block, "text", where, empty=True)
    if kind == "search_result":
        head = [_string(block, "title", where), _string(block, "source", where)]
        return PART_SEPARATOR.join([*head, *(text for text, _ in _texts(block.get("content"), f"{where}.content"))])
    source = block.get("source")
    media = source.get("type") if isinstance(source, dict) else None
    if not isinstance(source, dict) or media not in ("text", "content"):
        raise ParameterError(f"{where}.source: only documents of plain text are supported", param=f"{where}.source")
    if media == "text":
        body = _string(source, "data", f"{where}.source")
    else:
        body = PART_SEPARATOR.join(text for text, _ in _texts(source.get("content"), f"{where}.source.content"))
    head = [block[name] for name in ("title", "context") if isinstance(block.get(name), str)]
    return PART_SEPARATOR.join([*head, body])


def _texts(content: Any, where: str) -> list[tuple[str, str | None]]:
    """A text or text blocks, as (text, ttl of its cache_control) each."""
    if isinstance(content, str):
        return [(content, None)]
    if not isinstance(content, list):
        raise ParameterError(f"{where} must be a string or a list of blocks", param=where)
    result = []
    for index, block in enumerate(content):
        place = f"{where}[{index}]"
        if not isinstance(block, dict) or block.get("type") not in ("text", "document", "search_result"):
            raise ParameterError(f"{place} must be a block of text", param=f"{place}.type")
        result.append((_block_text(block, place), _ttl(block, place)))
    return result


def _string(block: dict[str, Any], name: str, where: str, *, empty: bool = False) -> str:
    value = block.get(name)
    if not isinstance(value, str) or not (value or empty):
        raise ParameterError(f"{where}.{name} must be a {'' if empty else 'non-empty '}string", param=f"{where}.{name}")
    return value


def _ttl(holder: dict[str, Any], where: str) -> str | None:
    """The ttl of a cache_control, None without one."""
    control = holder.get("cache_control")
    if control is None:
        return None
    place = f"{where}.cache_control" if where else "cache_control"
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        raise ParameterError(f'{place} must be {{"type": "ephemeral"}}', param=place)
    ttl = control.get("ttl", "5m")
    if not isinstance(ttl, str) or ttl not in TTL_SECONDS:
        raise ParameterError(f'{place}.ttl must be "5m" or "1h"', param=f"{place}.ttl")
    return ttl


def _last_ttl(tools: list[dict[str, Any]], where: str) -> str | None:
    found = [_ttl(tool, f"{where}[{index}]") for index, tool in enumerate(tools)]
    return next((ttl for ttl in reversed(found) if ttl is not None), None)


def convert_tools(body: CountTokensRequest) -> dict[str, Any]:
    """`tools`, `tool_choice` and `parallel_tool_calls` of a chat."""
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or [])]
    choice = body.tool_choice or {}
    kind = choice.get("type", "auto")
    known = {"auto": "auto", "any": "required", "none": "none"}
    chat: dict[str, Any] = {"tools": tools or None}
    if kind == "tool":
        name = _string(choice, "name", "tool_choice")
        chat["tool_choice"] = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in known:
        chat["tool_choice"] = known[kind] if tools else None
        if kind == "any" and not tools:
            raise ParameterError('tool_choice "any" needs tools', param="tool_choice")
    else:
        raise ParameterError("tool_choice.type must be auto, any, tool or none", param="tool_choice.type")
    parallel = choice.get("disable_parallel_tool_use", False)
    if not isinstance(parallel, bool):
        told = "tool_choice.disable_parallel_tool_use must be true or false"
        raise ParameterError(told, param="tool_choice.disable_parallel_tool_use")
    if parallel:
        chat["parallel_tool_calls"] = False
    return chat


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        shown = str(tool["type"])[:64]
        raise ParameterError(f"{where}: tools of type {shown!r} are not supported", param=f"{where}.type")
    function: dict[str, Any] = {"name": _string(tool, "name", where)}
    if tool.get("description") is not None:
        function["description"] = _string(tool, "description", where, empty=True)
    if not isinstance(tool.get("input_schema"), dict):
        raise ParameterError(f"{where}.input_schema must be an object", param=f"{where}.input_schema")
    function["parameters"] = tool["input_schema"]
    return {"type": "function", "function": function}


def convert_settings(body: CountTokensRequest) -> dict[str, Any]:
    """What else a chat has other names for: thinking, effort, the format of the answer, stop sequences."""
    chat: dict[str, Any] = {}
    kwargs = dict(body.chat_template_kwargs or {})
    thinking = body.thinking or {}
    kind = thinking.get("type")
    if body.thinking is not None and kind not in ("enabled", "disabled", "adaptive", "between_tools"):
        raise ParameterError("thinking.type must be enabled, disabled or adaptive", param="thinking.type")
    if kind in ("enabled", "disabled"):
        kwargs.setdefault("enable_thinking", kind == "enabled")
        chat["thinking_token_budget"] = thinking.get("budget_tokens") if kind == "enabled" else 0
    budget = thinking.get("budget_tokens")
    if kind == "enabled" and (type(budget) is not int or budget < 1):
        raise ParameterError("thinking.budget_tokens must be a positive integer", param="thinking.budget_tokens")
    config = body.output_config or {}
    if config.get("effort") is not None:
        effort = _EFFORTS.get(str(config["effort"]))
        if effort is None:
            raise ParameterError("output_config.effort must be low, medium, high or max", param="output_config.effort")
        chat["reasoning_effort"] = effort
    form = config.get("format")
    if form is not None:
        if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
            told = 'output_config.format must be {"type": "json_schema", "schema": {...}}'
            raise ParameterError(told, param="output_config.format")
        chat["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": form["schema"], "strict": True},
        }
    if kwargs:
        chat["chat_template_kwargs"] = kwargs
    if isinstance(body, MessagesRequest):
        chat |= {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences or None,
            "temperature": body.temperature,
            "top_k": body.top_k,
            "top_p": body.top_p,
            "stream": body.stream,
        }
    return chat
