"""The messages of Embed: texts in, vectors out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from enginecore.errors import ParameterError
from enginecore.frontend.input_processor import Prompt
from enginecore.frontend.pooling import PoolingOutput, PreparedPooling
from enginecore.pooling import PoolingParams
from enginecore.server.grpc import enginecore_pb2 as pb
from enginecore.server.pooled import check_count, check_numbers, pooling_input
from enginecore.server.state import ServerState


def texts_of(state: ServerState, request: pb.EmbedRequest) -> tuple[Callable[[], list[PreparedPooling]], int]:
    """(what checks and tokenises all texts, in a thread; how many there are). ParameterError names the field."""
    processor = pooling_input(state)
    params = PoolingParams(
        dimensions=request.dimensions if request.HasField("dimensions") else None,
        normalize=request.normalize if request.HasField("normalize") else None,
    )
    processor.model.check(params)
    if bool(request.texts) == bool(request.token_ids):
        raise ParameterError("give either texts or token_ids", param="texts")
    field = "texts" if request.texts else "token_ids"
    inputs: list[Prompt] = list(request.texts) or [list(each.ids) for each in request.token_ids]
    check_count(len(inputs), field)
    truncate = request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None
    special = request.add_special_tokens if request.HasField("add_special_tokens") else True

    def prepare() -> list[PreparedPooling]:
        check_numbers(len(inputs) * processor.model.dimensions)
        return [
            processor.prepare(
                text,
                params,
                truncate=truncate,
                add_special_tokens=special,
                priority=request.priority,
                param=f"{field}[{index}]",
            )
            for index, text in enumerate(inputs)
        ]

    return prepare, len(inputs)


def answer_of(state: ServerState, request_id: str, outputs: Sequence[PoolingOutput]) -> pb.EmbedResponse:
    """The answer. Slow for thousands of vectors: for a thread."""
    return pb.EmbedResponse(
        request_id=request_id,
        model=state.model_name,
        embeddings=[pb.Embedding(values=output.data.tolist()) for output in outputs],
        usage=pb.Usage(prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs)),
    )
