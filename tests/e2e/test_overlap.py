"""The reference answers while steps are planned ahead: on a CPU that passes for a device which works asynchronously, so
that tokens stay on the device, and with steps in a thread of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from enginecore.device.select import create_backend

from tests.e2e.test_reference import Solver, check

pytestmark = pytest.mark.model


def asynchronous(*args: Any, **kwargs: Any) -> Any:
    backend = create_backend(*args, **kwargs)
    backend.capabilities = replace(backend.capabilities, asynchronous=True)
    return backend


@pytest.mark.parametrize(
    ("how", "every", "settings"),
    [
        ("ahead", 1, {"long_prefill_token_threshold": 16}),
        ("ahead", 3, {"num_blocks": 42, "enable_prefix_caching": False, "enforce_eager": True}),
        ("beside", 3, {"num_blocks": 42, "max_num_batched_tokens": 64}),
    ],
    ids=["chunks, prefix cache and graphs", "preempted, eager", "in a thread, preempted"],
)
def test_the_same_answers(
    monkeypatch: pytest.MonkeyPatch,
    greedy_reference: list[dict[str, Any]],
    how: str,
    every: int,
    settings: dict[str, Any],
) -> None:
    if how == "ahead":
        monkeypatch.setattr("enginecore.engine.site.create_backend", asynchronous)
    solver = Solver(overlap="on", **settings)
    assert ("overlap", how) in {choice[:2] for choice in solver._client.ready.config.choices}
    cases = greedy_reference[::every]
    answers, stats = solver.run(cases)
    check(cases, answers)
    assert stats.steps_ahead > 60, "most steps were planned while another was underway"
    assert stats.num_used_blocks == 0
    assert (stats.num_preemptions > 0) == ("num_blocks" in settings)
    assert (stats.graph_replays > 0) == ("enforce_eager" not in settings)
    solver.close()
