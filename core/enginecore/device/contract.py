"""The base of every contract class: required methods are abstract and signatures are checked when a class is defined.

A plugin author who misnames a parameter learns it when their module is imported, from a message that shows both
signatures, and not from a wrong result three layers down.
"""

from __future__ import annotations

import inspect
from abc import ABC
from typing import Any

#: (major, minor) of the contract this core speaks. Minors only add. 1.1: `AttentionBackend.refresh_metadata`,
#: `AttentionBackend.with_kv_scales`, `GraphKey.activation_bytes`, `Backend.communicator`, `Capabilities.asynchronous`,
#: and dates for what a plugin's conformance profile skips.
CONTRACT_VERSION = (1, 1)


def contract_version() -> str:
    return f"{CONTRACT_VERSION[0]}.{CONTRACT_VERSION[1]}"


def optional(method: Any) -> Any:
    """Mark a contract method as optional: it has a working default and a plugin may leave it out."""
    method.__contract_optional__ = True
    return method


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _mismatch(declared: Any, given: Any) -> str | None:
    """Why a call that fits `declared` may not fit `given`; None when it always does.

    An override takes every parameter of the contract under the same name, kind and place; extra ones need a default.
    """
    if inspect.iscoroutinefunction(declared) != inspect.iscoroutinefunction(given):
        return "one of them is a coroutine"
    wanted, offered = inspect.signature(declared).parameters, inspect.signature(given).parameters
    kinds = {parameter.kind for parameter in offered.values()}
    for name, parameter in wanted.items():
        if name not in offered:
            if inspect.Parameter.VAR_KEYWORD in kinds and inspect.Parameter.VAR_POSITIONAL in kinds:
                continue
            return f"parameter {name!r} is missing"
        if offered[name].kind is not parameter.kind:
            return f"parameter {name!r} is {offered[name].kind.description}, not {parameter.kind.description}"
        if parameter.default is not parameter.empty and offered[name].default is parameter.empty:
            return f"parameter {name!r} has no default"
    for name, parameter in offered.items():
        if name not in wanted and parameter.kind not in _VARIADIC and parameter.default is parameter.empty:
            return f"parameter {name!r} is not the contract's and has no default"
    common = [name for name in offered if name in wanted]
    if common != [name for name in wanted if name in offered]:
        return "the parameters are in another order"
    return None


class Contract(ABC):  # noqa: B024 (the abstract methods are those of its subclasses)
    """Checks, for each subclass, that methods which the contract names keep the contract's signature."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, (contract, declared) in _declared_methods(cls).items():
            owner = next(base for base in cls.__mro__ if name in vars(base))
            given = vars(owner)[name]
            if owner is contract:
                continue
            where = f"{owner.__module__}.{owner.__qualname__}.{name}"
            wanted = f"the contract's {contract.__qualname__}.{name}{inspect.signature(declared)}"
            if not inspect.isfunction(given):
                raise TypeError(f"{where} is a {type(given).__name__}, which does not match the method {wanted}")
            problem = _mismatch(declared, given)
            if problem:
                raise TypeError(f"{where}{inspect.signature(given)} does not match {wanted}: {problem}")


def _declared_methods(cls: type) -> dict[str, tuple[type, Any]]:
    """Public methods of the contract classes, which are those directly under Contract, among the bases of `cls`.

    What a plugin's own base class adds is the plugin's business.
    """
    found: dict[str, tuple[type, Any]] = {}
    for base in cls.__mro__[1:]:
        if Contract in base.__bases__:
            methods = {n: m for n, m in vars(base).items() if not n.startswith("_") and inspect.isfunction(m)}
            found.update({name: (base, method) for name, method in methods.items()})
    return found
