"""transformers' own model classes, with their attention led into the paged cache.

The library calls whatever is registered under a model's `_attn_implementation`; ours takes the step's context from the
call's own keyword arguments (`enginecore_step`), so nothing is global. No mask function is registered under the name,
which makes the library build no mask: causality and windows are the attention backend's.

Shape suffixes: T tokens of the step, E hidden size, H query heads, K key-value heads, D head size, R rows of logits,
V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from enginecore.device.attention import AttentionBackend, AttentionMetadata, AttentionParams
from enginecore.errors import ModelError
from enginecore.layers.latent import replace_latent_attention

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

IMPLEMENTATION = "enginecore"


class Step(Protocol):
    """What an attention call of the model is handed to."""

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]."""

    def attend_latent(self, module: nn.Module, query_THW: torch.Tensor, rows_TW: torch.Tensor) -> torch.Tensor:
        """Of a LatentAttention: its queries and what is to be cached -> [T, H, latent]."""


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    enginecore_step: Step | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The function that transformers calls. `options` are the call's scaling, sliding_window, softcap, s_aux..."""
    if enginecore_step is None:
        raise ModelError(f"{type(module).__name__} was called without the step's context")
    return enginecore_step.attend(module, query, key, value, options), None


def build_on_meta(config: PreTrainedConfig, dtype: torch.dtype, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model without memory: every parameter and buffer on the meta device."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention_forward)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=IMPLEMENTATION, trust_remote_code=trust_remote_code
        )
    replace_latent_attention(model)
    for name, parameter in model.named_parameters():
        if any(re.search(pattern, name) for pattern in _float32_patterns(model, dtype)):
            parameter.data = parameter.data.float()
    return model.eval().requires_grad_(False)


def _float32_patterns(model: PreTrainedModel, dtype: torch.dtype) -> set[str]:
    """Names of the parameters that the architecture wants in float32 whatever the model's dtype."""
    patterns = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ()) if dtype != torch.float32 else set()
    if dtype == torch.float16:
        patterns |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return patterns


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """One attention call of a forward pass, in the order of execution; `layer` and `call` (within it) key its cache.

    `latent`: the call is over a cache of latents, whose rows have `head_size` numbers, so many of them latent."""

    layer: int
    call: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    causal: bool = True
    latent: int | None = None

    @property
    def features(self) -> frozenset[str]:
        """Feature strings of the plugin contract that this call needs."""
        wanted = {
            "sliding_window": self.sliding_window is not None,
            "soft_cap": self.soft_cap is not None,
            "sinks": self.has_sinks,
            "non_causal": not self.causal,
        }
        return frozenset(name for name, needed in wanted.items() if needed)

    def params(self, sinks_H: torch.Tensor | None = None) -> AttentionParams:
        """What the backend is told; `sinks_H` is float32 where there are any."""
        return AttentionParams(
            scale=self.scale,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            sinks=sinks_H,
            causal=self.causal,
        )


class PagedStep:
    """The context of one step: hands each attention call the cache and settings that were found when tracing."""

    __slots__ = ("_attention", "_attentions", "_caches", "_calls", "_index", "_latent_ops", "_metadata", "_params")

    def __init__(
        self,
        attention: AttentionBackend,
        metadata: AttentionMetadata,
        kv_caches: list[torch.Tensor],
        params: list[AttentionParams | None],
        calls: tuple[AttentionCall, ...],
        attentions: Sequence[AttentionBackend] = (),
        latent_ops: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
    ) -> None:
        """`attentions`: one for each call, where they are not all `attention`; `latent_ops` are the ops latent_cache
        and latent_attention, where there are calls for them."""
        self._attention, self._metadata, self._caches = attention, metadata, kv_caches
        self._params, self._calls, self._index = params, calls, 0
        self._attentions, self._latent_ops = attentions, latent_ops

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        index = self._index
        self._index = index + 1
        params = self._params[index]
        if params is None:
            sinks = options.get("s_aux")
            sinks_H = None if sinks is None else sinks.detach().float()
            params = self._params[index] = self._calls[index].params(sinks_H)
        query_THD = query[0].transpose(0, 1).contiguous()
        key_TKD, value_TKD = _rows(key), _rows(value)
        cache, attention = self._caches[index], self._attentions[index] if self._attentions else self._attention
        attention.reshape_and_cache(key_TKD, value_TKD, cache, self._metadata.slot_mapping)
        out_THD = attention.forward(query_THD, cache, self._metadata, params)
        return out_THD.unsqueeze(0)

    def attend_latent(self, module: nn.Module, query_THW: torch.Tensor, rows_TW: torch.Tensor) -> torch.Tensor:
        index = self._index
        self._index = index + 1
        assert self._latent_ops is not None
        (write, attend), call, cache = self._latent_ops, self._calls[index], self._caches[index]
        write(rows_TW, cache, self._metadata.slot_mapping)
        out_THL: torch.Tensor = attend(query_THW, cache, self._metadata, call.scale, call.latent)
        return out_THL


def _rows(states: torch.Tensor) -> torch.Tensor:
    states_TKD = states[0].transpose(0, 1)
    return states_TKD if states_TKD.stride(-1) == 1 else states_TKD.contiguous()


class BridgedModel:
    """A forward pass over transformers' class. `calls` come from the trace of the same class on meta, and each has its
    entry of `attentions`. `latent_ops` as in PagedStep."""

    def __init__(
        self,
        model: PreTrainedModel,
        attentions: Sequence[AttentionBackend],
        calls: tuple[AttentionCall, ...],
        latent_ops: tuple[Callable[..., Any], Callable[..., Any]] | None = None,
    ) -> None:
        self._model, self._attentions, self._calls, self._latent_ops = model, attentions, calls, latent_ops
        self._params: list[AttentionParams | None] = [None] * len(calls)

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: list[torch.Tensor],
        logits_indices_R: torch.Tensor,
    ) -> torch.Tensor:
        attentions = self._attentions
        step = PagedStep(attentions[0], metadata, kv_caches, self._params, self._calls, attentions, self._latent_ops)
        return call_model(self._model, input_ids_T, positions_T, logits_indices_R, step).float()


def call_model(
    model: PreTrainedModel,
    input_ids_T: torch.Tensor,
    positions_T: torch.Tensor,
    logits_indices_R: torch.Tensor,
    step: Step,
) -> torch.Tensor:
    """logits [R, V] in the model's dtype. All sequences of the step lie in one row; their positions tell them apart."""
    output = model(
        input_ids=input_ids_T.unsqueeze(0),
        position_ids=positions_T.unsqueeze(0),
        use_cache=False,
        logits_to_keep=logits_indices_R,
        enginecore_step=step,
    )
    return output.logits[0]
