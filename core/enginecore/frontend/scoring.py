"""How well texts go together: a model with one label reads a pair and says so; of any other, vectors are compared.

Each text is embedded once, however many it is compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from enginecore.errors import ParameterError
from enginecore.frontend.input_processor import Prompt
from enginecore.frontend.pooling import FloatArray, PoolingInput, PoolingOutput, PreparedPooling
from enginecore.pooling import PoolingParams


@dataclass(frozen=True)
class Scoring:
    """What has to be run for scores, and how they come of it. `pairs` are indices of `requests`: one of a pair that is
    read together (twice the same), two of texts that are compared."""

    requests: list[PreparedPooling]
    pairs: list[tuple[int, int]]

    def scores(self, outputs: Sequence[PoolingOutput]) -> list[float]:
        """One for each pair, from the outputs of `requests`."""
        return [
            float(outputs[left].data[0]) if left == right else cosine(outputs[left].data, outputs[right].data)
            for left, right in self.pairs
        ]


def cosine(a_D: FloatArray, b_D: FloatArray) -> float:
    """Cosine similarity, in float64; 0 where a vector is all zeros."""
    a, b = a_D.astype(np.float64), b_D.astype(np.float64)
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size else 0.0


def pair_up(firsts: Sequence[Prompt], seconds: Sequence[Prompt]) -> list[tuple[int, int]]:
    """Which go together: one with each, or each with its own. Raises ParameterError."""
    if not firsts or not seconds:
        name = "text_2" if firsts else "text_1"
        raise ParameterError(f"{name} must not be empty", param=name)
    if len(firsts) == 1:
        return [(0, index) for index in range(len(seconds))]
    if len(firsts) != len(seconds):
        raise ParameterError(
            f"text_1 has {len(firsts)} texts and text_2 {len(seconds)}; give one in text_1, or as many as in text_2",
            param="text_2",
        )
    return [(index, index) for index in range(len(firsts))]


def prepare_scoring(
    processor: PoolingInput, firsts: Sequence[Prompt], seconds: Sequence[Prompt], *, truncate: int | None = None,
    activate: bool | None = None, priority: int = 0, params: tuple[str, str] = ("text_1", "text_2"),
) -> Scoring:  # fmt: skip
    """Check and tokenise. `params` are the names of the two fields in errors. Slow: for a thread."""
    model = processor.model
    pairs = pair_up(firsts, seconds)
    if not model.scores_pairs and "classify" in model.tasks:
        raise ParameterError(
            f"the model has {len(model.labels)} labels and scores no pairs; a score needs one label, or vectors",
            param="model",
            code="unsupported_task",
            fix="ask at /classify",
        )
    if model.scores_pairs:
        wanted = PoolingParams(task="classify", activate=activate)
        read = [
            processor.prepare_pair(
                _text(firsts[left], params[0]), _text(seconds[right], params[1]), wanted, truncate=truncate,
                priority=priority, param=f"{params[1]}[{right}]",
            )
            for left, right in pairs
        ]  # fmt: skip
        return Scoring(read, [(index, index) for index in range(len(read))])
    embed = PoolingParams()
    names = (
        [(text, f"{params[0]}[{index}]" if len(firsts) > 1 else params[0]) for index, text in enumerate(firsts)],
        [(text, f"{params[1]}[{index}]") for index, text in enumerate(seconds)],
    )
    requests = [
        processor.prepare(text, embed, truncate=truncate, priority=priority, param=name)
        for side in names
        for text, name in side
    ]
    return Scoring(requests, [(left, len(firsts) + right) for left, right in pairs])


def _text(prompt: Prompt, param: str) -> str:
    if not isinstance(prompt, str):
        raise ParameterError(f"{param} must be text: the model reads two texts together", param=param)
    return prompt
