"""A device that exists only as arithmetic. `expected_tokens` says what it must answer."""

from enginecore_sim.tokens import EXIT_PROMPT, RAISE_PROMPT, candidates, expected_tokens

__all__ = ["EXIT_PROMPT", "RAISE_PROMPT", "candidates", "expected_tokens"]
