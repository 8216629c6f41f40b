"""What a model is and needs, found before its weights are read.

transformers' class is built on the meta device and run once on a few tokens there. Our attention function sees every
attention call with its real settings, whatever the architecture calls them in its config. Well-known decoders have a
skeleton instead (`enginecore.models.skeleton`), which needs none of transformers and says the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from enginecore.device.capabilities import AttentionQuery
from enginecore.device.memory import KVCacheSpec
from enginecore.errors import ModelError, UnsupportedError
from enginecore.models.adapter_slots import adaptable_linears
from enginecore.models.bridge import AttentionCall, build_on_meta, call_model
from enginecore.models.kv_layout import LATENT
from enginecore.models.quantized_config import config_reasons
from enginecore.models.skeleton import Skeleton, build_skeleton
from enginecore.models.store import ModelFiles

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_TRACE_TOKENS = 5

#: Entries of `layer_types` whose whole meaning reaches the attention function.
_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}

#: Rotary kinds whose angles depend on how long the longest text of a batch is.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model and its attention calls. `weight_bytes` is of the weights in `dtype`, tied ones once."""

    model_type: str
    model_class: str
    dtype: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int
    num_parameters: int
    weight_bytes: int
    calls: tuple[AttentionCall, ...]
    #: (name, outputs, inputs) of the linear modules that may have adapters.
    linears: tuple[tuple[str, int, int], ...] = ()

    def attention_queries(self, block_size: int, kv_dtype: str | None = None) -> list[AttentionQuery]:
        """One query for each kind of attention call, for `AttentionBackend.supports`."""
        queries = [
            AttentionQuery(
                dtype=self.dtype,
                kv_dtype=kv_dtype or self.dtype,
                head_size=call.head_size,
                num_heads=call.num_heads,
                num_kv_heads=call.num_kv_heads,
                block_size=block_size,
                features=call.features,
            )
            for call in self.calls
            if call.latent is None  # those are ops with references, which every device has
        ]
        return list(dict.fromkeys(queries))

    def latent_reasons(self, kv_dtype: str) -> list[str]:
        """Why a cache in `kv_dtype` is not possible for attention over latents."""
        if kv_dtype == self.dtype or all(call.latent is None for call in self.calls):
            return []
        return [f"latents are cached in {self.dtype}, as activations are, not in {kv_dtype}"]

    def kv_specs(self, block_size: int, kv_dtype: str | None = None) -> list[KVCacheSpec]:
        """One spec for each page shape. A model's caches are listed in the order of `calls`, whatever their spec."""
        groups: dict[tuple[int, int, str], int] = {}
        for call in self.calls:
            key = (call.num_kv_heads, call.head_size, "full" if call.latent is None else LATENT)
            groups[key] = groups.get(key, 0) + 1
        return [
            KVCacheSpec(
                num_layers=count,
                num_kv_heads=heads,
                head_size=size,
                dtype=kv_dtype or self.dtype,
                block_size=block_size,
                kind=kind,
            )
            for (heads, size, kind), count in groups.items()
        ]


def inspect_model(files: ModelFiles, dtype: str) -> ModelShape:
    """The shape of a model in `dtype` ("float32", "bfloat16", "float16").

    Raises ModelError when the config cannot be understood, and UnsupportedError with every reason at once when
    enginecore cannot run such a model correctly on any device.
    """
    return inspect_meta(files, dtype, skeleton=True)[0]


def inspect_meta(
    files: ModelFiles, dtype: str, *, skeleton: bool = False
) -> tuple[ModelShape, PreTrainedModel | Skeleton]:
    """`inspect_model`, and the model on meta that it looked at: with `skeleton` a skeleton where there is one."""
    bare = build_skeleton(files.config, dtype) if skeleton else None
    if bare is not None:
        return _shape(bare, files.config["model_type"], bare.model_class, dtype, bare.calls, bare.config), bare
    config = make_config(files)
    reasons = _config_reasons(config, files)
    if reasons:
        raise _unsupported(files, reasons)
    model = _build(files, config, dtype)
    calls, vocab_size, reasons = _trace(model)
    text = config.get_text_config()
    reasons += _call_reasons(calls, text)
    if reasons:
        raise _unsupported(files, reasons)
    shape = _shape(model, config.model_type, type(model).__name__, dtype, tuple(calls), text)
    return replace(shape, vocab_size=vocab_size), model


def _shape(
    model: nn.Module, model_type: str, model_class: str, dtype: str, calls: tuple[AttentionCall, ...], text: Any
) -> ModelShape:
    """What a model on meta, whose text has the config `text`, looks like."""
    parameters = {id(parameter): parameter for parameter in model.parameters()}.values()
    return ModelShape(
        model_type=model_type,
        model_class=model_class,
        dtype=dtype,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        num_layers=text.num_hidden_layers,
        max_positions=max_positions(text),
        num_parameters=sum(parameter.numel() for parameter in parameters),
        weight_bytes=sum(parameter.numel() * parameter.itemsize for parameter in parameters),
        calls=calls,
        linears=adaptable_linears(model),
    )


def max_positions(config: Any) -> int:
    """The longest text that the model was made for, in tokens."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelError("the model's config.json does not say how many positions it has (max_position_embeddings)")


def default_dtype(config: dict[str, Any]) -> str | None:
    """The dtype that a config.json names for its weights, None when it names none that we serve."""
    inner = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    for place in (config, inner or {}):
        name = str(place.get("dtype") or place.get("torch_dtype") or "").removeprefix("torch.")
        if name in ("float32", "bfloat16", "float16"):
            return name
    return None


def make_config(files: ModelFiles) -> PreTrainedConfig:
    """transformers' config object for a model's config.json."""
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    values = dict(files.config)
    model_type = values.pop("model_type", None)
    try:
        if files.trust_remote_code and values.get("auto_map"):
            return AutoConfig.from_pretrained(files.path, trust_remote_code=True)
        if not isinstance(model_type, str):
            raise ModelError(f"the config.json of {files.path} names no model_type")
        if model_type not in CONFIG_MAPPING:
            raise ModelError(
                f"{files.path}: transformers {__version__} does not know the model type {model_type[:64]!r}",
                fix="upgrade transformers, or pass --trust-remote-code when the model brings code that you trust",
            )
        return AutoConfig.for_model(model_type, **values)
    except ModelError:
        raise
    except Exception as error:  # validation in the library raises many kinds
        raise ModelError(f"the config.json of {files.path} cannot be used: {one_line(error)}") from error


def _unsupported(files: ModelFiles, reasons: list[str]) -> UnsupportedError:
    return UnsupportedError(f"model {files.name!r} cannot be served", reasons=tuple(dict.fromkeys(reasons)))


def _config_reasons(config: Any, files: ModelFiles) -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    reasons = []
    text = config.get_text_config()
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not files.trust_remote_code:
        reasons.append(f"{config.model_type!r} is not a text-generation model that transformers has a class for")
    if getattr(config, "is_encoder_decoder", False):
        reasons.append("encoder-decoder models are not supported")
    if files.config.get("quantization_config"):
        reasons += config_reasons(files.config["quantization_config"])
    unknown = sorted(set(getattr(text, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES)
    if unknown:
        reasons.append(f"layers of type {', '.join(unknown)} are not supported")
    if getattr(text, "use_bidirectional_attention", None):
        reasons.append("bidirectional attention is not supported")
    rope = getattr(text, "rope_parameters", None) or {}
    nested = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    reasons += [
        f"rotary scaling {kind!r} depends on the longest text of a batch, which is not supported"
        for kind in sorted({str(entry.get("rope_type")) for entry in nested} & _LENGTH_DEPENDENT_ROPE)
    ]
    return reasons


def _build(files: ModelFiles, config: Any, dtype: str) -> PreTrainedModel:
    try:
        model = build_on_meta(config, getattr(torch, dtype), trust_remote_code=files.trust_remote_code)
    except Exception as error:
        raise ModelError(f"transformers cannot build model {files.name!r}: {one_line(error)}") from error
    if not getattr(model, "_supports_attention_backend", False):
        raise _unsupported(files, [f"{type(model).__name__} does not let its attention be replaced"])
    return model


def one_line(error: Exception) -> str:
    """The message of an error from a library, as a part of a sentence."""
    return " ".join(str(error).split())[:300] or type(error).__name__


class _TraceStep:
    """Records attention calls; takes the place of a step."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.reasons: list[str] = []

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            self.reasons.append(f"{type(module).__name__} does not say which layer it is")
            layer = -1
        if key.shape[2] != query.shape[2]:
            self.reasons.append(f"{type(module).__name__} attends to {key.shape[2]} keys for {query.shape[2]} tokens")
        if value.shape[3] != key.shape[3]:
            self.reasons.append(f"keys of head size {key.shape[3]} with values of head size {value.shape[3]}")
        head_size, scale = query.shape[3], options.get("scaling")
        self.calls.append(
            AttentionCall(
                layer=layer,
                call=sum(call.layer == layer for call in self.calls),
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_size=head_size,
                scale=float(head_size**-0.5 if scale is None else scale),
                sliding_window=options.get("sliding_window"),
                soft_cap=options.get("softcap"),
                has_sinks=options.get("s_aux") is not None,
                causal=options.get("is_causal") is not False and getattr(module, "is_causal", True) is not False,
            )
        )
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])

    def attend_latent(self, module: Any, query_THW: torch.Tensor, rows_TW: torch.Tensor) -> torch.Tensor:
        self.calls.append(
            AttentionCall(
                layer=module.layer_idx,
                call=sum(call.layer == module.layer_idx for call in self.calls),
                num_heads=query_THW.shape[1],
                num_kv_heads=1,
                head_size=rows_TW.shape[1],
                scale=module.scaling,
                latent=module.latent,
            )
        )
        return query_THW[..., : module.latent]


def _trace(model: PreTrainedModel) -> tuple[list[AttentionCall], int, list[str]]:
    """The attention calls of one forward pass on meta, the width of the logits, and what went wrong."""
    step = _TraceStep()
    ids = torch.zeros(_TRACE_TOKENS, dtype=torch.int64, device="meta")
    experts = getattr(model.config, "_experts_implementation", None)
    if experts is not None:  # the loop over experts reads data, which meta tensors do not have
        model.set_experts_implementation("batched_mm")
    try:
        with torch.inference_mode():
            logits = call_model(model, ids, ids, ids[:2], step)
    except Exception as error:
        return [], 0, [f"{type(model).__name__} could not be traced: {one_line(error)}"]
    finally:
        if experts is not None:
            model.set_experts_implementation(experts)
    if tuple(logits.shape[:-1]) != (2,):
        step.reasons.append(f"{type(model).__name__} ignores logits_to_keep")
    return step.calls, logits.shape[-1], step.reasons


def _call_reasons(calls: list[AttentionCall], text: Any) -> list[str]:
    if not calls:
        return ["no attention call was seen"]
    reasons = []
    layers = getattr(text, "layer_types", None)
    for call in calls:
        if not call.causal:
            reasons.append("attention that is not causal is not supported")
        if layers and 0 <= call.layer < len(layers):
            windowed = layers[call.layer] == "sliding_attention"
            if windowed != (call.sliding_window is not None):
                reasons.append(f"layer {call.layer} is {layers[call.layer]} but asks for window {call.sliding_window}")
    return reasons
