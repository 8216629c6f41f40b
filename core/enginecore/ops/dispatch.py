"""Which implementation of an op runs: the backend's where it has one that fits, else the torch reference.

The choice is made once for each use, when a model is built; what is handed out is the bare function. Every fall back to
the reference is logged once and counted, and with `strict` it is an error. Nothing ever moves to another device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from enginecore.device.optable import Impl, OpQuery, OpTable
from enginecore.errors import UnsupportedError
from enginecore.ops.reference import REFERENCE
from enginecore.ops.schema import OPS

logger = logging.getLogger(__name__)


class Ops:
    """The ops of one backend. `ops.rms_norm` is a callable of the schema's signature.

    `fallbacks` maps an op to how many uses got the reference. `strict` makes a fall back raise UnsupportedError.
    """

    def __init__(self, table: OpTable | None, *, strict: bool = False, dtype: str = "float32") -> None:
        self.fallbacks: dict[str, int] = {}
        self._table, self._strict, self._dtype = table, strict, dtype
        self._chosen: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def get(self, op: str, dtype: str | None = None, **attributes: Any) -> Callable[..., Any]:
        """The function to call for `op` on `dtype` ("bfloat16"); `attributes` are fixed sizes that matter to it."""
        if op not in OPS:
            raise AttributeError(f"there is no op {op!r}; the schema has {', '.join(OPS)}")
        key = (op, dtype or self._dtype, *sorted(attributes.items()))
        chosen = self._chosen.get(key)
        if chosen is None:
            query = OpQuery(op=op, dtype=dtype or self._dtype, attributes=attributes)
            chosen = self._chosen[key] = self._choose(query)
        return chosen

    def native(self, op: str, dtype: str | None = None, **attributes: Any) -> Callable[..., Any] | None:
        """The backend's own function for a use of `op`, as `get` gives it; None where that would be the reference."""
        impl = self._table.get(op) if self._table is not None else None
        query = OpQuery(op=op, dtype=dtype or self._dtype, attributes=attributes)
        return None if impl is None or not impl.supports(query) else self.get(op, dtype, **attributes)

    def __getattr__(self, op: str) -> Callable[..., Any]:
        if op.startswith("_"):
            raise AttributeError(op)
        return self.get(op)

    def _choose(self, query: OpQuery) -> Callable[..., Any]:
        impl = self._table.get(query.op) if self._table is not None else None
        reason = "the backend has none"
        if impl is not None:
            verdict = impl.supports(query)
            if verdict:
                return _Guarded(self, query, impl) if impl.build_errors else impl.run
            reason = "; ".join(verdict.reasons) or "the backend refuses this use"
        self.note_reference(query.op, reason)
        return REFERENCE[query.op]

    def note_reference(self, op: str, reason: str) -> None:
        """Count and log (once an op) that a use of `op` runs as the torch reference; UnsupportedError when strict."""
        if self._strict:
            raise UnsupportedError(f"op {op!r} would run as the torch reference ({reason})")
        if op not in self.fallbacks:
            logger.warning("op %s runs as the torch reference: %s", op, reason)
        self.fallbacks[op] = self.fallbacks.get(op, 0) + 1


class _Guarded:
    """An implementation whose kernel is built when it first runs, and may turn out not to be buildable."""

    __slots__ = ("_errors", "_ops", "_query", "_run")

    def __init__(self, ops: Ops, query: OpQuery, impl: Impl) -> None:
        self._ops, self._query, self._run, self._errors = ops, query, impl.run, impl.build_errors

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._run(*args, **kwargs)
        except self._errors as error:
            text = str(error).strip().splitlines()
            reason = f"its kernel cannot be built: {type(error).__name__}: {text[0] if text else 'no message'}"
            self._ops.note_reference(self._query.op, reason)
            self._run, self._errors = REFERENCE[self._query.op], ()
            return self._run(*args, **kwargs)
