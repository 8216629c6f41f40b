"""The bodies of the pooling routes, as schemas. Names and meaning follow OpenAI's, Jina's and Cohere's APIs and vLLM's
extensions to them. `user` is accepted and changes nothing."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class PoolingFields(msgspec.Struct, kw_only=True):
    """What all of them have."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    user: str | None = None


class EmbeddingRequest(PoolingFields, kw_only=True):
    """`input`: text, a list of texts, token ids, or a list of token-id lists."""

    input: Any = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    normalize: bool | None = None
    add_special_tokens: bool | None = None


class PoolingRequest(EmbeddingRequest, kw_only=True):
    """`task`: embed, token_embed or classify. By default what the model can do that keeps most: token_embed, or
    classify."""

    task: str | None = None
    use_activation: bool | None = None


class ClassifyRequest(PoolingFields, kw_only=True):
    """`input` as for embeddings."""

    input: Any = None
    use_activation: bool | None = None
    add_special_tokens: bool | None = None


class ScoreRequest(PoolingFields, kw_only=True):
    """One text and those that it is scored with, or two lists of equal length. A text is a string, or token ids where
    vectors are compared."""

    text_1: Any = None
    text_2: Any = None
    use_activation: bool | None = None


class RerankRequest(PoolingFields, kw_only=True):
    """`documents` are strings or objects with a `text`. `top_n` 0 is all of them."""

    query: Any = None
    documents: Any = None
    top_n: int = 0
    return_documents: bool = True
    use_activation: bool | None = None


#: Field -> values that ask for nothing.
UNSUPPORTED_POOLING: dict[str, tuple[Any, ...]] = {
    "messages": (),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "softmax": (),
    "activation": (),
}
UNSUPPORTED_RERANK: dict[str, tuple[Any, ...]] = {
    **UNSUPPORTED_POOLING,
    "max_tokens_per_doc": (),
    "max_chunks_per_doc": (),
    "rank_fields": (["text"],),
}
