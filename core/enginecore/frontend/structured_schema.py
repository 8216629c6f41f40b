"""JSON schemas made ready for compilation. What is changed never lets through a value that the schema refuses.

- `format` names that say nothing about the text (an annotation, by JSON Schema's rules) are dropped. Those that can run
  on, or whose compiled form lets through what a calendar does not have, become patterns of bounded length.
- Integers without bounds get some, and numbers with bounds have at most 9 decimals, so that an answer cannot run on in
  digits. Numbers without bounds stay as they are: they may need an exponent.

OpenAPI's `nullable` is no keyword of JSON Schema, so it changes nothing: a value that is not null satisfies both.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

_LEAP_YEAR = "(?:[12][0-9](?:0[48]|[2468][048]|[13579][26])|(?:1[26]|2[048])00)"
_DATE = (
    "(?:[12][0-9]{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:0[0-9]|1[0-3]):[0-5][0-9])"
_LABEL = "[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,4}}"

#: Formats that are enforced: by a pattern, or by the compiler itself (None).
FORMATS: dict[str, str | None] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(?:\.[A-Za-z0-9_+-]{{1,12}}){{0,2}}@{_LABEL}(?:\.{_LABEL}){{1,3}}",
    "hostname": _HOST,
    "uri": (
        rf"[a-z][a-z0-9+.-]{{1,15}}://{_HOST}(?::[1-9][0-9]{{0,3}})?(?:/[A-Za-z0-9._~-]{{0,40}}){{0,6}}"
        r"(?:\?[A-Za-z0-9._~=&+-]{0,80})?(?:#[A-Za-z0-9._~-]{0,40})?"
    ),
    "duration": r"P(?:[1-9][0-9]{0,3}[YMWD]|T[1-9][0-9]{0,3}[HMS])",
    "ipv4": None,
    "ipv6": None,
    "uuid": None,
}
MAX_INTEGER = 10**18 - 1
MAX_DECIMALS = 9
#: More decimals than this a bound may not have for the step to be exact.
MAX_GRID = 14

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
    _prepare_format(result)
    kinds = result.get("type")
    kinds = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    if "integer" in kinds and not any(name in result for name in _BOUNDS):
        result["minimum"], result["maximum"] = -MAX_INTEGER, MAX_INTEGER
    if "number" in kinds and not any(name in result for name in ("multipleOf", "enum", "const", "$ref")):
        _bound_decimals(result)
    return result


def _bound_decimals(node: dict[str, Any]) -> None:
    """Numbers between two bounds become multiples of a small step, 1e-9 where that leaves enough of them. A bound that
    is excluded becomes the next multiple: between two bounds the compiler lets some of the excluded ones through."""
    low, high = _bound(node, "minimum", "exclusiveMinimum", max), _bound(node, "maximum", "exclusiveMaximum", min)
    if low is None or high is None or not low < high:
        return
    span = -Decimal(repr(float(high - low))).adjusted()
    digits = max(MAX_DECIMALS, span + 3, *(_decimals(value) for value in (low, high)))
    step = 10.0**-digits
    first = round(low + step, digits) if node.get("exclusiveMinimum") == low else low
    last = round(high - step, digits) if node.get("exclusiveMaximum") == high else high
    exact = first == low or low < first
    if digits > MAX_GRID or not exact or not first <= last or (last != high and not last < high):
        return
    for name in ("exclusiveMinimum", "exclusiveMaximum"):
        node.pop(name, None)
    node.update(minimum=first, maximum=last, multipleOf=step)


def _bound(node: dict[str, Any], name: str, exclusive: str, choose: Callable[[list[float]], float]) -> float | None:
    given = [node[each] for each in (name, exclusive) if type(node.get(each)) in (int, float)]
    return choose(given) if given else None


def _decimals(value: float) -> int:
    exponent = Decimal(repr(value)).as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else MAX_GRID + 1


def _prepare_format(node: dict[str, Any]) -> None:
    name = node.get("format")
    if not isinstance(name, str):
        return
    if name not in FORMATS:
        del node["format"]
    elif FORMATS[name] is not None and "pattern" not in node:
        del node["format"]
        node["pattern"] = f"^(?:{FORMATS[name]})$"


def closed(schema: Any) -> Any:
    """The parameters of a tool with no members beyond those that are named, where the schema leaves that open: a model
    that is forced to call should not make up others. Left as it is where parts of a schema are put together, since what
    one part does not name another may."""
    return _closed(schema) if not _has_combinations(schema) else schema


def _has_combinations(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_has_combinations, value))
    if not isinstance(value, dict):
        return False
    combines = "allOf" in value or ("properties" in value and any(name in value for name in ("anyOf", "oneOf", "$ref")))
    return combines or any(map(_has_combinations, value.values()))


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for name in _SCHEMA_LISTS:
        if isinstance(result.get(name), list):
            result[name] = [_closed(each) for each in result[name]]
    for name in _SCHEMA_MAPS:
        if isinstance(result.get(name), dict):
            result[name] = {key: _closed(each) for key, each in result[name].items()}
    for name in ("items", "additionalProperties"):
        if isinstance(result.get(name), (dict, list)):
            result[name] = _closed(result[name])
    properties, required = result.get("properties"), result.get("required") or []
    named = isinstance(properties, dict) and isinstance(required, list) and set(map(str, required)) <= set(properties)
    if named and "patternProperties" not in result:
        result.setdefault("additionalProperties", False)
    return result
