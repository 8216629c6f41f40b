"""Arguments of a call as an object, also when a limit of tokens has cut them off."""

from __future__ import annotations

import re
from typing import Any

import msgspec

_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*\\?"?|[{}\[\]:,]|[^\s{}\[\]:,"]+', re.DOTALL)
#: Half an escape at the end of a string, or the first half of a pair of them.
_HALF_ESCAPE = re.compile(r"((?<!\\)(?:\\\\)*)\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}))?$")
_CLOSER = {"{": "}", "[": "]"}


def arguments_object(text: str) -> dict[str, Any]:
    """The object that the text is, or that it is the start of; {} when it is neither."""
    for candidate in (text, complete(text)):
        try:
            value = msgspec.json.decode(candidate)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    return {}


def complete(text: str) -> str:
    """A JSON document from a prefix of one: strings and brackets that are open are closed, and what has no value yet (a
    key, half a number or word) is left out. Linear in the text."""
    closers: list[str] = []
    safe, tail = 0, ""
    wants_value = True
    for match in _TOKEN.finditer(text):
        token = match.group()
        if token in _CLOSER:
            closers.append(_CLOSER[token])
            wants_value = token == "["
        elif token in "}]":
            if not closers or closers.pop() != token:
                break
        elif token in ":,":
            wants_value = token == ":" or closers[-1:] == ["]"]
            continue
        elif not wants_value:
            continue
        elif token[0] == '"' and not _closed(token):
            sound = _HALF_ESCAPE.sub(r"\1", _HALF_ESCAPE.sub(r"\1", token))  # the second half's start, then the first
            return text[: match.start()] + sound + '"' + "".join(reversed(closers))
        elif token[0] != '"' and match.end() == len(text):
            break
        safe, tail = match.end(), "".join(reversed(closers)) if len(closers) < 128 else ""
    return text[:safe] + tail


def _closed(token: str) -> bool:
    """Whether a string token ends with its closing quote."""
    if len(token) < 2 or token[-1] != '"':
        return False
    slashes = len(token) - 1 - len(token[:-1].rstrip("\\"))
    return slashes % 2 == 0
