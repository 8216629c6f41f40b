"""From the messages of a request to the fields that the HTTP routes check, and from outputs to messages."""

from __future__ import annotations

from typing import Any

import msgspec

from enginecore.errors import ParameterError
from enginecore.frontend.detokenizer import TokenTable
from enginecore.frontend.nesting import check_nesting
from enginecore.frontend.outputs import CompletionOutput, LogprobDict, RequestOutput
from enginecore.request import SamplingParams
from enginecore.server.body import convert
from enginecore.server.grpc import enginecore_pb2 as pb
from enginecore.server.logprobs import finite, rank_of
from enginecore.server.protocol import ChatRequest, CompletionRequest
from enginecore.server.sampling import chat_params, completion_params
from enginecore.server.state import ServerState

_REASONS = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
}


def sampling_of(state: ServerState, request: pb.GenerateRequest, *, stream: bool) -> tuple[SamplingParams, bool]:
    """(parameters, whether max_tokens is the client's own). ParameterError names the field."""
    fields = {field.name: value for field, value in request.sampling.ListFields()}
    for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
        if name in fields:
            fields[name] = list(fields[name])
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token): bias for token, bias in fields["logit_bias"].items()}
    if request.HasField("structured_outputs"):
        fields["structured_outputs"] = structure_of(request.structured_outputs)
    fields["stream"] = stream
    if request.WhichOneof("prompt") != "chat":
        return completion_params(convert(fields, CompletionRequest), state.llm.defaults)
    top, limit = fields.pop("logprobs", None), state.llm.config.max_logprobs
    if top is not None:
        if top > limit:
            raise ParameterError(f"logprobs must be between 0 and {limit}", param="logprobs")
        fields |= {"logprobs": True, "top_logprobs": top}
    if "best_of" in fields:
        raise ParameterError("best_of is for prompts that are no conversation", param="best_of")
    return chat_params(convert(fields, ChatRequest), state.llm.defaults, limit)


def structure_of(given: pb.StructuredOutputs) -> dict[str, Any]:
    """The `structured_outputs` object of the HTTP API."""
    kind = given.WhichOneof("constraint")
    found: dict[str, Any] = {}
    if kind == "choice":
        found["choice"] = list(given.choice.choice)
    elif kind in ("json", "structural_tag"):
        found[kind] = _json(getattr(given, kind), f"structured_outputs.{kind}")
    elif kind is not None:
        found[kind] = getattr(given, kind)
    if given.disable_any_whitespace:
        found["disable_any_whitespace"] = True
    if given.whitespace_pattern:
        found["whitespace_pattern"] = given.whitespace_pattern
    return found


def _json(text: str, param: str) -> Any:
    raw = text.encode()
    check_nesting(raw, param)
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ParameterError(f"{param} is not valid JSON: {error}", param=param) from error


def messages_of(chat: pb.Chat) -> list[dict[str, Any]]:
    """The conversation as the renderer takes it."""
    return [{"role": message.role, "content": message.content} for message in chat.messages]


def generation_prompt(chat: pb.Chat) -> bool:
    """Whether the template is to open the answer."""
    return chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not chat.continue_final_message


def choice_of(table: TokenTable, output: CompletionOutput, top: int | None) -> pb.Choice:
    """A choice, or what is new of it. `top` is how many of the best log-probabilities were asked for, if any."""
    choice = pb.Choice(
        index=output.index,
        text=output.text,
        token_ids=output.token_ids,
        finish_reason=_REASONS.get(output.finish_reason, pb.FINISH_REASON_UNSPECIFIED),
    )
    if isinstance(output.stop_reason, str):
        choice.stop_string = output.stop_reason
    elif output.stop_reason is not None:
        choice.stop_token = output.stop_reason
    if top is not None and output.logprobs is not None:
        for token, position in zip(output.token_ids, output.logprobs, strict=False):
            choice.logprobs.append(_position(table, token, position, top))
    return choice


def prompt_logprobs_of(table: TokenTable, output: RequestOutput, top: int) -> list[pb.PositionLogprobs]:
    """One for each token of the prompt; the first has nothing before it that could have foretold it."""
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=False)
    return [
        pb.PositionLogprobs() if position is None else _position(table, token, position, top)
        for token, position in pairs
    ]


def _position(table: TokenTable, token: int, position: LogprobDict, top: int) -> pb.PositionLogprobs:
    best = sorted((rank_of(entry.rank), each) for each, entry in position.items())[:top]
    return pb.PositionLogprobs(
        chosen=_logprob(table, token, position), top=[_logprob(table, each, position) for _, each in best]
    )


def _logprob(table: TokenTable, token: int, position: LogprobDict) -> pb.TokenLogprob:
    entry = position[token]
    return pb.TokenLogprob(token_id=token, logprob=finite(entry.logprob), rank=entry.rank or 0, token=table.raw(token))


def usage_of(output: RequestOutput) -> pb.Usage:
    """Totals of one prompt."""
    return pb.Usage(
        prompt_tokens=len(output.prompt_token_ids),
        completion_tokens=output.num_generated_tokens,
        cached_tokens=output.num_cached_tokens,
    )
