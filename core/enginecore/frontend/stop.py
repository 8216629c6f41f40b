"""Stop strings, found across token boundaries without ever showing a part of one.

An Aho-Corasick automaton runs over the text, one character at a time. Its state is the longest end of the text that
starts some stop string, so the state's depth is exactly how many characters have to be held back, and the work is
linear in the text whatever the number and length of the stop strings. The string that is complete first wins; of
several complete at the same character, the longest. The result does not depend on how the text was cut into pieces.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopAutomaton:
    """The automaton of a set of non-empty strings; immutable, so sequences may share it."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.fail: list[int] = [0]
        self.depth: list[int] = [0]
        #: The longest stop string that ends at a state, or None.
        self.found: list[str | None] = [None]
        for stop in stops:
            state = 0
            for char in stop:
                state = self._child(state, char)
            self.found[state] = stop
        self.first_chars = frozenset(self.next[0])
        self._link()

    def _child(self, state: int, char: str) -> int:
        child = self.next[state].get(char)
        if child is None:
            child = self.next[state][char] = len(self.next)
            self.next.append({})
            self.fail.append(0)
            self.depth.append(self.depth[state] + 1)
            self.found.append(None)
        return child

    def _link(self) -> None:
        """Failure links, breadth first: where to go on when the next character does not fit."""
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self.next[state].items():
                queue.append(child)
                self.fail[child] = self.step(self.fail[state], char)
                if self.found[child] is None:
                    self.found[child] = self.found[self.fail[child]]

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while state and char not in self.next[state]:
            state = self.fail[state]
        return self.next[state].get(char, 0)


class StopChecker:
    """Follows the text of one sequence. With `include` the stop string is part of the output, so nothing is held
    back."""

    __slots__ = ("_automaton", "_held", "_include", "_state")

    def __init__(self, automaton: StopAutomaton, *, include: bool = False) -> None:
        self._automaton = automaton
        self._include = include
        self._state = 0
        self._held = ""

    def feed(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Take more text; returns (text that may be shown now, the stop string that ended the output or None).

        After a stop nothing more may be fed. With `may_stop` False a string that ends within `text` does not count.
        """
        automaton = self._automaton
        if not self._state and automaton.first_chars.isdisjoint(text):
            return text, None
        state = self._state
        for position, char in enumerate(text, 1):
            state = automaton.step(state, char)
            stop = automaton.found[state]
            if stop is not None and may_stop:
                shown = self._held + text[:position]
                self._held = ""
                return (shown if self._include else shown[: len(shown) - len(stop)]), stop
        while state and not automaton.next[state]:  # a complete string that did not count starts nothing itself
            state = automaton.fail[state]
        self._state = state
        if self._include:
            return text, None
        text = self._held + text
        cut = len(text) - automaton.depth[state]
        self._held = text[cut:]
        return text[:cut], None

    def finish(self) -> str:
        """The text is over: what was held back was no stop string after all."""
        held, self._held, self._state = self._held, "", 0
        return held
