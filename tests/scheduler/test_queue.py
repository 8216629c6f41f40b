"""The waiting queue against sorting."""

from __future__ import annotations

import random

import pytest
from enginecore.scheduler.queue import WaitingQueue
from enginecore.scheduler.sequence import Sequence

from tests.scheduler.fake_executor import request


def sequence(arrival: int, priority: int = 0) -> Sequence:
    return Sequence(request(f"r{arrival}", [1], priority=priority), arrival, seed=0)


def drain(queue: WaitingQueue) -> list[int]:
    return [queue.pop().arrival for _ in range(len(queue))]


@pytest.mark.parametrize(("by_priority", "order"), [(False, [1, 2, 3, 4]), (True, [2, 4, 1, 3])])
def test_order(by_priority: bool, order: list[int]) -> None:
    queue = WaitingQueue(by_priority=by_priority)
    for arrival, priority in ((3, 5), (1, 5), (4, -1), (2, -1)):
        queue.push(sequence(arrival, priority))
    assert drain(queue) == order


def test_a_preempted_sequence_comes_before_later_ones() -> None:
    queue = WaitingQueue(by_priority=False)
    for arrival in (1, 2, 3):
        queue.push(sequence(arrival))
    first = queue.pop()
    queue.push(first)
    assert drain(queue) == [1, 2, 3]


def test_empty() -> None:
    queue = WaitingQueue(by_priority=True)
    assert queue.peek() is None and len(queue) == 0
    with pytest.raises(IndexError):
        queue.pop()


def test_random_pushes_pops_and_removals() -> None:
    rng = random.Random(1)
    queue, model = WaitingQueue(by_priority=True), []
    for arrival in range(3000):
        one = sequence(arrival, rng.randrange(4))
        queue.push(one)
        model.append(one)
        while model and rng.random() < 0.45:
            gone = rng.choice(model)
            queue.remove(gone)
            model.remove(gone)
        if model and rng.random() < 0.05:
            assert queue.peek() is min(model, key=queue.key) is queue.pop()
            model.remove(min(model, key=queue.key))
        assert len(queue) == len(model)
    assert drain(queue) == [one.arrival for one in sorted(model, key=queue.key)]


def test_a_mass_abort_leaves_no_memory_behind() -> None:
    queue = WaitingQueue(by_priority=False)
    sequences = [sequence(i) for i in range(10_000)]
    for one in sequences:
        queue.push(one)
    for one in sequences[1:]:
        queue.remove(one)
    assert len(queue) == 1 and len(queue._heap) < 100 and queue.pop() is sequences[0]
