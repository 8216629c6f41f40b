"""L0: is this a Backend, are its claims sane, and does it refuse what nobody can do, with every reason?"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from enginecore.device import (
    AttentionBackend,
    AttentionQuery,
    Backend,
    Capabilities,
    Communicator,
    GraphRunner,
    GraphSupport,
    Impl,
    MemoryManager,
    ModelRuntime,
    OpQuery,
    OpTable,
    Verdict,
    VerdictStatus,
    check_attention,
)
from enginecore.errors import DriverMissingError
from enginecore.ops.schema import OPS
from enginecore.testing.case import Case, CaseContext, FalseClaim
from enginecore.testing.profile import id_matches
from enginecore.testing.support import FEATURES, baseline_query, has_groups

KNOWN_FEATURES = frozenset(FEATURES)


def backend_and_parts(ctx: CaseContext) -> None:
    backend = ctx.backend
    ctx.check(isinstance(backend, Backend), f"{type(backend)} is not an enginecore.device.Backend")
    required: tuple[tuple[str, type], ...] = (("capabilities", Capabilities), ("memory", MemoryManager))
    optional_slots: tuple[tuple[str, type], ...] = (
        ("attention", AttentionBackend), ("ops", OpTable), ("graphs", GraphRunner), ("collectives", Communicator),
        ("runtime", ModelRuntime),
    )  # fmt: skip
    for name, kind in required:
        ctx.check(isinstance(getattr(backend, name, None), kind), f"backend.{name} must be a {kind.__name__}")
    for name, kind in optional_slots:
        value = getattr(backend, name, None)
        ctx.check(value is None or isinstance(value, kind), f"backend.{name} must be a {kind.__name__} or None")
    if backend.runtime is None:
        ctx.check(backend.attention is not None, "a backend without a runtime needs attention")
        ctx.check(backend.ops is not None, "a backend without a runtime needs an op table (it may be empty)")


def device_calls(ctx: CaseContext) -> None:
    import torch

    backend = ctx.backend
    ctx.check(isinstance(backend.torch_device(), torch.device), "torch_device() must return a torch.device")
    torch.zeros(1, device=backend.torch_device())
    backend.set_device(0)
    backend.manual_seed(1234)
    backend.synchronize()
    with backend.stream():
        torch.ones(4, device=backend.torch_device()) + 1
    event = backend.event()
    event.record()
    event.synchronize()
    ctx.check(event.query() is True, "event.query() must be True after event.synchronize()")


def missing_device_refused(ctx: CaseContext) -> None:
    try:
        ctx.backend.set_device(1_000_000)
    except DriverMissingError:
        return
    except Exception as error:
        raise AssertionError(f"set_device(1000000) raised {error!r}; DriverMissingError is expected") from error
    raise AssertionError("set_device(1000000) was accepted; DriverMissingError is expected")


def capabilities_sane(ctx: CaseContext) -> None:
    import torch

    caps = ctx.backend.capabilities
    for field in dataclasses.fields(caps):
        kind, value = type(getattr(Capabilities(), field.name)), getattr(caps, field.name)
        ctx.check(
            field.name == "head_size_range" or isinstance(value, kind),
            f"capabilities.{field.name} must be a {kind.__name__}, got {value!r}",
        )
    for name in caps.dtypes | caps.kv_dtypes:
        ctx.check(isinstance(getattr(torch, name, None), torch.dtype), f"{name!r} is not the name of a torch dtype")
    ctx.check(caps.dtypes, "no dtype is claimed")
    ctx.check(caps.max_world_size >= 1, f"max_world_size must be at least 1, got {caps.max_world_size}")
    unknown = caps.features - KNOWN_FEATURES
    ctx.check(not unknown, f"features that the contract does not know: {sorted(unknown)}")
    if ctx.backend.runtime is None:
        ctx.check(caps.kv_dtypes, "no KV cache dtype is claimed")
        ctx.check(caps.head_size_range or caps.head_size_list, "no head size is claimed")
        ctx.check(caps.block_sizes and min(caps.block_sizes) > 0, f"block sizes must be positive: {caps.block_sizes}")
    if caps.head_size_range is not None:
        low, high, multiple = caps.head_size_range
        ctx.check(0 < low <= high and multiple > 0, f"head_size_range {caps.head_size_range} is (low, high, multiple)")
    if caps.graph_support is not GraphSupport.NEVER and ctx.backend.graphs is None:
        raise FalseClaim(f"graph_support is {caps.graph_support.value} but backend.graphs is None")
    if caps.max_world_size > 1 and ctx.backend.collectives is None and not has_groups(ctx.backend):
        raise FalseClaim(f"max_world_size is {caps.max_world_size} but the backend has no collectives")


def baseline_supported(ctx: CaseContext) -> None:
    verdict = ctx.attention.supports(baseline_query(ctx.backend.capabilities))
    ctx.check(isinstance(verdict, Verdict), f"supports() must return a Verdict, got {verdict!r}")
    if not verdict:
        raise FalseClaim("the plainest use that the capabilities claim is refused: " + "; ".join(verdict.reasons))


def absurd_query_refused(ctx: CaseContext) -> None:
    caps = ctx.backend.capabilities
    query = AttentionQuery(
        dtype="float3", kv_dtype="int1", head_size=7777, num_heads=5, num_kv_heads=3, block_size=13,
        features=frozenset({"telepathy"}),
    )  # fmt: skip
    defects = check_attention(caps, query)
    verdict = ctx.attention.supports(query)
    if verdict:
        raise FalseClaim(f"supports() accepts {query}")
    ctx.check(verdict.status is VerdictStatus.UNSUPPORTED, f"status must be UNSUPPORTED, got {verdict.status}")
    ctx.check(
        isinstance(verdict.reasons, tuple) and len(verdict.reasons) >= len(defects),
        f"{len(defects)} things are wrong with the query, {len(verdict.reasons)} reasons are given: {verdict.reasons}",
    )
    told = " ".join(verdict.reasons)
    for value in ("float3", "int1", "7777", "13", "telepathy"):
        ctx.check(value in told, f"no reason names {value!r}: {verdict.reasons}")


def each_defect_refused(ctx: CaseContext) -> None:
    base = baseline_query(ctx.backend.capabilities)
    defects: dict[str, Any] = {
        "dtype": "float3", "kv_dtype": "int1", "head_size": 7777, "block_size": 13, "num_heads": 3,
    }  # fmt: skip
    for field, value in defects.items():
        if ctx.attention.supports(dataclasses.replace(base, **{field: value})):
            raise FalseClaim(f"supports() accepts {field} = {value!r}")


def unknown_feature_refused(ctx: CaseContext) -> None:
    base = baseline_query(ctx.backend.capabilities)
    unclaimed = [*sorted(KNOWN_FEATURES - ctx.backend.capabilities.features), "telepathy", ""]
    asked = {name: ctx.attention.supports(dataclasses.replace(base, features=frozenset({name}))) for name in unclaimed}
    accepted = [name for name, verdict in asked.items() if verdict]
    if accepted:
        raise FalseClaim(f"supports() accepts features that the capabilities do not claim: {accepted}")
    for name, verdict in asked.items():
        ctx.check(verdict.reasons, f"the feature {name!r} is refused without a reason")


def claims_agree(ctx: CaseContext) -> None:
    """Each single thing that the capabilities claim must be accepted by supports() somewhere near the baseline."""
    caps, attention = ctx.backend.capabilities, ctx.attention
    base = baseline_query(caps)
    variants: list[AttentionQuery] = []
    for dtype in sorted(caps.dtypes):
        kv_dtype = dtype if dtype in caps.kv_dtypes else base.kv_dtype
        variants.append(dataclasses.replace(base, dtype=dtype, kv_dtype=kv_dtype))
    variants += [dataclasses.replace(base, block_size=size) for size in sorted(caps.block_sizes)]
    sizes = set(caps.head_size_list)
    if caps.head_size_range is not None:
        low, high, multiple = caps.head_size_range
        sizes |= {-(-low // multiple) * multiple, high // multiple * multiple}
    variants += [dataclasses.replace(base, head_size=size) for size in sorted(sizes)]
    if caps.max_gqa_ratio > 1:
        variants.append(dataclasses.replace(base, num_heads=2 * caps.max_gqa_ratio))
    plain = sorted(caps.features - {"cross_attention", "mla"})
    variants += [dataclasses.replace(base, features=frozenset({feature})) for feature in plain]
    for query in variants:
        verdict = attention.supports(query)
        if not verdict:
            raise FalseClaim(f"the capabilities claim {query}, supports() refuses it: " + "; ".join(verdict.reasons))


def layout_sane(ctx: CaseContext) -> None:
    from enginecore.testing.cases.paged import Setting

    base = baseline_query(ctx.backend.capabilities)
    layout = ctx.attention.kv_cache_layout(Setting.from_query(base).spec())
    ctx.check(layout.shape.count(-1) == 1, f"layout.shape needs one -1, where blocks are counted: {layout.shape}")
    ctx.check(layout.page_bytes > 0, f"page_bytes must be positive, got {layout.page_bytes}")
    caches = ctx.memory.allocate_kv(layout, 3, 2)
    ctx.check(len(caches) == 2, f"allocate_kv for 2 layers returned {len(caches)} tensors")
    for cache in caches:
        ctx.check(tuple(cache.shape) == layout.shape_for(3), f"{tuple(cache.shape)} is not {layout.shape_for(3)}")
        ctx.check(cache.device.type == ctx.device.type, f"the cache is on {cache.device}, not on {ctx.device}")
        held = cache.numel() * cache.element_size()
        ctx.check(held == 3 * layout.page_bytes, f"3 blocks take {held} bytes, page_bytes says {3 * layout.page_bytes}")
    ctx.memory.release_kv(caches)


def op_table(ctx: CaseContext) -> None:
    table = ctx.backend.ops
    if table is None:
        ctx.unsupported("the backend has no op table: it runs whole models through its runtime")
        return
    ctx.check(table.get("no_such_op") is None, "get() of an op that does not exist must return None")
    for name, schema in OPS.items():
        impl = table.get(name)
        ctx.check(impl is None or isinstance(impl, Impl), f"get({name!r}) must return an Impl or None, got {impl!r}")
        if impl is None:
            continue
        verdict = impl.supports(OpQuery(op=name, dtype=min(ctx.backend.capabilities.dtypes)))
        ctx.check(isinstance(verdict, Verdict), f"supports() of {name} must return a Verdict, got {verdict!r}")
        wanted = schema.signature.split("->")[0].count(",") + 1
        _accepts(ctx, name, impl, wanted)


def _accepts(ctx: CaseContext, name: str, impl: Impl, count: int) -> None:
    try:
        signature = inspect.signature(impl.run)
    except (TypeError, ValueError):  # a compiled callable without a signature: L1 finds out
        return
    try:
        signature.bind(*range(count))
    except TypeError:
        raise AssertionError(f"{name}{signature} cannot be called with the schema's {OPS[name].signature}") from None


def profile_names_cases(ctx: CaseContext) -> None:
    """Gaps and floors that name nothing excuse and promise nothing: a typing error would never show."""
    from enginecore.testing.cases import all_cases

    ids = [case.id for case in all_cases()]
    for pattern in [gap.cases for gap in ctx.profile.gaps] + [floor.case for floor in ctx.profile.floors]:
        ctx.check(any(id_matches(case_id, pattern) for case_id in ids), f"the profile names {pattern!r}: no such case")


def shutdown_ends_cleanly(ctx: CaseContext) -> None:
    """The worker leaves the process the ordinary way after this one: a thread that will not end shows as a hang."""
    ctx.backend.synchronize()
    ctx.backend.shutdown()


def cases() -> list[Case]:
    checks = (
        backend_and_parts, device_calls, missing_device_refused, capabilities_sane, baseline_supported,
        absurd_query_refused, each_defect_refused, unknown_feature_refused, claims_agree, layout_sane, op_table,
        profile_names_cases,
    )  # fmt: skip
    found = [Case(0, "contract", check.__name__, check) for check in checks]
    return [*found, Case(0, "shutdown", "ends_cleanly", shutdown_ends_cleanly, isolated=True)]
