"""Settings about tenants reach the scheduler; what cannot be is refused."""

from __future__ import annotations

from typing import Any

import pytest
from enginecore.config import EngineArgs
from enginecore.engine.client import InprocClient
from enginecore.errors import ParameterError
from enginecore.request import EngineRequest, SamplingParams


def test_a_whole_engine_that_is_fair(config_only: str) -> None:
    """A hundred requests of one tenant stand before one of another, which gets its first token among the first."""
    args = EngineArgs(
        model=config_only, device="sim", num_blocks=64, max_model_len=256, max_num_seqs=4, max_num_batched_tokens=32,
        scheduling_policy="fair", tenant_weights={"chat": 2.0}, tenant_cache_floor=0.1, tenant_cache_cap=0.5,
    )  # fmt: skip
    client = InprocClient(args)
    try:
        for i in range(100):
            client.add(EngineRequest(f"b{i}", [i + 1] * 60, SamplingParams(temperature=0), 20, tenant="batch"))
        client.step()
        client.add(EngineRequest("c", [5, 6, 7], SamplingParams(temperature=0), 2, tenant="chat"))
        first = next(i for i in range(100) if any(o.request_id == "c" for o in client.step().outputs))
        assert first < 5
        told = client.call("pin", [3] * 40, 60.0, None)
        assert told["blocks"] == 2 and client.call("list_pins")[0]["id"] == told["id"]
        assert client.call("unpin", told["id"]) and not client.call("unpin", told["id"])
    finally:
        client.shutdown()


@pytest.mark.parametrize(
    "fields",
    [
        {"tenant_weights": {"a": 0.0}, "scheduling_policy": "fair"},
        {"tenant_weights": {"a": float("nan")}, "scheduling_policy": "fair"}, {"tenant_weights": {"a": 1.0}},
        {"tenant_cache_cap": 1.5}, {"tenant_cache_floor": -0.1}, {"tenant_cache_floor": 0.5, "tenant_cache_cap": 0.4},
        {"tenant_cache_floor": float("nan")},
    ],
)  # fmt: skip
def test_settings_that_cannot_be(fields: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="tenant"):
        EngineArgs(**fields)
