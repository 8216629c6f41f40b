"""From the fields of a request to sampling parameters."""

from __future__ import annotations

import re
from typing import Any

from enginecore.constraints import structured_outputs_of
from enginecore.errors import ParameterError
from enginecore.frontend.tools.request import answer_structure
from enginecore.request import INT32_MAX, MAX_BEAM_WIDTH, BeamOptions, SamplingParams
from enginecore.server.protocol import ChatRequest, CompletionRequest, SamplingFields

#: The default of /v1/completions. A chat may use all the context that is left.
COMPLETION_MAX_TOKENS = 16

_SAME_NAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "seed", "stop", "stop_token_ids", "bad_words", "include_stop_str_in_output", "ignore_eos", "min_tokens",
    "prompt_logprobs", "skip_special_tokens", "truncate_prompt_tokens", "allowed_token_ids",
    "skip_reading_prefix_cache",
)  # fmt: skip
_TOKEN_ID = re.compile(r"-?[0-9]{1,20}")


def _common(request: SamplingFields, defaults: dict[str, Any]) -> dict[str, Any]:
    values = {} if request.use_beam_search else dict(defaults)  # defaults of sampling have no place in a search
    for name in _SAME_NAME:
        value = getattr(request, name)
        if value is not None:
            values[name] = value
    if request.logit_bias is not None:
        values["logit_bias"] = {_bias_key(key): bias for key, bias in request.logit_bias.items()}
    if request.structured_outputs is not None:
        values["structured_outputs"] = structured_outputs_of(request.structured_outputs)
    beam = _beam(request)
    if beam is not None:
        values["beam"] = beam
    return values


def _beam(request: SamplingFields) -> BeamOptions | None:
    """With use_beam_search, the n best answers of best_of beams (by default n)."""
    if not request.use_beam_search:
        for name, neutral in (("length_penalty", (None, 1)), ("early_stopping", (None, False))):
            if getattr(request, name) not in neutral:
                raise ParameterError(f"{name} needs use_beam_search to be true", param=name)
        return None
    name = "n" if getattr(request, "best_of", None) is None else "best_of"
    width = getattr(request, name)
    if width is not None and not 1 <= width <= MAX_BEAM_WIDTH:
        raise ParameterError(f"a search may have 1 to {MAX_BEAM_WIDTH} beams", param=name)
    return BeamOptions(
        1 if width is None else width,
        1.0 if request.length_penalty is None else request.length_penalty,
        False if request.early_stopping is None else request.early_stopping,
    )


def _bias_key(key: str) -> int:
    if not _TOKEN_ID.fullmatch(key):
        raise ParameterError(f"logit_bias: the key {key[:32]!r} is not a token id", param="logit_bias")
    return int(key)


def _check_stream(request: SamplingFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise ParameterError("stream_options needs stream to be true", param="stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise ParameterError("prompt_logprobs is not available in a stream", param="prompt_logprobs")


def _positive(name: str, value: int | None, *, zero: bool = False) -> None:
    low = 0 if zero else 1
    if value is not None and not low <= value <= INT32_MAX:
        shown = value if abs(value) < 10**20 else "a number of over 20 digits"
        raise ParameterError(f"{name} must be between {low} and {INT32_MAX}, got {shown}", param=name)


def _at_least_min_tokens(default: int, request: SamplingFields) -> int:
    """A default limit gives way to a larger min_tokens (a senseless one is refused under its own name later)."""
    return max(default, min(request.min_tokens or 0, INT32_MAX))


def completion_params(request: CompletionRequest, defaults: dict[str, Any]) -> tuple[SamplingParams, bool]:
    """(parameters, whether the client asked for max_tokens itself)."""
    _check_stream(request)
    values = _common(request, defaults)
    zero_allowed = request.echo or request.prompt_logprobs is not None
    _positive("max_tokens", request.max_tokens, zero=zero_allowed)
    if request.max_tokens is not None:
        values["max_tokens"] = request.max_tokens
    else:
        values["max_tokens"] = _at_least_min_tokens(defaults.get("max_tokens") or COMPLETION_MAX_TOKENS, request)
    if request.logprobs is not None:
        values["logprobs"] = request.logprobs
        if request.echo and request.prompt_logprobs is None:
            values["prompt_logprobs"] = request.logprobs
    if request.best_of is not None and not request.use_beam_search:
        values["best_of"] = request.best_of
    values["structured_outputs"], _ = answer_structure(request.response_format, values.get("structured_outputs"))
    params = SamplingParams(**values)
    if request.stream and (params.best_of or params.n) > params.n:
        raise ParameterError("a stream cannot have best_of greater than n", param="best_of")
    return params, request.max_tokens is not None


def chat_params(request: ChatRequest, defaults: dict[str, Any], max_logprobs: int) -> tuple[SamplingParams, bool]:
    """(parameters, whether the client asked for max_tokens itself)."""
    _check_stream(request)
    values = _common(request, defaults)
    _positive("max_completion_tokens", request.max_completion_tokens)
    _positive("max_tokens", request.max_tokens)
    asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    if asked is not None:
        values["max_tokens"] = asked
    elif defaults.get("max_tokens") is not None:
        values["max_tokens"] = _at_least_min_tokens(defaults["max_tokens"], request)
    else:
        values["max_tokens"] = None
    if request.top_logprobs is not None:
        if not request.logprobs:
            raise ParameterError("top_logprobs needs logprobs to be true", param="top_logprobs")
        if not 0 <= request.top_logprobs <= max_logprobs:
            raise ParameterError(f"top_logprobs must be between 0 and {max_logprobs}", param="top_logprobs")
    if request.logprobs:
        values["logprobs"] = request.top_logprobs or 0
    if request.thinking_token_budget is not None:
        values["thinking_token_budget"] = request.thinking_token_budget
    return SamplingParams(**values), asked is not None


def num_rows(params: SamplingParams) -> int:
    """Sequences that the engine runs for one prompt."""
    return params.beam.width if params.beam is not None else params.best_of or params.n
