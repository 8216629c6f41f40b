from __future__ import annotations

from enginecore.frontend.stop import StopAutomaton, StopChecker
from hypothesis import given
from hypothesis import strategies as st

STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character, the definition: the first moment at which the text ends in a stop string."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    checker = StopChecker(StopAutomaton(stops), include=include)
    shown = []
    for piece in pieces:
        text, stop = checker.feed(piece)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, checker.finish()], None


@given(st.lists(st.text("abcd", max_size=6), max_size=20), STOPS, st.booleans())
def test_any_cut_into_pieces_gives_the_definition(pieces: list[str], stops: list[str], include: bool) -> None:
    shown, stop = run(pieces, stops, include)
    assert ("".join(shown), stop) == oracle("".join(pieces), stops, include)


@given(st.text("ab", max_size=40), STOPS)
def test_nothing_of_a_stop_string_is_ever_shown(text: str, stops: list[str]) -> None:
    shown, _ = run(list(text), stops)
    final = oracle(text, stops, False)[0]
    so_far = ""
    for piece in shown:
        so_far += piece
        assert final.startswith(so_far)


def test_single_stop_equals_split() -> None:
    text = "The quick brown fox jumps over the lazy dog. Ünïcode 😀 too."
    for start in range(0, len(text) - 6):
        for length in range(1, 7):
            stop = text[start : start + length]
            shown, found = run(list(text), [stop])
            assert "".join(shown) == text.split(stop)[0] and found == stop


def test_held_back_text_is_released_when_it_leads_nowhere() -> None:
    checker = StopChecker(StopAutomaton(["END"]))
    assert checker.feed("xEN") == ("x", None)
    assert checker.feed("OUGH E") == ("ENOUGH ", None)
    assert checker.finish() == "E"


def test_include_shows_at_once_and_keeps_the_stop_string() -> None:
    checker = StopChecker(StopAutomaton(["END"]), include=True)
    assert checker.feed("xEN") == ("xEN", None)
    assert checker.feed("Dy") == ("D", "END")


def test_a_stop_that_may_not_count_yet_is_shown() -> None:
    checker = StopChecker(StopAutomaton(["ab"]))
    assert checker.feed("ab", may_stop=False) == ("ab", None)
    assert checker.feed("xab") == ("x", "ab")


def test_work_is_linear() -> None:
    """A long stop string that keeps almost matching must not be compared again and again: count automaton steps."""
    automaton = StopAutomaton(["a" * 3000 + "b"])
    checker = StopChecker(automaton)
    steps = 0
    original = automaton.fail

    class Counting(list):  # type: ignore[type-arg]
        def __getitem__(self, index: int) -> int:  # type: ignore[override]
            nonlocal steps
            steps += 1
            return original[index]

    automaton.fail = Counting(original)
    for _ in range(6000):
        checker.feed("a")
    assert steps <= 6000
