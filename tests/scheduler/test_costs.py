"""Moving or computing, by measurement."""

from __future__ import annotations

import pytest
from enginecore.scheduler.costs import TRY_AGAIN, Costs


def test_what_is_not_measured_is_tried() -> None:
    costs = Costs(16)
    assert costs.worth_moving(1e9) and costs.worth_moving(None)
    costs.computed(1000, 1.0)
    assert costs.worth_moving(None) and costs.worth_moving(1e-3, None)


def test_the_cheaper_way() -> None:
    costs = Costs(16)
    costs.computed(1000, 1.0)
    assert costs.worth_moving(0.015) and not costs.worth_moving(0.017)
    assert costs.worth_moving(0.008, 0.007) and not costs.worth_moving(0.01, 0.01)


def test_a_bad_measurement_does_not_hold_for_ever() -> None:
    costs = Costs(16)
    costs.computed(1000, 1.0)
    assert [costs.worth_moving(1.0) for _ in range(2 * TRY_AGAIN)].count(True) == 2


def test_small_steps_and_no_time_say_nothing() -> None:
    costs = Costs(16)
    costs.computed(63, 1.0)
    costs.computed(1000, 0.0)
    assert costs.seconds_per_token is None
    for _ in range(50):
        costs.computed(100, 2.0)
    assert costs.seconds_per_token == pytest.approx(0.02)
