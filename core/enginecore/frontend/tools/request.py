"""The fields of a chat request that speak of tools and of the form of the answer."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from enginecore.constraints import StructuredOutputsParams
from enginecore.errors import ParameterError

MAX_TOOLS = 512
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/\-]{0,127}")


@dataclass(frozen=True)
class ToolChoice:
    """The tools that may be called and whether one must be. `strict`: some tool's schema is to be held to."""

    tools: list[dict[str, Any]] = field(default_factory=list)
    mode: Literal["auto", "required"] = "auto"
    parallel: bool = True
    strict: bool = False

    @classmethod
    def of(cls, tools: list[dict[str, Any]] | None, choice: Any, *, parallel: bool) -> ToolChoice:
        """From `tools`, `tool_choice` and `parallel_tool_calls`. With "none" there are no tools."""
        known = _check_tools(tools or [])
        mode: Literal["auto", "required"] = "auto"
        wanted: list[str] | None = None
        if choice == "none":
            return cls()
        if choice == "required":
            mode = "required"
        elif isinstance(choice, dict):
            mode, wanted = _named(choice)
            parallel = parallel and choice.get("type") != "function"
        elif choice not in (None, "auto"):
            raise ParameterError(
                'tool_choice must be "none", "auto", "required" or name a function', param="tool_choice"
            )
        if mode == "required" and not known:
            raise ParameterError("tool_choice asks for a call, but there are no tools", param="tool_choice")
        for name in wanted or ():
            if name not in known:
                raise ParameterError(f"tool_choice names {name[:64]!r}, which is not one of tools", param="tool_choice")
        used = [tool for name, tool in known.items() if wanted is None or name in wanted]
        strict = any(tool["function"].get("strict") is True for tool in used)
        return cls(used, mode, parallel, strict)


def _check_tools(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The tools by name."""
    if len(tools) > MAX_TOOLS:
        raise ParameterError(f"tools may hold at most {MAX_TOOLS}, got {len(tools)}", param="tools")
    known: dict[str, dict[str, Any]] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            raise ParameterError(f'{where} must be {{"type": "function", "function": {{"name": ...}}}}', param=where)
        name = function["name"]
        if not _NAME.fullmatch(name):
            raise ParameterError(
                f"{where}.function.name must be letters, digits, _, and in their midst . : / or -; got {name[:64]!r}",
                param=f"{where}.function.name",
            )
        if name in known:
            raise ParameterError(f"{where}.function.name: there are two tools {name!r}", param=f"{where}.function.name")
        if not isinstance(function.get("parameters", {}), (dict, type(None))):
            raise ParameterError(
                f"{where}.function.parameters must be a JSON schema", param=f"{where}.function.parameters"
            )
        known[name] = tool
    return known


def _named(choice: dict[str, Any]) -> tuple[Literal["auto", "required"], list[str]]:
    """(mode, names) of a tool_choice that is an object."""
    if choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else choice.get("name")
        if isinstance(name, str) and name:
            return "required", [name]
        raise ParameterError("tool_choice.function.name is missing", param="tool_choice")
    if choice.get("type") == "allowed_tools":
        inner = choice.get("allowed_tools")
        allowed: dict[str, Any] = inner if isinstance(inner, dict) else choice
        mode, entries = allowed.get("mode", "auto"), allowed.get("tools")
        if mode in ("auto", "required") and isinstance(entries, list) and entries:
            return mode, [_allowed_name(entry) for entry in entries]
        raise ParameterError("tool_choice.allowed_tools needs mode and tools", param="tool_choice")
    raise ParameterError("tool_choice.type must be function or allowed_tools", param="tool_choice")


def _allowed_name(entry: Any) -> str:
    function = entry.get("function") if isinstance(entry, dict) else None
    name = (
        function.get("name") if isinstance(function, dict) else entry.get("name") if isinstance(entry, dict) else None
    )
    if not isinstance(name, str):
        raise ParameterError("tool_choice.allowed_tools.tools must name functions", param="tool_choice")
    return name


def answer_structure(
    response_format: dict[str, Any] | None, given: StructuredOutputsParams | None
) -> tuple[StructuredOutputsParams | None, str]:
    """What `response_format` or `structured_outputs` asks for, and what errors call it."""
    wanted = None if response_format is None else _response_format(response_format)
    if wanted is not None and given is not None:
        raise ParameterError("give response_format or structured_outputs, not both", param="structured_outputs")
    return (wanted, "response_format") if wanted is not None else (given, "structured_outputs")


def _response_format(value: dict[str, Any]) -> StructuredOutputsParams | None:
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        inner = value.get("json_schema")
        schema = inner.get("schema", inner.get("json_schema")) if isinstance(inner, dict) else None
        if not isinstance(schema, (dict, bool, str)):
            raise ParameterError(
                'response_format must be {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}',
                param="response_format.json_schema",
            )
        return StructuredOutputsParams(json=schema)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=value)
    raise ParameterError(
        f"response_format.type must be text, json_object, json_schema or structural_tag; got {str(kind)[:64]!r}",
        param="response_format",
    )
