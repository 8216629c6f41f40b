"""What is guessed, how likely guesses are held to be, and how many are made."""

from __future__ import annotations

import math

import numpy as np
import pytest
from enginecore.plan import StepPlan, StepResult
from enginecore.runner.guessing import MOST_EVIDENCE, PRIOR, NgramProposer, Odds, StepCost, worth_guessing
from enginecore.runner.speculation import Speculation
from hypothesis import given
from hypothesis import strategies as st

from tests.runner.test_runner import request

HUNDREDTHS = st.integers(0, 100).map(lambda count: count / 100)
TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def by_hand(text: list[int], most: int) -> tuple[list[int], int]:
    """The latest of the places before whose last tokens most agree with the text's last."""
    agree = {}
    for place in range(len(text) - 1):
        count = 0
        while count < min(MOST_EVIDENCE, place + 1) and text[place - count] == text[len(text) - 1 - count]:
            count += 1
        agree[place] = count
    place = max(agree, key=lambda place: (agree[place], place), default=0)
    if not agree.get(place):
        return [], 0
    longer = list(text)
    for i in range(most):
        longer.append(longer[place + 1 + i])
    return longer[len(text) :], agree[place]


@given(st.lists(TEXT, min_size=1, max_size=4), st.integers(1, 6))
def test_ngrams_are_what_came_after_the_longest_end_that_stood_before(texts: list[list[int]], most: int) -> None:
    tokens_SL = np.full((len(texts) + 1, 41), 2)  # what stands beyond a sequence's end or beside it means nothing
    for i, text in enumerate(texts):
        tokens_SL[i + 1, : len(text)] = text
    slots = np.arange(1, len(texts) + 1)
    found = NgramProposer().propose(tokens_SL, slots, np.array([len(text) for text in texts]), most)
    for i, text in enumerate(texts):
        ids, evidence = by_hand(text, most)
        assert found.evidence_N[i] == evidence
        assert not evidence or found.ids_NK[i].tolist() == ids


@given(
    st.lists(st.lists(HUNDREDTHS, min_size=3, max_size=3), min_size=1, max_size=3),
    st.integers(1, 40), HUNDREDTHS, st.integers(0, 9),
)  # fmt: skip
def test_each_guess_that_is_made_is_worth_it_and_no_other(
    odds: list[list[float]], rows: int, slope: float, room: int
) -> None:
    chances = np.cumprod(np.array(odds), axis=1)
    taken = worth_guessing(chances, rows, slope, room).tolist()
    made = [0] * len(odds)
    for _ in range(room):  # one by one, the best first
        gains = [
            math.log1p(chances[i, made[i]] / (1 + chances[i, : made[i]].sum())) if made[i] < 3 else 0.0
            for i in range(len(odds))
        ]
        best = int(np.argmax(gains))
        loss = rows * slope / (1 + slope * sum(made))  # of all sequences together, in proportion
        if gains[best] <= loss:
            break
        made[best] += 1
    assert sum(taken) == sum(made) <= room
    assert sorted(chances[i, j] for i, count in enumerate(taken) for j in range(count)) == pytest.approx(
        sorted(chances[i, j] for i, count in enumerate(made) for j in range(count))
    )


def test_easy_sequences_do_not_slow_the_others_down() -> None:
    """Sixteen sequences, of which all but one repeat themselves: a guess for each makes the step half as long again."""
    sure, none = np.full((15, 4), 0.98).cumprod(1), np.zeros((1, 4))
    taken = worth_guessing(np.concatenate([sure, none]), 16, slope=0.04, room=48)
    assert taken.tolist() == [1] * 15 + [0], "four each would give most tokens a second"
    assert worth_guessing(sure[:1], 1, slope=0.04, room=48).tolist() == [4], "alone it slows nobody down"
    assert worth_guessing(sure, 15, slope=0.06, room=48).tolist() == [0] * 15


def test_odds_follow_what_was_checked_and_are_forgotten_in_time() -> None:
    odds, kind = Odds(2), np.array([1])
    before = odds.chances(np.array([1, 1]), np.array([0, 3]), 2)
    assert before == pytest.approx(np.array([[0, 0], [PRIOR[3], PRIOR[3] * PRIOR[4]]]))
    for _ in range(50):
        odds.checked(1, 3, right=0, guessed=4)
    assert odds.chances(kind, np.array([3]), 1)[0, 0] < 0.1
    assert odds.chances(kind, np.array([4]), 1)[0, 0] == pytest.approx(PRIOR[4])
    for _ in range(50):
        odds.checked(1, MOST_EVIDENCE, right=2, guessed=2)
    assert odds.chances(kind, np.array([MOST_EVIDENCE]), 1)[0, 0] > 0.97
    others = odds.chances(np.array([0, 0]), np.array([3, MOST_EVIDENCE]), 1)[:, 0]
    assert others == pytest.approx(PRIOR[[3, MOST_EVIDENCE]]), "sequences of the other kind say nothing of these"
    for _ in range(3000):
        odds.fade()
    assert odds.chances(kind, np.array([3]), 1)[0, 0] == pytest.approx(PRIOR[3], abs=0.01)


@pytest.mark.parametrize(("fixed", "each"), [(0.008, 0.0001), (0.004, 0.0005), (0.0, 0.001)])
def test_what_a_row_costs_is_learnt_from_steps_of_different_sizes(fixed: float, each: float) -> None:
    cost, random = StepCost(), np.random.default_rng(5)
    for _ in range(300):
        rows = int(random.integers(24, 44))
        seconds = (fixed + each * rows) * random.uniform(0.95, 1.05)
        cost.add(rows, seconds if random.random() > 0.01 else 1.0)  # the machine was at something else
    assert cost.relative_slope(32) == pytest.approx(each / (fixed + 32 * each), rel=0.35, abs=0.003)


def test_steps_of_one_size_leave_the_prior() -> None:
    cost = StepCost()
    assert cost.relative_slope(1) == pytest.approx(1 / 13)
    for _ in range(300):
        cost.add(1, 0.005)
    assert cost.relative_slope(1) == pytest.approx(1 / 13, rel=0.01)


def test_a_text_that_breaks_its_word_is_not_believed_for_long() -> None:
    """Each step a row more costs a tenth; what came after the same token before never comes again."""
    one = Speculation(NgramProposer(), 2, 64)
    one.enter(0, request("r", [3], 2000))
    tokens_SL = np.full((1, 2048), 5)
    guesses: list[int] = []
    counts = []
    for length in range(1, 1200):
        rows = 1 + len(guesses)
        plan = StepPlan(
            slots_N=np.array([0]), starts_N=np.array([length - 1]), num_new_N=np.array([rows]),
            samples_N=np.array([True]), guesses={0: guesses} if guesses else {},
        )  # fmt: skip
        tokens_SL[0, length] = 5 if length % 2 else 1000 + length
        result = one.look_on(StepResult([0]), plan, tokens_SL, seconds=0.009 + 0.001 * rows)
        guesses = result.guesses.get(0, [])
        counts.append(len(guesses))
    assert counts[2] > 0, "an end that stood before is followed at first"
    assert sum(map(bool, counts[100:])) < 0.05 * len(counts[100:]), "and hardly any more once it was wrong"
    assert sum(counts[100:]) > 0, "but not never again"
