"""Chat messages as clients send them, to what templates expect. Every refusal names the field, as in
`messages[2].role`.

- Roles: system, developer, user, assistant, tool.
- Content is text or a list of text parts; parts are joined with a newline. A missing or null content is "" where
  allowed.
- `tool_calls[].function.arguments`, a JSON string on the wire, becomes the object that templates expect. "" and null
  are {}. Text that is not a JSON object is passed through as text.
"""

from __future__ import annotations

import json
from typing import Any

from enginecore.errors import ParameterError
from enginecore.frontend.nesting import check_nesting

ROLES = ("system", "developer", "user", "assistant", "tool")
PART_SEPARATOR = "\n"
_TEXT_PARTS = ("text", "input_text", "output_text")


def normalise(messages: Any) -> list[dict[str, Any]]:
    """Checked copies of the messages, with text contents. Raises ParameterError."""
    if not isinstance(messages, list):
        raise ParameterError(f"messages must be a list, got {_kind(messages)}", param="messages")
    if not messages:
        raise ParameterError("messages must not be empty", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ParameterError(f"{where} must be an object, got {_kind(message)}", param=where)
    role = message.get("role")
    if role not in ROLES:
        shown = repr(role[:64]) if isinstance(role, str) else "nothing" if role is None else _kind(role)
        raise ParameterError(f"{where}.role must be one of {', '.join(ROLES)}; got {shown}", param=f"{where}.role")
    result: dict[str, Any] = {"role": role}
    has_calls = role == "assistant" and bool(message.get("tool_calls"))
    result["content"] = _content(message.get("content"), f"{where}.content", optional=role == "assistant")
    for name in ("name", "tool_call_id", "reasoning_content"):
        if message.get(name) is not None:
            if not isinstance(message[name], str):
                raise ParameterError(
                    f"{where}.{name} must be a string, got {_kind(message[name])}", param=f"{where}.{name}"
                )
            result[name] = message[name]
    if isinstance(message.get("reasoning"), str):  # the same under the name that answers have it
        result.setdefault("reasoning_content", message["reasoning"])
    if role == "tool" and "tool_call_id" not in result:
        raise ParameterError(f"{where}.tool_call_id is missing", param=f"{where}.tool_call_id")
    if has_calls:
        result["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    for name in ("function_call", "audio"):
        if message.get(name) is not None:
            raise ParameterError(f"{where}.{name} is not supported", param=f"{where}.{name}")
    return result


def _content(content: Any, where: str, *, optional: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if optional:
            return ""
        raise ParameterError(f"{where} is missing", param=where)
    if not isinstance(content, list):
        raise ParameterError(f"{where} must be a string or a list of parts, got {_kind(content)}", param=where)
    return PART_SEPARATOR.join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise ParameterError(f"{where} must be an object, got {_kind(part)}", param=where)
    kind = part.get("type")
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    if kind not in _TEXT_PARTS:
        shown = repr(kind[:64]) if isinstance(kind, str) else "nothing" if kind is None else _kind(kind)
        raise ParameterError(f'{where}.type must be "text"; got {shown}', param=f"{where}.type")
    if not isinstance(part.get("text"), str):
        raise ParameterError(f"{where}.text must be a string, got {_kind(part.get('text'))}", param=f"{where}.text")
    return str(part["text"])


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ParameterError(f"{where} must be a list, got {_kind(calls)}", param=where)
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ParameterError(f"{where}.function must be an object", param=f"{where}.function")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise ParameterError(f"{where}.function.name must be a non-empty string", param=f"{where}.function.name")
    arguments = _arguments(function.get("arguments"), f"{where}.function.arguments")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _arguments(arguments: Any, where: str) -> Any:
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    check_nesting(arguments.encode("utf-8", "replace"), where)
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def merge_system(messages: list[dict[str, Any]], *, leading_only: bool = False) -> list[dict[str, Any]]:
    """All system messages as one in front, in order, separated by an empty line (or only those that stand in front)."""
    count = len(messages)
    if leading_only:
        count = next((i for i, message in enumerate(messages) if message["role"] != "system"), count)
    head, tail = messages[:count], messages[count:]
    texts = [message["content"] for message in head if message["role"] == "system"]
    if len(texts) < 2 and (leading_only or not texts or messages[0]["role"] == "system"):
        return messages
    merged = {"role": "system", "content": "\n\n".join(texts)}
    return [merged, *(message for message in head if message["role"] != "system"), *tail]


def _kind(value: Any) -> str:
    names = {type(None): "null", dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")
