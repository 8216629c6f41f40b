"""Which implementation an op gets, and how a fall back shows."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from enginecore.device import Impl, OpQuery, OpTable, Verdict, VerdictStatus
from enginecore.errors import UnsupportedError
from enginecore.ops.dispatch import Ops
from enginecore.ops.reference import REFERENCE


def own_rms_norm(x: Any, weight: Any, eps: float) -> Any:
    return x


class Table(OpTable):
    """Has rms_norm, for float32 only."""

    def __init__(self) -> None:
        self.asked: list[OpQuery] = []

    def get(self, op: str) -> Impl | None:
        return Impl(own_rms_norm, self._supports) if op == "rms_norm" else None

    def _supports(self, query: OpQuery) -> Verdict:
        self.asked.append(query)
        return Verdict.of([] if query.dtype == "float32" else [f"no {query.dtype}"])


def test_the_backend_s_own_comes_first_and_is_the_bare_function() -> None:
    table = Table()
    ops = Ops(table)
    assert ops.rms_norm is own_rms_norm
    assert ops.get("rms_norm", "float32") is own_rms_norm
    assert ops.fallbacks == {}
    assert len(table.asked) == 1, "support is asked once for a use"
    ops.get("rms_norm", "float32", size=64)
    assert table.asked[-1] == OpQuery(op="rms_norm", dtype="float32", attributes={"size": 64})


def test_a_fall_back_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    ops = Ops(Table())
    with caplog.at_level(logging.WARNING):
        assert ops.silu_and_mul is REFERENCE["silu_and_mul"]
        assert ops.silu_and_mul is REFERENCE["silu_and_mul"]
        assert ops.get("rms_norm", "bfloat16") is REFERENCE["rms_norm"]
        ops.get("rms_norm", "float16")
    assert ops.fallbacks == {"silu_and_mul": 1, "rms_norm": 2}
    assert [record.getMessage() for record in caplog.records] == [
        "op silu_and_mul runs as the torch reference: the backend has none",
        "op rms_norm runs as the torch reference: no bfloat16",
    ]


def test_strict_makes_it_an_error() -> None:
    ops = Ops(Table(), strict=True)
    assert ops.rms_norm is own_rms_norm
    with pytest.raises(UnsupportedError, match="'silu_and_mul' would run as the torch reference"):
        _ = ops.silu_and_mul
    with pytest.raises(UnsupportedError, match="no bfloat16"):
        ops.get("rms_norm", "bfloat16")


def test_an_unverified_implementation_is_used() -> None:
    class Unverified(OpTable):
        def get(self, op: str) -> Impl | None:
            return Impl(own_rms_norm, lambda query: Verdict(VerdictStatus.UNVERIFIED))

    assert Ops(Unverified(), strict=True).rms_norm is own_rms_norm


def test_no_table_and_no_such_op() -> None:
    ops = Ops(None)
    assert ops.rms_norm is REFERENCE["rms_norm"]
    with pytest.raises(AttributeError, match="no op 'nothing'"):
        _ = ops.nothing
    assert not hasattr(ops, "_private")
