"""How a sequence may go on: guesses from its own text, how likely they are, and how many of them pay.

Shape suffixes: S slots, L longest sequence, N sequences that are guessed for, T tokens of them all, K guesses of one, C
guesses of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

#: The strongest evidence that is told apart.
MOST_EVIDENCE = 8
#: How often a guess with each evidence (0 to MOST_EVIDENCE) is right before any is checked, and the number of
#: observations that this counts for. Answers of a small chat model, greedy and sampled, lie on both sides of it.
PRIOR = np.array([0.0, 0.15, 0.4, 0.5, 0.65, 0.65, 0.75, 0.8, 0.9])
PRIOR_WEIGHT = 8.0
#: What is left of each observation after a step: what went wrong once is tried again some hundred steps later.
FADING = 0.997


@dataclass(frozen=True)
class Proposal:
    """`ids_NK` are guessed tokens, in order; `evidence_N` says what for: 0 is no guess at all, MOST_EVIDENCE the best
    reason there is. With each guess that holds, the next one has one more."""

    ids_NK: np.ndarray
    evidence_N: np.ndarray


class Proposer(Protocol):
    """Guesses how sequences go on."""

    def propose(self, tokens_SL: np.ndarray, slots_N: np.ndarray, lengths_N: np.ndarray, most: int) -> Proposal:
        """`most` tokens that may come after the first `lengths_N` tokens of each of `slots_N`."""


class NgramProposer:
    """What came after the sequence's last tokens where they stood before, as in prompt lookup decoding (Saxena, 2023).
    Of all earlier places the latest among those where most tokens before agree; their number is the evidence. A text
    that repeats itself more often than it is long is guessed to go on doing so."""

    def propose(self, tokens_SL: np.ndarray, slots_N: np.ndarray, lengths_N: np.ndarray, most: int) -> Proposal:
        count = len(slots_N)
        # All texts, one after another: one long one shall not make the others as long.
        text_T = np.concatenate([tokens_SL[slot, :length] for slot, length in zip(slots_N, lengths_N, strict=True)])
        last_N = np.cumsum(lengths_N) - 1
        first_N = last_N + 1 - lengths_N
        places = np.flatnonzero(text_T == np.repeat(text_T[last_N], lengths_N))
        rows = np.searchsorted(last_N, places)
        earlier = places < last_N[rows]
        places, rows = places[earlier], rows[earlier]
        agree = np.ones(len(rows), np.int64)
        alive = np.arange(len(rows))
        for length in range(1, MOST_EVIDENCE):
            alive = alive[places[alive] - length >= first_N[rows[alive]]]
            alive = alive[text_T[places[alive] - length] == text_T[last_N[rows[alive]] - length]]
            if not len(alive):
                break
            agree[alive] = length + 1
        best_N = np.zeros(count, np.int64)
        np.maximum.at(best_N, rows, agree * len(text_T) + places)
        evidence_N, place_N = best_N // len(text_T), best_N % len(text_T)
        period_N = np.maximum(last_N - place_N, 1)
        ahead_NK = place_N[:, None] + 1 + np.arange(most) % period_N[:, None]
        return Proposal(text_T[np.minimum(ahead_NK, last_N[:, None])], evidence_N)


class Odds:
    """How often guesses of each evidence have been right lately, for each of so many kinds of sequences."""

    def __init__(self, num_kinds: int) -> None:
        self._right = np.zeros((num_kinds, MOST_EVIDENCE + 1))
        self._checked = np.zeros((num_kinds, MOST_EVIDENCE + 1))

    def fade(self) -> None:
        """A step has passed."""
        self._right *= FADING
        self._checked *= FADING

    def checked(self, kind: int, evidence: int, right: int, guessed: int) -> None:
        """Of `guessed` tokens with `evidence` for the first, `right` held; the one after them did not."""
        for i in range(min(right + 1, guessed)):
            at = min(MOST_EVIDENCE, evidence + i)
            self._checked[kind, at] += 1
            self._right[kind, at] += i < right

    def chances(self, kinds_N: np.ndarray, evidence_N: np.ndarray, most: int) -> np.ndarray:
        """How likely each of `most` guesses is to hold [N, K]: those before it must, too."""
        odds = (self._right + PRIOR_WEIGHT * PRIOR) / (self._checked + PRIOR_WEIGHT)
        at_NK = np.minimum(evidence_N[:, None] + np.arange(most), MOST_EVIDENCE)
        chances: np.ndarray = np.cumprod(np.where(evidence_N[:, None] > 0, odds[kinds_N[:, None], at_NK], 0.0), axis=1)
        return chances


class StepCost:
    """How long a step takes with a row more: a line through the latest steps, by least squares with weights that fade.

    Steps of one size say nothing of its slope; a prior does then: that HALF rows cost as much as the step without any.
    """

    HALF = 12.0
    FADING = 0.99
    #: What the prior weighs: so many steps of which half had a row more than the mean, half one less.
    WEIGHT = 100.0

    def __init__(self) -> None:
        #: Of weights, rows, seconds, squared rows, and rows times seconds.
        self._sums = np.zeros(5)

    def add(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long. What took several times as long as before was disturbed."""
        weight, _, total, _, _ = self._sums.tolist()
        if weight and seconds > 3 * total / weight:
            seconds = 3 * total / weight
        self._sums = self.FADING * self._sums + (1, rows, seconds, rows * rows, rows * seconds)

    def relative_slope(self, rows: float) -> float:
        """The share of a step's time at `rows` rows that one row more adds to it."""
        weight, n, t, nn, nt = self._sums.tolist()
        if not weight:
            return 1 / (self.HALF + rows)
        mean_n, mean_t = n / weight, t / weight
        prior = mean_t / (self.HALF + mean_n)
        variance, covariance = nn - n * mean_n, nt - n * mean_t
        slope = (covariance + self.WEIGHT * prior) / (variance + self.WEIGHT)
        slope = min(max(slope, 0.0), mean_t / mean_n)  # neither a row nor a step without rows takes less than no time
        at_rows = mean_t + slope * (rows - mean_n)
        return slope / at_rows if at_rows > 0 else 1.0


def worth_guessing(chances_NK: np.ndarray, rows: int, slope: float, room: int) -> np.ndarray:
    """How many guesses of each sequence [N] are worth their time. Without any the step has `rows` rows, and a row more
    adds the share `slope` to its time; at most `room` rows may come to it.

    All sequences pay for a guess and one gains by it. It is made if that one becomes faster, in proportion to how fast
    it would be without, by more than all of them together become slower in proportion: proportional fairness (Kelly,
    1997), which maximises the sum of the logarithms of rates. Most tokens a second would be another rule: it lets
    sequences that are easily guessed slow down the others.
    """
    tokens_NK = 1 + np.cumsum(chances_NK, axis=1)
    gains_C = np.log1p(chances_NK / (tokens_NK - chances_NK)).ravel()
    # Guesses of one sequence have falling gains: sorted and stable, each comes after those that it needs.
    order_C = np.argsort(-gains_C, kind="stable")[: max(room, 0)]
    pays_C = gains_C[order_C] > rows * slope / (1 + slope * np.arange(len(order_C)))
    count = len(pays_C) if pays_C.all() else int(np.argmin(pays_C))
    taken_N: np.ndarray = np.bincount(order_C[:count] // chances_NK.shape[1], minlength=len(chances_NK))
    return taken_N
