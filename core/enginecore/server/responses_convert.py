"""From the items of a Responses request to chat messages, and from its settings to a chat's. Every refusal names the
place, as in `input[2].content`."""

from __future__ import annotations

import uuid
from typing import Any

from enginecore.errors import ParameterError
from enginecore.frontend.messages import PART_SEPARATOR, normalise
from enginecore.server.responses_protocol import ResponsesRequest

_ROLES = ("user", "assistant", "system", "developer")
_INCLUDABLE = (
    "message.output_text.logprobs", "reasoning.encrypted_content", "file_search_call.results",
    "web_search_call.results", "web_search_call.action.sources", "message.input_image.image_url",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs",
)  # fmt: skip
LOGPROBS = _INCLUDABLE[0]
MAX_METADATA = 16


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def input_items(given: str | list[Any] | None) -> list[dict[str, Any]]:
    """The items of `input`, checked, each with an id. Raises ParameterError."""
    if given is None:
        raise ParameterError("input is missing", param="input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not given:
        raise ParameterError("input must not be empty", param="input")
    return [_item(item, f"input[{index}]") for index, item in enumerate(given)]


def _item(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise ParameterError(f"{where} must be an object", param=where)
    kind = item.get("type", "message" if "role" in item else None)
    if kind == "message":
        return _message(item, where)
    if kind == "function_call":
        call = {name: _string(item, name, where) for name in ("call_id", "name")}
        call["arguments"] = _string(item, "arguments", where, empty=True)
        return {"id": _own_id(item, "fc"), "type": kind, **call, "status": "completed"}
    if kind == "function_call_output":
        output = item.get("output")
        text = output if isinstance(output, str) else _text(output, f"{where}.output")
        call_id = _string(item, "call_id", where)
        return {"id": _own_id(item, "fc"), "type": kind, "call_id": call_id, "output": text, "status": "completed"}
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        if not isinstance(parts, list) or not all(
            isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts
        ):
            raise ParameterError(f"{where}.content must be a list of texts", param=f"{where}.content")
        content = [{"type": "reasoning_text", "text": part["text"]} for part in parts]
        return {"id": _own_id(item, "rs"), "type": kind, "summary": [], "content": content}
    shown = repr(kind[:64]) if isinstance(kind, str) else "no type"
    raise ParameterError(f"{where}: items of type {shown} are not supported", param=f"{where}.type")


def _message(item: dict[str, Any], where: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in _ROLES:
        raise ParameterError(f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
    content = item.get("content")
    texts = [content] if isinstance(content, str) else _texts(content, f"{where}.content")
    kind = "output_text" if role == "assistant" else "input_text"
    parts: list[dict[str, Any]] = [{"type": kind, "text": text} for text in texts]
    if role == "assistant":
        parts = [{**part, "annotations": []} for part in parts]
    return {"id": _own_id(item, "msg"), "type": "message", "role": role, "content": parts, "status": "completed"}


def _texts(content: Any, where: str) -> list[str]:
    """Text parts, checked by the rules of a chat's."""
    try:
        return [str(normalise([{"role": "user", "content": [part]}])[0]["content"]) for part in _list(content, where)]
    except ParameterError as error:
        place = (error.param or "").replace("messages[0].content[0]", where)
        text = str(error).replace("messages[0].content[0]", where).replace('"text"', '"input_text"')
        raise ParameterError(text, param=place) from error


def _list(content: Any, where: str) -> list[Any]:
    if not isinstance(content, list):
        raise ParameterError(f"{where} must be a string or a list of parts", param=where)
    return content


def _text(content: Any, where: str) -> str:
    return PART_SEPARATOR.join(_texts(content, where))


def _string(item: dict[str, Any], name: str, where: str, *, empty: bool = False) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not (value or empty):
        raise ParameterError(f"{where}.{name} must be a {'' if empty else 'non-empty '}string", param=f"{where}.{name}")
    return value


def _own_id(item: dict[str, Any], prefix: str) -> str:
    given = item.get("id")
    return given if isinstance(given, str) and 0 < len(given) <= 128 else new_id(prefix)


def to_messages(items: list[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """Chat messages. Reasoning and calls that follow each other, and the text between them, are one assistant's turn;
    the next item of anybody else ends it."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    turn: dict[str, Any] | None = None
    for item in items:
        kind = item["type"]
        if kind == "function_call_output":
            turn = None
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
            continue
        text = PART_SEPARATOR.join(part["text"] for part in item.get("content", ()))
        if kind == "message" and item["role"] != "assistant":
            turn = None
            messages.append({"role": item["role"], "content": text})
            continue
        starts = turn is None or (kind != "function_call" and "tool_calls" in turn)
        if starts or (kind == "message" and turn is not None and turn["content"]):
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        assert turn is not None
        if kind == "message":
            turn["content"] = text
        elif kind == "reasoning":
            turn["reasoning_content"] = PART_SEPARATOR.join(filter(None, (turn.get("reasoning_content"), text)))
        else:
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
    return messages


def convert_tools(body: ResponsesRequest) -> dict[str, Any]:
    """`tools`, `tool_choice` and `parallel_tool_calls` of a chat."""
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or [])]
    choice: Any = body.tool_choice
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind == "function":
            choice = {"type": "function", "function": {"name": _string(choice, "name", "tool_choice")}}
        elif kind == "allowed_tools" and choice.get("mode") in ("auto", "required"):
            listed = choice.get("tools")
            allowed = listed if isinstance(listed, list) else []
            names = {tool.get("name") for tool in allowed if isinstance(tool, dict)}
            tools = [tool for tool in tools if tool["function"]["name"] in names]
            choice = choice["mode"]
        else:
            raise ParameterError("tool_choice.type must be function or allowed_tools", param="tool_choice.type")
    elif choice not in (None, "none", "auto", "required"):
        raise ParameterError("tool_choice must be none, auto, required or an object", param="tool_choice")
    if not tools:
        if choice not in (None, "none", "auto"):
            raise ParameterError("tool_choice needs tools", param="tool_choice")
        return {}
    parallel = None if body.parallel_tool_calls else False
    return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        shown = str(tool.get("type"))[:64]
        raise ParameterError(f"{where}: tools of type {shown!r} are not supported", param=f"{where}.type")
    function = {"name": _string(tool, "name", where)}
    for name, kind in (("description", str), ("parameters", dict), ("strict", bool)):
        if tool.get(name) is not None:
            if not isinstance(tool[name], kind):
                raise ParameterError(f"{where}.{name} has the wrong type", param=f"{where}.{name}")
            function[name] = tool[name]
    return {"type": "function", "function": function}


def convert_settings(body: ResponsesRequest) -> dict[str, Any]:
    """What a chat has other names for. Raises ParameterError."""
    for each in body.include or []:
        if each not in _INCLUDABLE:
            raise ParameterError(f"include: {each[:64]!r} is not known", param="include")
    if body.truncation not in ("auto", "disabled"):
        raise ParameterError("truncation must be auto or disabled", param="truncation")
    if body.service_tier not in (None, "auto", "default"):
        raise ParameterError("service_tier must be auto or default", param="service_tier")
    if len(body.metadata or {}) > MAX_METADATA or any(
        len(k) > 64 or len(v) > 512 for k, v in (body.metadata or {}).items()
    ):
        told = f"metadata may hold {MAX_METADATA} keys of 64 characters with values of 512"
        raise ParameterError(told, param="metadata")
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise ParameterError(f"max_output_tokens must be at least 1, got {body.max_output_tokens}",
                             param="max_output_tokens")  # fmt: skip
    chat: dict[str, Any] = {
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "response_format": _response_format(body.text or {}),
    }
    if body.top_logprobs is not None or LOGPROBS in (body.include or []):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    effort = (body.reasoning or {}).get("effort")
    if effort is not None:
        if not isinstance(effort, str):
            raise ParameterError("reasoning.effort must be a string", param="reasoning.effort")
        if effort == "none":
            chat |= {"thinking_token_budget": 0, "chat_template_kwargs": {"enable_thinking": False}}
        else:
            chat["reasoning_effort"] = effort
    return chat


def _response_format(text: dict[str, Any]) -> dict[str, Any] | None:
    if text.get("verbosity") not in (None, "medium"):
        raise ParameterError("text.verbosity is not supported", param="text.verbosity", code="unsupported_parameter")
    form = text.get("format")
    if form is None or form == {"type": "text"}:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        raise ParameterError("text.format.type must be text, json_object or json_schema", param="text.format.type")
    if not isinstance(form.get("schema"), dict):
        raise ParameterError("text.format.schema must be an object", param="text.format.schema")
    schema = {"name": form.get("name") or "output", "schema": form["schema"], "strict": form.get("strict")}
    return {"type": "json_schema", "json_schema": {name: value for name, value in schema.items() if value is not None}}
