"""A bound on a reasoning model's thinking: when it is spent, the tokens that end the thinking are forced.

Shape suffix: L length of a sequence.
"""

from __future__ import annotations

import numpy as np

from enginecore.constraints import Thinking


class ThinkingBudget:
    """Follows one sequence. Everything follows from its tokens, so it can be built anew at any time."""

    def __init__(self, thinking: Thinking, num_prompt: int) -> None:
        self._thinking = thinking
        self._seen = num_prompt
        self._start: int | None = None if thinking.begin else num_prompt
        self._over = False

    def forced(self, tokens_L: np.ndarray) -> int | None:
        """The token that must come next, None when the choice is free. `tokens_L` are all tokens so far."""
        begin, end = self._thinking.begin, self._thinking.end
        while self._seen < len(tokens_L) and not self._over:
            self._seen += 1
            if self._start is None:
                if self._ends_with(tokens_L, begin):
                    self._start = self._seen
            elif self._seen - self._start >= len(end):
                self._over = self._ends_with(tokens_L, end)
        if self._start is None or self._over:
            return None
        written = self._written(tokens_L)
        if self._seen - self._start - written < self._thinking.budget:
            return None
        return end[written]

    def _ends_with(self, tokens_L: np.ndarray, mark: list[int]) -> bool:
        return bool(tokens_L[max(0, self._seen - len(mark)) : self._seen].tolist() == mark)

    def _written(self, tokens_L: np.ndarray) -> int:
        """How much of the end mark the sequence ends with."""
        assert self._start is not None
        most = min(len(self._thinking.end) - 1, self._seen - self._start)
        return next((count for count in range(most, 0, -1)
                     if self._ends_with(tokens_L, self._thinking.end[:count])), 0)  # fmt: skip
