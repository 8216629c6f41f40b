"""Routes that account for memory and time: GET /v1/memory and GET /v1/requests/{id}/explain."""

from __future__ import annotations

import re
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from enginecore.server.errors import ApiError
from enginecore.server.generation import json_response
from enginecore.server.state import ServerState

#: Settings that decide how many KV blocks there are.
_SIZING = frozenset({"num_blocks", "max_model_len", "memory_utilization", "max_num_seqs", "max_num_batched_tokens"})
#: What answers put before the id of a request.
_ANSWER_PREFIX = re.compile(r"^(cmpl-|chatcmpl-|msg_|resp_)")


async def memory(state: ServerState, request: Request) -> Response:
    """Who owns which bytes, the KV cache by state, and why it has this many blocks."""
    config, ready = state.llm.config, state.llm.ready
    now = await state.llm.memory()
    blocks = {name: now[name] for name in ("in_use", "cached", "free")}
    kv_bytes = ready.ledger.get("kv_cache")
    block_bytes = None if kv_bytes is None else kv_bytes // config.num_blocks
    answer: dict[str, Any] = {
        "object": "memory",
        "device": ready.device_summary,
        "ledger": ready.ledger,
        "predicted_and_measured": _beside(ready.ledger, now),
        "kv_cache": {
            "num_blocks": config.num_blocks,
            "block_size": config.block_size,
            "block_bytes": block_bytes,
            "dtype": config.kv_cache_dtype or None,
            "blocks": blocks,
            "bytes": None if block_bytes is None else {name: count * block_bytes for name, count in blocks.items()},
            "running": {"slots_held": now["slots_held"], "tokens_held": now["tokens_held"]},
            "shared_by_forks": {"forks": now["forks"], "tokens": now["forked_tokens"]},
            "tiers": {tier: _of_tier(now, tier) for tier in ("host", "disk")},
        },
        "why": [
            {"setting": name, "value": value, "reason": reason}
            for name, value, reason in config.choices
            if name in _SIZING
        ],
    }
    return json_response(answer)


def _beside(ledger: dict[str, int], now: dict[str, int]) -> list[dict[str, Any]]:
    """Bytes by owner as the cache was sized by and as measured now, None where an owner cannot be told apart. The whole
    process has its peak, too."""
    owners = [name for name in ledger if name not in ("usable", "budget")]
    rows = [{"owner": name, "predicted": ledger[name], "measured": now.get(f"measured_{name}")} for name in owners]
    whole = {"owner": "process", "predicted": sum(ledger[name] for name in owners) or None}
    return [*rows, {**whole, "measured": now.get("measured_process"), "peak": now.get("measured_peak")}]


def _of_tier(figures: dict[str, int], tier: str) -> dict[str, int] | None:
    """What is below the device, without the tier's name; None for a tier that there is not."""
    found = {name.removeprefix(f"{tier}_"): value for name, value in figures.items() if name.startswith(f"{tier}_")}
    return found or None


async def explain(state: ServerState, request: Request) -> Response:
    """How the time of a request was spent. The id is that of its x-request-id header or of its answer."""
    request_id: str = request.path_params["request_id"]
    found = await state.llm.explain(request_id)
    if found is None:
        request_id = _ANSWER_PREFIX.sub("", request_id)
        found = await state.llm.explain(request_id)
    if not found:
        raise ApiError(404, "no request of this id is known, or it was too long ago", code="request_not_found")
    return json_response({"object": "request.explain", "id": request_id, "sequences": found})
