"""POST /v1/score and /v1/rerank: how well texts go together."""

from __future__ import annotations

import functools
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from enginecore.errors import ParameterError
from enginecore.frontend.input_processor import Prompt
from enginecore.frontend.pooling import PoolingOutput, PreparedPooling
from enginecore.frontend.scoring import Scoring, pair_up, prepare_scoring
from enginecore.server.body import checked
from enginecore.server.pooled import (
    answer,
    check_count,
    head,
    pooling_input,
    read_body,
    run_pooling,
    split_inputs,
    usage,
)
from enginecore.server.pooling_protocol import (
    UNSUPPORTED_POOLING,
    UNSUPPORTED_RERANK,
    RerankRequest,
    ScoreRequest,
)
from enginecore.server.state import ServerState


async def score(state: ServerState, request: Request) -> Response:
    """A score of one text with each of others, or of each with its own."""
    body = await read_body(state, request, ScoreRequest, UNSUPPORTED_POOLING)

    def split() -> list[list[Prompt]]:
        sides = (split_inputs(body.text_1, "text_1"), split_inputs(body.text_2, "text_2"))
        return [[text for text, _ in side] for side in sides]

    firsts, seconds = await checked(request, split)
    scores, outputs = await _run(state, request, body, firsts, seconds, ("text_1", "text_2"))

    def build() -> dict[str, Any]:
        data = [{"index": index, "object": "score", "score": value} for index, value in enumerate(scores)]
        return {**head(state, request, "score"), "data": data, "usage": usage(outputs)}

    return await answer(state, build)


async def rerank(state: ServerState, request: Request) -> Response:
    """Documents in the order in which they answer a query, best first."""
    body = await read_body(state, request, RerankRequest, UNSUPPORTED_RERANK)
    if body.top_n < 0:
        raise ParameterError(f"top_n must be at least 0, got {body.top_n}", param="top_n")
    if not isinstance(body.query, str) or not body.query:
        raise ParameterError("query must be a text that is not empty", param="query")
    documents = await checked(request, functools.partial(_documents, body.documents))
    scores, outputs = await _run(state, request, body, [body.query], list(documents), ("query", "documents"))

    def build() -> dict[str, Any]:
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = []
        for index in order[: body.top_n or None]:
            entry: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if body.return_documents:
                entry["document"] = {"text": documents[index]}
            results.append(entry)
        start = head(state, request, "rerank")
        return {"id": start["id"], "model": start["model"], "usage": usage(outputs), "results": results}

    return await answer(state, build)


def _documents(value: Any) -> list[str]:
    """The texts of `documents`."""
    if not isinstance(value, list) or not value:
        raise ParameterError("documents must be a list of texts that is not empty", param="documents")
    check_count(len(value), "documents")
    found = []
    for index, item in enumerate(value):
        text = item.get("text") if isinstance(item, dict) else item
        if not isinstance(text, str) or not text:
            raise ParameterError(
                'each of documents must be a text that is not empty, or {"text": TEXT}', param=f"documents[{index}]"
            )
        found.append(text)
    return found


async def _run(
    state: ServerState, request: Request, body: ScoreRequest | RerankRequest, firsts: list[Prompt],
    seconds: list[Prompt], names: tuple[str, str],
) -> tuple[list[float], list[PoolingOutput]]:  # fmt: skip
    """(the score of each pair, what was run for them)."""
    plan: list[Scoring] = []

    def prepare() -> list[PreparedPooling]:
        scoring = prepare_scoring(
            pooling_input(state), firsts, seconds, truncate=body.truncate_prompt_tokens,
            activate=body.use_activation, priority=body.priority, params=names,
        )  # fmt: skip
        plan.append(scoring)
        return scoring.requests

    pair_up(firsts, seconds)
    outputs = await run_pooling(state, request, prepare, len(firsts) + len(seconds))
    return plan[0].scores(outputs), outputs
