"""The `usage` object."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from enginecore.frontend.outputs import RequestOutput


class Usage:
    """Counts over the prompts of a request; each prompt counts once, whatever its n. Updated as outputs arrive."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int, int]] = {}

    def update(self, key: int, output: RequestOutput) -> None:
        """The newest figures of a prompt (they are totals, not deltas)."""
        figures = (len(output.prompt_token_ids), output.num_generated_tokens, output.num_cached_tokens)
        self._prompts[key] = figures

    def body(self) -> dict[str, Any]:
        """The object so far."""
        prompt, completion, cached = (sum(column) for column in zip(*self._prompts.values(), strict=True))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


def usage_of(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """The object of finished prompts."""
    usage = Usage()
    for key, output in enumerate(outputs):
        usage.update(key, output)
    return usage.body()
