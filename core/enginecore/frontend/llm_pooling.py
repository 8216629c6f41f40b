"""The part of `LLM` for pooling models: vectors, classes and scores of lists of texts, offline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from enginecore.errors import ParameterError
from enginecore.frontend.input_processor import InputProcessor, Prompt
from enginecore.frontend.pooling import FloatArray, PoolingInput, PoolingOutput, PreparedPooling
from enginecore.frontend.scoring import prepare_scoring
from enginecore.pooling import PoolingParams


@dataclass(slots=True)
class PooledData:
    """`data` is float32, [entries] or [tokens, entries]. `embedding`, `probs` and `score` are vLLM's views of it."""

    data: FloatArray

    @property
    def embedding(self) -> list[float]:
        values: list[float] = self.data.tolist()
        return values

    @property
    def probs(self) -> list[float]:
        return self.embedding

    @property
    def score(self) -> float:
        return float(self.data.reshape(-1)[0])


@dataclass(slots=True)
class PoolingRequestOutput:
    """One text's answer, in vLLM's shape."""

    request_id: str
    outputs: PooledData
    prompt_token_ids: list[int]
    finished: bool = True


class PoolingMethods:
    """A base of `LLM`, which owns what is named here."""

    _input: InputProcessor

    def _drive(self, prepared: Sequence[Any], show_progress: bool) -> list[Any]:
        raise NotImplementedError

    def embed(
        self, prompts: Prompt | Sequence[Prompt], pooling_params: PoolingParams | None = None, *,
        truncate_prompt_tokens: int | None = None, use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[PoolingRequestOutput]:  # fmt: skip
        """A vector for each prompt (text or token ids), in `outputs.embedding`; in the order of the prompts.

        `truncate_prompt_tokens` keeps that many first tokens of a text, -1 as many as fit; without it a text that is
        too long is refused. Raises ParameterError (a ValueError) that names the prompt, before anything runs.
        """
        return self.encode(
            prompts, pooling_params or PoolingParams(), truncate_prompt_tokens=truncate_prompt_tokens, use_tqdm=use_tqdm
        )

    def classify(
        self, prompts: Prompt | Sequence[Prompt], pooling_params: PoolingParams | None = None, *,
        truncate_prompt_tokens: int | None = None, use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[PoolingRequestOutput]:  # fmt: skip
        """What the model's head says of each prompt, in `outputs.probs`: one entry a label."""
        params = pooling_params or PoolingParams(task="classify")
        return self.encode(prompts, params, truncate_prompt_tokens=truncate_prompt_tokens, use_tqdm=use_tqdm)

    def encode(
        self, prompts: Prompt | Sequence[Prompt], pooling_params: PoolingParams, *,
        truncate_prompt_tokens: int | None = None, use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[PoolingRequestOutput]:  # fmt: skip
        """Whatever task `pooling_params` names, in `outputs.data`."""
        processor = self._pooling_input()
        prepared = [
            processor.prepare(prompt, pooling_params, truncate=truncate_prompt_tokens, param=f"prompt {index}")
            for index, prompt in enumerate(_as_list(prompts))
        ]
        return self._pooled(prepared, bool(use_tqdm))

    def score(
        self, text_1: Prompt | Sequence[Prompt], text_2: Prompt | Sequence[Prompt], *,
        truncate_prompt_tokens: int | None = None, use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[PoolingRequestOutput]:  # fmt: skip
        """How well one text goes with each of others, or each with its own, in `outputs.score`: what a model with one
        label says of the pair, or the cosine similarity of two vectors."""
        processor = self._pooling_input()
        firsts, seconds = _as_list(text_1), _as_list(text_2)
        plan = prepare_scoring(processor, firsts, seconds, truncate=truncate_prompt_tokens)
        outputs: list[PoolingOutput] = self._drive(plan.requests, bool(use_tqdm))
        return [
            PoolingRequestOutput(
                str(index), PooledData(np.array([score], np.float32)), outputs[plan.pairs[index][0]].prompt_token_ids
            )
            for index, score in enumerate(plan.scores(outputs))
        ]

    def _pooled(self, prepared: list[PreparedPooling], show_progress: bool) -> list[PoolingRequestOutput]:
        outputs: list[PoolingOutput] = self._drive(prepared, show_progress)
        return [
            PoolingRequestOutput(output.request_id, PooledData(output.data), output.prompt_token_ids)
            for output in outputs
        ]

    def _pooling_input(self) -> PoolingInput:
        if not isinstance(self._input, PoolingInput):
            raise ParameterError(
                f"the model {self._input.config.served_model_name!r} generates text and gives no vectors",
                param="model",
                fix='make the LLM with runner="pooling", or choose an embedding model',
            )
        return self._input


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """One prompt or a list of prompts, as a list. A flat list of ints is one prompt of token ids."""
    single = isinstance(prompts, (str, dict)) or (bool(prompts) and all(type(item) is int for item in prompts))
    return [prompts] if single else list(prompts)
