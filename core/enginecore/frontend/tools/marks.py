"""Finding marks in text that arrives in pieces."""

from __future__ import annotations

import re

from enginecore.frontend.stop import StopAutomaton


class MarkFinder:
    """Passes text through until a mark is complete. The end of the text that may still become a mark is held back.

    Linear in the text: one automaton step a character, and text without a mark's first character passes at once.
    """

    __slots__ = ("_automaton", "_first", "_held", "_state")

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        first = "".join(map(re.escape, sorted(automaton.first_chars)))
        self._first = re.compile(f"[{first}]" if first else "(?!)")
        self._state = 0
        self._held = ""

    def feed(self, text: str, start: int) -> tuple[str, str | None, int]:
        """(text that is no mark, the mark found or None, where in `text` to go on) from `start` on."""
        automaton, state, position = self._automaton, self._state, start
        while position < len(text):
            if not state:
                found = self._first.search(text, position)
                if found is None:
                    break
                position = found.start()
            state = automaton.step(state, text[position])
            position += 1
            mark = automaton.found[state]
            if mark is not None:
                passed = self._held + text[start:position]
                self._held, self._state = "", 0
                return passed[: len(passed) - len(mark)], mark, position
        self._state = state
        passed = self._held + text[start:]
        cut = len(passed) - automaton.depth[state]
        self._held = passed[cut:]
        return passed[:cut], None, len(text)

    def finish(self) -> str:
        """What was held back."""
        held, self._held, self._state = self._held, "", 0
        return held
