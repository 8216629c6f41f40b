"""What a request may say about the form of its answer, as it crosses from frontend to engine. Plain data."""

from __future__ import annotations

from typing import Any

import msgspec

from enginecore.errors import ParameterError

#: The ways to say what an answer must look like.
STRUCTURES = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputsParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an answer must look like: exactly one of the first six, under vLLM's names.

    `json` is a JSON schema (an object, a boolean, or either as text), `regex` a regular expression that the whole
    answer matches, `choice` a list of answers, `grammar` a grammar in Lark's notation or in GBNF, `json_object` True
    any JSON object, `structural_tag` free text with constrained parts (vLLM's and xgrammar's first form).
    Between the parts of JSON a space may stand or an indented new line; `whitespace_pattern` (a regular expression)
    says what instead, `disable_any_whitespace` that none may. What is wrong inside is found by `frontend.structured`.
    """

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        given = [name for name in STRUCTURES if getattr(self, name) is not None]
        if len(given) != 1:
            told = "has none" if not given else f"has {' and '.join(given)}"
            raise ParameterError(
                f"structured_outputs must have exactly one of {', '.join(STRUCTURES)}; it {told}",
                param="structured_outputs",
            )
        if self.json_object is False:
            raise ParameterError("json_object must be true or left out", param="structured_outputs.json_object")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise ParameterError(
                "give whitespace_pattern or disable_any_whitespace, not both",
                param="structured_outputs.whitespace_pattern",
            )

    @property
    def kind(self) -> str:
        """Which one is given."""
        return next(name for name in STRUCTURES if getattr(self, name) is not None)


def structured_outputs_of(value: dict[str, Any]) -> StructuredOutputsParams:
    """From the dict that a client sends. ParameterError names the field that does not fit."""
    unknown = sorted(set(value) - set(StructuredOutputsParams.__struct_fields__))
    if unknown:
        raise ParameterError(
            f"structured_outputs has no field {unknown[0][:64]!r}", param=f"structured_outputs.{unknown[0][:64]}"
        )
    try:
        return msgspec.convert({name: each for name, each in value.items() if each is not None},
                               StructuredOutputsParams)  # fmt: skip
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ParameterError):
            raise error.__cause__ from None
        field = str(error).partition("`$.")[2].partition("`")[0].partition("[")[0]
        name = f"structured_outputs.{field}" if field else "structured_outputs"
        raise ParameterError(f"{name}: {str(error).partition(' - at ')[0]}", param=name) from error


class Thinking(msgspec.Struct, array_like=True):
    """Where a model's thinking ends: after `budget` tokens the tokens of `end` are forced. It begins with the answer
    when the prompt has opened it (`begin` empty), else with the tokens of `begin`."""

    begin: list[int]
    end: list[int]
    budget: int
