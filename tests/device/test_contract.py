"""Signatures are checked when a class is defined, and the message shows both."""

from __future__ import annotations

from abc import abstractmethod

import pytest
from enginecore.device import Contract, optional


class Arithmetic(Contract):
    @abstractmethod
    def add(self, left: int, right: int, carry: int = 0) -> int: ...

    @optional
    def negate(self, value: int) -> int:
        return -value


def _define(**methods: object) -> type:
    return type("Vendor", (Arithmetic,), {"__module__": "vendor", **methods})


def _renamed(self, left, wrong, carry=0): ...


def _lost_default(self, left, right, carry): ...


def _needs_more(self, left, right, carry=0, *, mode): ...


def _reordered(self, right, left, carry=0): ...


def _keyword_only(self, left, *, right, carry=0): ...


def _missing(self, left, right): ...


def _swallows_names_only(self, left, **rest): ...


async def _asynchronous(self, left, right, carry=0): ...


@pytest.mark.parametrize(
    ("method", "why"),
    [
        (_renamed, "parameter 'right' is missing"),
        (_lost_default, "parameter 'carry' has no default"),
        (_needs_more, "'mode' is not the contract's"),
        (_reordered, "another order"),
        (_keyword_only, "'right' is keyword-only"),
        (_missing, "'carry' is missing"),
        (_swallows_names_only, "'right' is missing"),
        (_asynchronous, "coroutine"),
    ],
)
def test_an_override_that_a_contract_call_does_not_fit_is_refused(method: object, why: str) -> None:
    with pytest.raises(TypeError, match="does not match") as error:
        _define(add=method)
    text = str(error.value)
    assert why in text
    assert "vendor.Vendor.add(self" in text, "the plugin's signature is shown"
    assert "Arithmetic.add(self, left: 'int', right: 'int', carry: 'int' = 0)" in text, "the contract's is shown"


def test_what_is_no_method_is_refused() -> None:
    for value in (staticmethod(lambda left, right, carry=0: 0), property(lambda self: 0), None):
        with pytest.raises(TypeError, match=r"Vendor\.add is a .*does not match"):
            _define(add=value)


def _exact(self, left, right, carry=0):
    return left + right + carry


def _wider(self, left, right=0, carry=0, *, mode="fast", **rest): ...


def _anything(self, *args, **kwargs): ...


@pytest.mark.parametrize("method", [_exact, _wider, _anything])
def test_an_override_that_takes_every_contract_call_is_accepted(method: object) -> None:
    assert _define(add=method)().negate(2) == -2


def test_a_mixin_is_checked_too() -> None:
    mixin = type("Mixin", (), {"add": _renamed, "__module__": "vendor"})
    with pytest.raises(TypeError, match=r"vendor\.Mixin\.add"):
        type("Vendor", (mixin, Arithmetic), {})


def test_what_a_plugin_adds_is_its_own_business() -> None:
    def helper(self, value): ...

    def other(self): ...

    type("Child", (_define(add=_exact, helper=helper),), {"helper": other})


def test_required_methods_are_abstract_and_optional_ones_are_marked() -> None:
    with pytest.raises(TypeError, match="add"):
        _define()()
    assert Arithmetic.negate.__contract_optional__  # type: ignore[attr-defined]
