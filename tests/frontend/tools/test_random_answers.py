"""Random walks through the grammars of all 200 tool schemas, byte by byte: whatever a grammar accepts is valid.

No model is needed to show it, and no model is as inventive as dice.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import llguidance
import pytest
from enginecore.frontend.structured import GrammarChecker
from enginecore.frontend.tools.grammar import check_tool_schemas

TOOLS = json.loads((Path(__file__).parents[2] / "data" / "tool_schemas.json").read_text(encoding="utf-8"))
BYTES = llguidance.LLTokenizer("byte")
CLOSERS = b'"}],0'
MAX_BYTES = 2500


def random_answer(grammar: str, dice: random.Random) -> str | None:
    """A text that the grammar accepts, None when it does not end soon."""
    matcher, text = llguidance.LLMatcher(BYTES, grammar, log_level=0), bytearray()
    assert not matcher.is_error(), matcher.get_error()
    while len(text) < MAX_BYTES and not (matcher.is_accepting() and (matcher.is_stopped() or dice.random() < 0.4)):
        mask = matcher.compute_bitmask()
        allowed = [byte for byte in range(256) if mask[byte >> 3] >> (byte & 7) & 1]
        closers = [byte for byte in CLOSERS if byte in allowed]
        plain = [byte for byte in allowed if 32 <= byte < 127]
        if closers and dice.random() < (0.3 if len(text) < 300 else 0.95):
            byte = closers[0] if len(text) >= 300 else dice.choice(closers)
        else:
            byte = dice.choice(plain if plain and dice.random() < 0.9 else allowed)
        assert matcher.consume_token(byte)
        text.append(byte)
    return text.decode() if matcher.is_accepting() else None


@pytest.mark.parametrize("part", range(4))
def test_what_a_grammar_accepts_is_valid(part: int) -> None:
    checker, dice, ended = GrammarChecker(), random.Random(part), 0
    for tool in TOOLS[part::4]:
        (grammar,) = check_tool_schemas([tool], checker)
        text = random_answer(json.dumps({"grammars": [grammar]}), dice)
        if text is not None:
            ended += 1
            schema: Any = tool["function"].get("parameters") or {"type": "object", "maxProperties": 0}
            problems = [str(error) for error in
                        jsonschema_rs.validator_for(schema, validate_formats=True).iter_errors(json.loads(text))]
            assert not problems, (tool["function"]["name"], text, problems)
    assert ended >= 47, "nearly all of 50 end"
