"""The contents of regions that a response template names: text to values, and values to calls.

The parsers and their arguments are those of transformers' response templates: text, json, xml-inline, kv-lines and
python-call-list, and a `transform` that puts their values and the delimiters' named groups into another shape.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import regex

from enginecore.frontend.tools.json_scan import Malformed
from enginecore.frontend.tools.other_scan import python_calls

#: A template's expressions may not take longer than this on one region.
TIMEOUT_S = 1.0
_BARE_KEY = regex.compile(r'"(?:\\.|[^"\\])*+"(*SKIP)(*FAIL)|(?<=[{,])(\s*)(\w+)(\s*):')
_PLACEHOLDER = regex.compile(r"\{(\w+(?:\.\w+)*)\}")


def calls_of(body: str, field: dict[str, Any], captured: dict[str, str]) -> list[tuple[str, str]]:
    """(name, arguments as JSON) of the calls in a region. Malformed when there is none in it."""
    try:
        value = _parse(body, str(field.get("content", "text")), field.get("content_args") or {})
        transform = field.get("transform")
        if transform is not None and field.get("transform_each"):
            value = [_transformed(transform, {**captured, **item}) for item in value]
        elif transform is not None:
            value = _transformed(transform, {**captured, "content": value})
        return [_call(each) for each in (value if isinstance(value, list) else [value])]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, TimeoutError) as error:
        raise Malformed from error


def _call(value: Any) -> tuple[str, str]:
    function = value.get("function", value)
    arguments = function.get("arguments", function.get("parameters"))
    if not isinstance(function["name"], str) or not function["name"]:
        raise ValueError("a call without a name")
    if not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False, allow_nan=False)
    return function["name"], arguments


def _parse(text: str, name: str, options: dict[str, Any]) -> Any:
    return _PARSERS[name](text, options)


def _text(text: str, options: dict[str, Any]) -> str:
    return text.strip() if options.get("strip", True) else text


def _json(text: str, options: dict[str, Any]) -> Any:
    """JSON, perhaps with bare keys and with strings between other marks."""
    strings: list[str] = []

    def keep(found: Any) -> str:
        strings.append(found.group(1))
        return f'"\x01{len(strings) - 1}"'

    plain = text
    for opening, closing in options.get("string_delims") or ():
        expression = regex.escape(opening) + "(.*?)" + regex.escape(closing)
        plain = regex.sub(expression, keep, plain, flags=regex.DOTALL, timeout=TIMEOUT_S)
    if options.get("unquoted_keys"):
        plain = _BARE_KEY.sub(r'\1"\2"\3:', plain, timeout=TIMEOUT_S)
    try:
        value = json.loads(plain, strict=False)
    except ValueError:
        if options.get("allow_non_json"):
            return text.strip()
        raise
    return _restored(value, strings) if strings else value


def _restored(value: Any, strings: list[str]) -> Any:
    if isinstance(value, str):
        return strings[int(value[1:])] if value.startswith("\x01") else value
    if isinstance(value, list):
        return [_restored(each, strings) for each in value]
    if isinstance(value, dict):
        return {key: _restored(each, strings) for key, each in value.items()}
    return value


def _xml_inline(text: str, options: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for match in regex.finditer(options["tag_pattern"], text, flags=regex.DOTALL, timeout=TIMEOUT_S):
        key, value = match["key"], _inner(match.groupdict().get("value") or "", options)
        if key in found and options.get("merge_duplicates"):
            value = [*(found[key] if isinstance(found[key], list) else [found[key]]), value]
        found[key] = value
    return found


def _kv_lines(text: str, options: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for line in text.split(options.get("line_sep", "\n")):
        key, mark, value = line.partition(options.get("kv_sep", ":"))
        if mark:
            found[key.strip()] = _inner(value.strip(), options)
    return found


def _inner(text: str, options: dict[str, Any]) -> Any:
    parser = options.get("value_parser")
    return text if parser is None else _parse(text, parser.get("name", "text"), parser.get("args") or {})


_PARSERS: dict[str, Callable[[str, dict[str, Any]], Any]] = {
    "text": _text,
    "int": lambda text, _: int(text),
    "float": lambda text, _: float(text),
    "bool": lambda text, _: text.strip().lower() in ("true", "1"),
    "json": _json,
    "xml-inline": _xml_inline,
    "kv-lines": _kv_lines,
    "python-call-list": lambda text, _: [{"name": name, "arguments": value} for name, value in python_calls(text)],
}
KNOWN_PARSERS = frozenset(_PARSERS)


def _transformed(shape: Any, scope: dict[str, Any]) -> Any:
    """`shape` with every "{name}" or "{name.key}" replaced by what it names."""
    if isinstance(shape, dict):
        return {key: _transformed(each, scope) for key, each in shape.items()}
    if isinstance(shape, list):
        return [_transformed(each, scope) for each in shape]
    whole = _PLACEHOLDER.fullmatch(shape) if isinstance(shape, str) else None
    if whole is None:
        return shape
    root, *keys = whole[1].split(".")
    value = scope[root]
    for key in keys:
        value = value[key]
    return value
