"""How deep JSON is nested, found without recursion and before anything parses it."""

from __future__ import annotations

import numpy as np

from enginecore.errors import ParameterError

#: Deeper JSON is refused, in request bodies and in JSON carried inside strings.
MAX_NESTING = 128

_NOT_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"'))
#: Opening brackets become +1 and closing ones -1, as signed bytes.
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_SLICE = 1 << 16


def check_nesting(body: bytes, param: str | None = None, limit: int = MAX_NESTING) -> None:
    """ParameterError when arrays and objects are nested more than `limit` deep.

    Bulk operations on bytes, linear in the body, in slices so that other threads get their turn: cut away all but
    brackets and quotes, drop what stands between quotes, and follow the depth. Text that is not JSON may pass; the
    parser will say so.
    """
    if body.count(b"[") + body.count(b"{") <= limit:
        return
    # Empty quotes are strings without brackets; taking them out in pairs keeps inside and outside apart.
    marks = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_STEPS, _NOT_STRUCTURE).replace(b'""', b"")
    inside = depth = 0
    for start in range(0, len(marks), _SLICE):
        parts = marks[start : start + _SLICE].split(b'"')
        steps = np.frombuffer(b"".join(parts[inside::2]), np.int8)
        inside ^= (len(parts) - 1) & 1
        if len(steps):
            depths = steps.cumsum(dtype=np.int32)
            if depth + int(depths.max()) > limit:
                raise ParameterError(
                    f"the JSON is nested too deep: more than {limit} levels", param=param, code="nesting_too_deep"
                )
            depth += int(depths[-1])
