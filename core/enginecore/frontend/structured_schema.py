"""JSON schemas made ready for compilation. What is changed never lets through a value that the schema refuses.

- `format` names that say nothing about the text (an annotation, by JSON Schema's rules) are dropped.
- Integers without bounds get some, so that an answer cannot run on in digits: up to 18 of them.
- `nullable: true`, OpenAPI's way to say so, becomes a null beside the type.
"""

from __future__ import annotations

from typing import Any

#: The formats that the compiler enforces.
FORMATS = frozenset({"date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
MAX_INTEGER = 10**18 - 1

_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("items", "additionalProperties", "not")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const", "$ref")


def prepared(schema: Any) -> Any:
    """A copy that is ready. Depth is bounded by the caller."""
    if isinstance(schema, list):
        return [prepared(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for name in _SCHEMA_LISTS:
        if isinstance(result.get(name), list):
            result[name] = [prepared(each) for each in result[name]]
    for name in _SCHEMA_MAPS:
        if isinstance(result.get(name), dict):
            result[name] = {key: prepared(each) for key, each in result[name].items()}
    for name in _SCHEMAS:
        if isinstance(result.get(name), (dict, list)):
            result[name] = prepared(result[name])
    if isinstance(result.get("format"), str) and result["format"] not in FORMATS:
        del result["format"]
    kinds = result.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    if "integer" in kinds and not any(name in result for name in _BOUNDS):
        result["minimum"], result["maximum"] = -MAX_INTEGER, MAX_INTEGER
    if result.pop("nullable", None) is True and kinds and "null" not in kinds:
        result["type"] = [*kinds, "null"]
        if isinstance(result.get("enum"), list) and None not in result["enum"]:
            result["enum"] = [*result["enum"], None]
    return result
