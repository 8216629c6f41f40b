"""The public surface of the contract as plain data, and what a change to it would break.

It is what plugins import: `enginecore.device` and its hooks, `enginecore.testing`, `enginecore.ops.torch_backend`, and
the schema of the ops.

    python -m tests.device.public_surface        # writes public_surface.json; refuses a change that is not additive

Within a major version of the contract, plugins built against an older surface must keep working: names, parameters,
fields and enum members stay; what is added is optional.
"""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import enginecore.device as device
import enginecore.ops.torch_backend as torch_backend
import enginecore.testing as testing
from enginecore.device import Contract
from enginecore.device.hookspecs import REQUIRED_HOOKS, HookSpecs
from enginecore.ops.schema import OPS

SNAPSHOT = Path(__file__).with_name("public_surface.json")


def surface() -> dict[str, Any]:
    """Every public name that a plugin may use, the hooks, and the signatures of the ops."""
    hooks = {name: _function(hook) for name, hook in vars(HookSpecs).items() if name.startswith("enginecore_")}
    return {
        "names": _names(device),
        "hooks": hooks,
        "required_hooks": sorted(REQUIRED_HOOKS),
        "testing": _names(testing),
        "torch_backend": _names(torch_backend),
        "ops": {name: op.signature for name, op in OPS.items()},
    }


def _names(module: Any) -> dict[str, Any]:
    return {name: _describe(getattr(module, name)) for name in sorted(module.__all__)}


def _describe(value: Any) -> dict[str, Any]:
    if inspect.isclass(value) and issubclass(value, Enum):
        return {"kind": "enum", "members": {member.name: member.value for member in value}}
    if inspect.isclass(value):
        return {"kind": "class", **_class(value)}
    if inspect.isfunction(value):
        return {"kind": "function", "parameters": _function(value)}
    return {"kind": "value", "type": type(value).__name__}


def _class(cls: type) -> dict[str, Any]:
    described: dict[str, Any] = {"contract": issubclass(cls, Contract)}
    if is_dataclass(cls):
        described["fields"] = {
            field.name: {
                "type": str(field.type),
                "required": field.default is MISSING and field.default_factory is MISSING,
            }
            for field in fields(cls)
        }
    else:
        described["slots"] = {name: str(kind) for name, kind in inspect.get_annotations(cls).items()}
    described["methods"] = {
        name: {"parameters": _function(method), "required": bool(getattr(method, "__isabstractmethod__", False))}
        for name, method in ((name, getattr(cls, name)) for name in vars(cls))
        if not name.startswith("_") and callable(method)
    }
    return described


def _function(function: Any) -> dict[str, Any]:
    return {
        name: {
            "kind": parameter.kind.name,
            "required": parameter.default is parameter.empty,
            "type": str(parameter.annotation) if parameter.annotation is not parameter.empty else None,
        }
        for name, parameter in inspect.signature(function).parameters.items()
    }


def breaking_changes(old: Any, new: Any, path: str = "") -> list[str]:
    """What `new` takes away from or demands beyond `old`: empty when it only adds."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        relaxed = path.endswith(".required") and old is True and new is False and ".methods." not in path
        return [] if old == new or relaxed else [f"{path}: {old!r} became {new!r}"]
    found = [f"{path}.{key} is gone" for key in old if key not in new]
    for key in old.keys() & new.keys():
        found += breaking_changes(old[key], new[key], f"{path}.{key}")
    for key in new.keys() - old.keys():
        if isinstance(new[key], dict) and new[key].get("required"):
            found.append(f"{path}.{key} is new and required")
        if path.endswith(".slots"):
            found.append(f"{path}.{key} is a new slot: give it a default and record it by hand")
    shared = [key for key in new if key in old]
    if path.endswith(".parameters") and shared != list(old):
        found.append(f"{path}: the parameters are in another order")
    return found


def main() -> int:
    current = surface()
    if SNAPSHOT.exists():
        broken = breaking_changes(json.loads(SNAPSHOT.read_text()), current)
        if broken:
            print("not additive, so the contract's major version must change:", *broken, sep="\n  ", file=sys.stderr)
            return 1
    SNAPSHOT.write_text(json.dumps(current, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
