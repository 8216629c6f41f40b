"""What a backend says it can do, op by dtype and feature by dtype, asked and not tried."""

from __future__ import annotations

import dataclasses
from typing import Any

from enginecore.device import AttentionQuery, Backend, Capabilities, OpQuery, check_attention
from enginecore.ops.schema import OPS

#: Columns that are always there, so that tables of two backends can be compared.
DTYPES = ("float32", "bfloat16", "float16")
FEATURES = ("sliding_window", "soft_cap", "sinks", "alibi", "non_causal", "cross_attention", "mla")
#: Of caches that are narrower than activations; rows "kv_int8" and so on.
KV_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")

#: The dtype is not claimed; the backend's own; the torch reference because there is no other; or because it refuses.
UNSUPPORTED, NATIVE, REFERENCE, REFUSED = "unsupported", "native", "reference", "refused"


def support_of(backend: Backend) -> dict[str, Any]:
    """{"ops": {op: {dtype: {"state", "reasons"}}}, "attention": {feature: ...}}; empty maps for a whole-model runtime.

    States of ops: native, reference, refused (the reference runs, and `reasons` say why), unsupported (the dtype is not
    claimed). Of attention, whose rows are "plain" and the features: native or unsupported, with every reason.
    """
    if backend.runtime is not None:
        return {"runtime": True, "ops": {}, "attention": {}}
    dtypes = [*DTYPES, *sorted(backend.capabilities.dtypes - set(DTYPES))]
    return {
        "runtime": False,
        "ops": {op: {dtype: _op(backend, op, dtype) for dtype in dtypes} for op in OPS},
        "attention": {name: {dtype: _attention(backend, name, dtype) for dtype in dtypes} for name in _rows(backend)},
    }


def _rows(backend: Backend) -> list[str]:
    kept = [f"kv_{name}" for name in KV_DTYPES]
    return ["plain", *FEATURES, *kept, *sorted(backend.capabilities.features - set(FEATURES))]


def _op(backend: Backend, op: str, dtype: str) -> dict[str, Any]:
    if dtype not in backend.capabilities.dtypes:
        return {"state": UNSUPPORTED, "reasons": [f"dtype {dtype} is not claimed"]}
    impl = backend.ops.get(op) if backend.ops is not None else None
    if impl is None:
        return {"state": REFERENCE, "reasons": []}
    verdict = impl.supports(OpQuery(op=op, dtype=dtype))
    return {"state": NATIVE if verdict else REFUSED, "reasons": list(verdict.reasons)}


def _attention(backend: Backend, name: str, dtype: str) -> dict[str, Any]:
    base = baseline_query(backend.capabilities)
    kv_dtype = dtype if dtype in backend.capabilities.kv_dtypes else base.kv_dtype
    features = frozenset() if name == "plain" else frozenset({name})
    if name.removeprefix("kv_") in KV_DTYPES:
        kv_dtype, features = name.removeprefix("kv_"), frozenset()
    query = dataclasses.replace(base, dtype=dtype, kv_dtype=kv_dtype, features=features)
    assert backend.attention is not None
    # A feature that the plugin does not claim is refused on its behalf, whatever its supports() would say.
    reasons = list(dict.fromkeys([*check_attention(backend.capabilities, query), *_reasons(backend, query)]))
    return {"state": UNSUPPORTED if reasons else NATIVE, "reasons": reasons}


def _reasons(backend: Backend, query: AttentionQuery) -> tuple[str, ...]:
    assert backend.attention is not None
    verdict = backend.attention.supports(query)
    return () if verdict else verdict.reasons or ("supports() refused and gave no reason",)


def baseline_query(caps: Capabilities) -> AttentionQuery:
    """The plainest use that the capabilities claim."""
    common = sorted(caps.dtypes & caps.kv_dtypes) or sorted(caps.dtypes)
    sizes = [d for d in (64, 128, *range(8, 520, 2)) if caps.supports_head_size(d)] or [64]
    block = 16 if 16 in caps.block_sizes or not caps.block_sizes else min(caps.block_sizes)
    kv_dtype = common[0] if common[0] in caps.kv_dtypes else min(caps.kv_dtypes, default=common[0])
    return AttentionQuery(
        dtype=common[0], kv_dtype=kv_dtype, head_size=sizes[0], num_heads=2, num_kv_heads=2, block_size=block
    )


def has_groups(backend: Backend) -> bool:
    """Whether the backend can join a group of several ranks."""
    return backend.collective_backend is not None or type(backend).communicator is not Backend.communicator


def summary(support: dict[str, Any]) -> dict[str, list[str]]:
    """Ops by state over the claimed dtypes: {"native": [...], "reference": [...], "refused": [...]}.

    An op that is native in one dtype and refused in another is in both lists, with the dtypes: "sample[float32]".
    """
    found: dict[str, list[str]] = {NATIVE: [], REFERENCE: [], REFUSED: []}
    for op, cells in support["ops"].items():
        states: dict[str, list[str]] = {}
        for dtype, cell in cells.items():
            if cell["state"] != UNSUPPORTED:
                states.setdefault(cell["state"], []).append(dtype)
        for state, dtypes in states.items():
            found[state].append(op if len(states) == 1 else f"{op}[{','.join(dtypes)}]")
    return found
