"""One choice of a planned answer: its pieces as they come, and why it ended."""

from __future__ import annotations

import secrets
import string

from enginecore.frontend.input_processor import AnswerForm
from enginecore.frontend.outputs import CompletionOutput
from enginecore.frontend.tools.pieces import Piece, merged
from enginecore.frontend.tools.plan import Plan

_LETTERS_AND_DIGITS = string.ascii_letters + string.digits


class PlannedAnswer:
    """Takes deltas, or one whole output. `finish_reason` is the engine's until the answer turns out to be calls."""

    def __init__(self, plan: Plan, form: AnswerForm, *, with_reasoning: bool = True) -> None:
        self._parser = plan.parser(opened=form.opened, prefix=form.prefix)
        self._style = plan.style
        self._with_reasoning = with_reasoning
        self.finish_reason: str | None = None

    def feed(self, output: CompletionOutput) -> list[Piece]:
        pieces = self._parser.feed(output.text)
        if output.finish_reason is not None:
            pieces += self._parser.finish()
            self.finish_reason = output.finish_reason
            cut = isinstance(output.stop_reason, str) and self._parser.in_call
            if self._parser.num_calls and output.finish_reason == "stop" and not cut:
                self.finish_reason = "tool_calls"
        if not self._with_reasoning:
            pieces = [piece for piece in pieces if piece.kind != "reasoning"]
        return merged(pieces)

    def call_id(self) -> str:
        """A new id for a call, in the form that the model's own template expects."""
        if self._style is not None and self._style.call_id == "short":
            return "".join(secrets.choice(_LETTERS_AND_DIGITS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"
