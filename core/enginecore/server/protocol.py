"""The request bodies, as schemas. Names and meaning follow OpenAI's API and vLLM's extensions to it.

Fields that are accepted and change nothing: user, metadata, safety_identifier, prompt_cache_key,
spaces_between_special_tokens. Fields in `UNSUPPORTED_*` are refused with a 400 unless they have one of the values
listed, which ask for nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: bool | None = False


class SamplingFields(msgspec.Struct, kw_only=True):
    """What /v1/completions and /v1/chat/completions share."""

    model: str | None = None
    n: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    cache_salt: str | None = None
    skip_reading_prefix_cache: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    structured_outputs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    priority: int = 0
    user: str | None = None
    metadata: dict[str, Any] | None = None


class CompletionRequest(SamplingFields, kw_only=True):
    """`prompt`: text, a list of texts, token ids, or a list of token-id lists."""

    prompt: Any = None
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None


class ChatRequest(SamplingFields, kw_only=True):
    messages: Any = None
    logprobs: bool = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    thinking_token_budget: int | None = None
    include_reasoning: bool = True
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    echo: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


def field_names(schema: type[msgspec.Struct]) -> frozenset[str]:
    """The members that a body of this kind may have."""
    return frozenset(schema.__struct_fields__)


#: Field -> values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "chat_template": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "logits_processors": ([],),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "mm_processor_kwargs": ({},),
    "documents": ([],),
    "service_tier": ("auto", "default"),
    "store": (False,),
}
UNSUPPORTED_COMPLETION: dict[str, tuple[Any, ...]] = {
    **_UNSUPPORTED,
    "suffix": ("",),
    "prompt_embeds": (),
    "max_completion_tokens": (),
    "messages": (),
}
UNSUPPORTED_CHAT: dict[str, tuple[Any, ...]] = {
    **_UNSUPPORTED,
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none",),
    "verbosity": ("medium",),
    "best_of": (1,),
    "prompt": (),
}
UNSUPPORTED_TOKENIZE: dict[str, tuple[Any, ...]] = {"chat_template": ()}
