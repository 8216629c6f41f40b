"""Reasoning models: where their thinking begins and ends, as data, and a parser that splits it off the answer."""

from __future__ import annotations

from dataclasses import dataclass

from enginecore.frontend.stop import StopAutomaton
from enginecore.frontend.tools.marks import MarkFinder
from enginecore.frontend.tools.pieces import AnswerParser, Piece

#: Thinking that begins later than this is none.
MAX_LEADING_SPACE = 256


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """`begin` and `end` around the thinking. `marks` in a chat template, all of them, tell that a model thinks so.
    `layout` "harmony": it is a channel, which the parser of calls takes apart."""

    name: str
    begin: str
    end: str
    marks: tuple[str, ...] = ()
    layout: str = "marks"


FORMATS = (
    ReasoningFormat(
        name="harmony", begin="<|channel|>analysis<|message|>", end="<|end|>", marks=("<|channel|>", "<|message|>"),
        layout="harmony",
    ),
    ReasoningFormat(name="mistral", begin="[THINK]", end="[/THINK]", marks=("[THINK]",)),
    ReasoningFormat(name="kimi", begin="◁think▷", end="◁/think▷", marks=("◁/think▷",)),
    ReasoningFormat(name="seed_oss", begin="<seed:think>", end="</seed:think>", marks=("<seed:think>",)),
    ReasoningFormat(
        name="granite", begin="Here is my thought process:", end="Here is my response:",
        marks=("Here is my thought process:",),
    ),
    ReasoningFormat(name="think", begin="<think>", end="</think>", marks=("</think>",)),
)  # fmt: skip
BY_NAME = {each.name: each for each in FORMATS}
ALIASES = {
    **dict.fromkeys(("qwen3", "deepseek_r1", "deepseek_v3", "glm45", "olmo3", "step3", "minimax_m2"), "think"),
    **dict.fromkeys(("openai", "gpt_oss", "openai_gptoss"), "harmony"),
    "kimi_k1": "kimi",
}


def find_reasoning(name: str) -> ReasoningFormat | None:
    """A format by its name or one that other engines give it."""
    return BY_NAME.get(ALIASES.get(name, name))


def reasoning_of_template(template: str | None) -> ReasoningFormat | None:
    """The format whose marks the chat template has."""
    if not template:
        return None
    return next((each for each in FORMATS if all(mark in template for mark in each.marks)), None)


def is_open(prompt: str, style: ReasoningFormat) -> bool:
    """Whether the prompt ends in the midst of thinking, which it has opened."""
    begun = prompt.rfind(style.begin)
    return begun >= 0 and prompt.rfind(style.end) < begun and not prompt[begun + len(style.begin) :].strip()


class ReasoningParser:
    """Splits the thinking off; what comes after it goes to `rest`. Whitespace around the marks is dropped.

    `opened`: the prompt has opened it. Otherwise it begins with its mark, at the start of the answer or not at all.
    """

    def __init__(self, style: ReasoningFormat, rest: AnswerParser, *, opened: bool) -> None:
        self._rest = rest
        self._begin = style.begin
        self._finder = MarkFinder(StopAutomaton([style.end]))
        self._state = "reasoning" if opened else "start"
        self._held = ""
        self._leading = True

    @property
    def num_calls(self) -> int:
        return self._rest.num_calls

    @property
    def in_call(self) -> bool:
        return self._rest.in_call

    def feed(self, text: str) -> list[Piece]:
        if self._state == "start":
            text = self._look_for_start(text)
        pieces: list[Piece] = []
        if self._state == "reasoning" and text:
            passed, mark, position = self._finder.feed(text, 0)
            self._reason(passed, pieces)
            if mark is None:
                return pieces
            self._state, self._held, text = "space", "", text[position:]
        if self._state == "space" and text:
            text = text.lstrip()
            self._state = "rest" if text else "space"
        if self._state == "rest" and text:
            pieces += self._rest.feed(text)
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._state == "reasoning":
            self._reason(self._finder.finish(), pieces)
        elif self._state == "start":
            pieces += self._rest.feed(self._held)
        return pieces + self._rest.finish()

    def _look_for_start(self, text: str) -> str:
        """What is left of the answer once it is certain how it begins."""
        self._held += text
        seen = self._held.lstrip()
        if len(self._held) < MAX_LEADING_SPACE and len(seen) < len(self._begin) and self._begin.startswith(seen):
            return ""
        thinks = seen.startswith(self._begin)
        self._state = "reasoning" if thinks else "rest"
        text, self._held = seen[len(self._begin) :] if thinks else self._held, ""
        return text

    def _reason(self, text: str, pieces: list[Piece]) -> None:
        """Reasoning goes out, but for whitespace at either end."""
        if self._leading:
            text = text.lstrip()
            self._leading = not text
        kept = len(text.rstrip())
        if kept:
            pieces.append(Piece("reasoning", self._held + text[:kept]))
            self._held = text[kept:]
        else:
            self._held += text


class TextParser:
    """Everything is text."""

    num_calls = 0
    in_call = False

    def feed(self, text: str) -> list[Piece]:
        return [Piece("text", text)] if text else []

    def finish(self) -> list[Piece]:
        return []
