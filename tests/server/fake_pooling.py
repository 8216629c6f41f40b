"""A server over an engine that pools by arithmetic: a text's vector counts its tokens by remainder."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from enginecore.pooling import Pooled, PoolingModel
from enginecore.request import EngineOutput, EngineRequest

from tests.frontend.toy import ToyTokenizer
from tests.server.fake_engine import FakeEngine, Running, running

EMBEDDER = PoolingModel(tasks=("embed", "token_embed"), dimensions=8, normalize=True, matryoshka=(4, 8))
CLASSIFIER = PoolingModel(tasks=("classify",), labels=("bad", "good", "odd"), activation="softmax")
CROSS = PoolingModel(tasks=("classify",), labels=("LABEL_0",), activation="sigmoid")


class PairTokenizer(ToyTokenizer):
    """Puts the end token between and behind the texts of a pair."""

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        a, b = ([*self.encode(text), 272] for text in (first, second))
        return a + b, [0] * len(a) + [1] * len(b)


def vector(token_ids: list[int], size: int) -> np.ndarray:
    """How many tokens leave each remainder, at unit length."""
    counts = np.bincount(np.array(token_ids) % size, minlength=size).astype(np.float32)
    found: np.ndarray = counts / np.linalg.norm(counts)
    return found


class FakePooling(FakeEngine):
    """Answers each request in the next step."""

    def _step(self) -> list[EngineOutput]:
        outputs = []
        for request_id, (request, *_) in list(self._live.items()):
            del self._live[request_id]
            if self.refuse is not None:
                outputs.append(EngineOutput(request_id, [], finish_reason="error", error=self.refuse))
            else:
                outputs.append(EngineOutput(request_id, [], finish_reason="stop", pooled=self._pool(request)))
        return outputs

    def _pool(self, request: EngineRequest) -> Pooled:
        model, params = self.ready.config.pooling, request.pooling
        assert model is not None and params is not None
        size = params.dimensions or model.dimensions or len(model.labels)
        data = vector(request.prompt_token_ids, size)
        if params.task == "token_embed":
            data = np.stack([vector([token], size) for token in request.prompt_token_ids])
        return Pooled(data.astype("<f4").tobytes(), list(data.shape))


def pooling_server(model: PoolingModel = EMBEDDER, **settings: Any) -> contextlib.AbstractAsyncContextManager[Running]:
    """A server over `FakePooling`; `settings` as of `running`."""
    return running(pooling=model, tokenizer=PairTokenizer(), kind=FakePooling, **settings)
