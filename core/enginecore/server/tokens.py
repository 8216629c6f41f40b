"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from enginecore.errors import ParameterError
from enginecore.server.body import check_fields, convert, read_object
from enginecore.server.generation import json_response
from enginecore.server.protocol import UNSUPPORTED_TOKENIZE, DetokenizeRequest, TokenizeRequest, field_names
from enginecore.server.sse import unless_gone
from enginecore.server.state import ServerState


async def tokenize(state: ServerState, request: Request) -> Response:
    """Token ids of a text or of a rendered conversation. A text longer than the context is fine here."""
    raw = await read_object(request)
    return await unless_gone(request, state.llm.off_loop(_tokenize, state, raw, request.state.request_id))


async def detokenize(state: ServerState, request: Request) -> Response:
    """The text of token ids, special tokens included."""
    raw = await read_object(request)
    return await unless_gone(request, state.llm.off_loop(_detokenize, state, raw, request.state.request_id))


def _tokenize(state: ServerState, raw: dict[str, Any], request_id: str) -> Response:
    """All of it in a thread: a text may have megabytes."""
    strict = state.args.strict_fields
    check_fields(raw, field_names(TokenizeRequest), UNSUPPORTED_TOKENIZE, strict=strict, request_id=request_id)
    body = convert(raw, TokenizeRequest)
    state.adapter_of(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ParameterError("give either prompt or messages", param="prompt")
    ids = encode_prompt(state, body)
    answer: dict[str, object] = {
        "count": len(ids),
        "max_model_len": state.llm.config.max_model_len,
        "tokens": ids,
        "token_strs": [state.llm.table.text(token) for token in ids] if body.return_token_strs else None,
    }
    return json_response(answer)


def encode_prompt(state: ServerState, body: TokenizeRequest) -> list[int]:
    """Token ids of `prompt`, a text, or of the rendered `messages`. Slow: for a thread."""
    encode = state.llm.tokenizer.encode
    if body.prompt is not None:
        ids: list[int] = encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        return ids
    generation_prompt = body.add_generation_prompt
    text = state.llm.renderer.render(
        body.messages,
        tools=body.tools,
        add_generation_prompt=not body.continue_final_message if generation_prompt is None else generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=body.chat_template_kwargs,
    )
    ids = encode(text, add_special_tokens=bool(body.add_special_tokens))
    return ids


def _detokenize(state: ServerState, raw: dict[str, Any], request_id: str) -> Response:
    check_fields(raw, field_names(DetokenizeRequest), {}, strict=state.args.strict_fields, request_id=request_id)
    body = convert(raw, DetokenizeRequest)
    state.adapter_of(body.model)
    return json_response({"prompt": decode_ids(state, body.tokens)})


def decode_ids(state: ServerState, tokens: list[int], param: str = "tokens") -> str:
    """The text of token ids, which errors call `param`. Slow: for a thread."""
    size = state.llm.config.vocab_size
    if tokens and not 0 <= min(tokens) <= max(tokens) < size:
        raise ParameterError(f"{param} holds an id outside 0 to {size - 1}", param=param)
    text: str = state.llm.tokenizer.decode(tokens, skip_special_tokens=False)
    return text
