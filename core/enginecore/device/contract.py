"""The base of every contract class: required methods are abstract and signatures are checked when a class is defined.

A plugin author who misnames a parameter learns it when their module is imported, from a message that shows both
signatures, and not from a wrong result three layers down.
"""

from __future__ import annotations

import inspect
from abc import ABC
from typing import Any

#: (major, minor) of the contract this core speaks. Minors only add.
CONTRACT_VERSION = (1, 0)


def contract_version() -> str:
    return f"{CONTRACT_VERSION[0]}.{CONTRACT_VERSION[1]}"


def optional(method: Any) -> Any:
    """Mark a contract method as optional: it has a working default and a plugin may leave it out."""
    method.__contract_optional__ = True
    return method


def _parameters(method: Any) -> list[tuple[str, Any, bool]]:
    return [(p.name, p.kind, p.default is not p.empty) for p in inspect.signature(method).parameters.values()]


def _compatible(base: Any, override: Any) -> bool:
    """An override takes every parameter of the base under the same name and kind; extra ones need a default."""
    wanted, given = _parameters(base), _parameters(override)
    if any(kind is inspect.Parameter.VAR_KEYWORD for _, kind, _ in given):
        return True
    by_name = {name: (kind, has_default) for name, kind, has_default in given}
    for name, kind, has_default in wanted:
        if name not in by_name:
            return False
        if by_name[name][0] is not kind or (has_default and not by_name[name][1]):
            return False
    names = {name for name, _, _ in wanted}
    return all(has_default for name, _, has_default in given if name not in names)


class Contract(ABC):  # noqa: B024 (the abstract methods are those of its subclasses)
    """Checks, for each subclass, that methods which the contract names keep the contract's signature."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, method in vars(cls).items():
            if name.startswith("_") or not inspect.isfunction(method):
                continue
            for base in cls.__mro__[1:]:
                declared = vars(base).get(name)
                if declared is None or not issubclass(base, Contract) or not inspect.isfunction(declared):
                    continue
                if not _compatible(declared, method):
                    raise TypeError(
                        f"{cls.__module__}.{cls.__qualname__}.{name}{inspect.signature(method)} does not match the "
                        f"contract's {base.__qualname__}.{name}{inspect.signature(declared)}"
                    )
                break
