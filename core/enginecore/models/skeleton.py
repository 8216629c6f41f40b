"""Well-known decoders as bare modules on meta, from config.json alone: a model that runs fused starts without importing
transformers' classes, which takes longer than reading a small model's weights.

A skeleton has the modules, names, shapes and dtypes that transformers' class has, and the few attributes that loading
asks a model for; it cannot be called. It is made only where the meaning of every entry of the config is written down
here. Whatever else stands there (another architecture, a quantised checkpoint, another rotary scaling, an entry that
nobody knows, a value of the wrong kind) is left to transformers, and so are all complaints. Tests hold each family to
transformers' own class.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from enginecore.models.bridge import AttentionCall
from enginecore.models.skeleton_rotary import Rotary, rotary_settings

#: Those that the fused decoder has (`enginecore.models.fusion`).
ACTIVATIONS = frozenset({"silu", "swish", "gelu", "gelu_pytorch_tanh"})


@dataclass(frozen=True, kw_only=True)
class Family:
    """The models of one `model_type`. `defaults` are transformers' own of the entries that shape a model, None where
    the value follows from others; `ignored` are entries that its class does not look at."""

    model_class: str
    defaults: dict[str, Any] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    qkv_bias: bool = False
    qk_norm: bool = False
    theta: float = 1e4


_BIASES = {"attention_bias": False, "mlp_bias": False}
_WINDOWS: dict[str, Any] = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
                            "layer_types": None}  # fmt: skip

FAMILIES = {
    "llama": Family(model_class="LlamaForCausalLM", defaults=_BIASES),
    "mistral": Family(
        model_class="MistralForCausalLM",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family(
        model_class="Qwen2ForCausalLM",
        defaults={"num_key_value_heads": 32, **_WINDOWS},
        ignored=frozenset(_BIASES),
        qkv_bias=True,
    ),
    "qwen3": Family(
        model_class="Qwen3ForCausalLM",
        defaults={"num_key_value_heads": 32, "head_dim": 128, "attention_bias": False, **_WINDOWS},
        ignored=frozenset({"mlp_bias"}),
        qk_norm=True,
    ),
    "smollm3": Family(
        model_class="SmolLM3ForCausalLM",
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "use_sliding_window": False,
                  "sliding_window": None, "layer_types": None, "no_rope_layers": None, "no_rope_layer_interval": 4,
                  **_BIASES},
        ignored=frozenset({"max_window_layers"}),
        theta=2e6,
    ),
}  # fmt: skip

_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "max_position_embeddings")  # fmt: skip
_COMMON: dict[str, Any] = {"num_key_value_heads": None, "head_dim": None, "hidden_act": "silu", "rms_norm_eps": 1e-6,
                           "tie_word_embeddings": False}  # fmt: skip
_ROTARY = frozenset({"rope_parameters", "rope_scaling", "rope_theta"})
#: May be null although their default is not.
_NULLABLE = frozenset({"num_key_value_heads", "sliding_window"})
#: Entries that change nothing of a forward pass.
_NEUTRAL = frozenset(
    {"model_type", "architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache",
     "initializer_range", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "output_attentions",
     "output_hidden_states", "id2label", "label2id", "problem_type", "chunk_size_feed_forward", "is_llama_config",
     "transformers.js_config"}
)  # fmt: skip
#: Entries that are neutral as long as they have this value.
_FIXED: dict[str, Any] = {"return_dict": True, "is_encoder_decoder": False, "pretraining_tp": 1,
                          "rope_interleaved": False}  # fmt: skip
_WINDOWED, _FULL = "sliding_attention", "full_attention"


class UnknownError(Exception):
    """The config says something whose meaning is not written down here. It never leaves this module."""


def need(condition: bool) -> None:
    """UnknownError unless it holds."""
    if not condition:
        raise UnknownError


def build_skeleton(config: dict[str, Any], dtype: str) -> Skeleton | None:
    """The model of a config.json in `dtype`, or None when transformers must be asked."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return None
    try:
        settings = _settings(family, config)
        windows, rotates = _windows(settings), _rotates(settings)
        return Skeleton(family, settings, windows, rotates, getattr(torch, dtype))
    except UnknownError:
        return None


def _settings(family: Family, config: dict[str, Any]) -> SimpleNamespace:
    """Every entry with its value, defaults filled in and checked."""
    defaults = {**_COMMON, **family.defaults}
    for name, value in config.items():
        if name in _FIXED:
            need(value == _FIXED[name])
        else:
            need(name in defaults or name in _SIZES or name in _ROTARY or name in _NEUTRAL or name in family.ignored)
    values = {name: config.get(name, own) for name, own in {**dict.fromkeys(_SIZES), **defaults}.items()}
    for name, own in defaults.items():
        value = values[name]
        need(value is not None or own is None or name in _NULLABLE)
        need(not isinstance(own, bool) or isinstance(value, bool))
    settings = SimpleNamespace(**values)
    if settings.num_key_value_heads is None:
        settings.num_key_value_heads = settings.num_attention_heads
    sizes = [*(values[name] for name in _SIZES), settings.num_key_value_heads]
    need(all(type(size) is int and size > 0 for size in sizes))
    need(settings.hidden_size % settings.num_attention_heads == 0)
    need(settings.num_attention_heads % settings.num_key_value_heads == 0)
    if settings.head_dim is None:
        settings.head_dim = settings.hidden_size // settings.num_attention_heads
    need(type(settings.head_dim) is int and settings.head_dim > 0 and settings.head_dim % 2 == 0)
    need(isinstance(settings.rms_norm_eps, float) and settings.hidden_act in ACTIVATIONS)
    settings.rope = rotary_settings(config, family.theta, settings.max_position_embeddings, need)
    return settings


def _rotates(settings: SimpleNamespace) -> list[bool]:
    """Which layers turn their queries and keys."""
    count = settings.num_hidden_layers
    if not hasattr(settings, "no_rope_layers"):
        return [True] * count
    given, interval = settings.no_rope_layers, settings.no_rope_layer_interval
    if given is None:
        need(type(interval) is int and interval > 0)
        return [(layer + 1) % interval != 0 for layer in range(count)]
    need(isinstance(given, list) and len(given) >= count and all(value in (0, 1) for value in given))
    return [bool(value) for value in given[:count]]


def _windows(settings: SimpleNamespace) -> list[int | None]:
    """Of each layer."""
    count, window = settings.num_hidden_layers, getattr(settings, "sliding_window", None)
    need(window is None or (type(window) is int and window > 0))
    if not getattr(settings, "use_sliding_window", True):
        window = None
    if not hasattr(settings, "layer_types"):
        return [window] * count
    kinds = settings.layer_types
    if kinds is None and hasattr(settings, "no_rope_layers"):
        kinds = [_FULL if window is None or rotates else _WINDOWED for rotates in _rotates(settings)]
    elif kinds is None:
        first = settings.max_window_layers if window is not None else count
        need(type(first) is int)
        kinds = [_WINDOWED if layer >= first else _FULL for layer in range(count)]
    need(isinstance(kinds, list) and len(kinds) == count and all(kind in (_FULL, _WINDOWED) for kind in kinds))
    need(window is not None or _WINDOWED not in kinds)
    return [window if kind == _WINDOWED else None for kind in kinds]


class Skeleton(nn.Module):  # type: ignore[misc]
    """In place of transformers' class, on meta. `calls` are what tracing that would show."""

    base_model_prefix = "model"

    def __init__(
        self,
        family: Family,
        config: SimpleNamespace,
        windows: list[int | None],
        rotates: list[bool],
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.config, self.model_class = config, family.model_class
        make = {"dtype": dtype, "device": torch.device("meta")}
        self.model = _Body(family, config, rotates, make)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, **make)
        self.all_tied_weights_keys: dict[str, str] = {}
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
            self.all_tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
        self.calls = tuple(
            AttentionCall(
                layer=layer,
                call=0,
                num_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                head_size=config.head_dim,
                scale=config.head_dim**-0.5,
                sliding_window=window,
            )
            for layer, window in enumerate(windows)
        )
        self.eval().requires_grad_(False)

    def _init_weights(self, module: nn.Module) -> None:
        """As in transformers: compute what is not saved with a model, in place."""
        if isinstance(module, Rotary):
            module.fill()


class _Norm(nn.Module):  # type: ignore[misc]
    def __init__(self, size: int, make: dict[str, Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, **make))


class _Body(nn.Module):  # type: ignore[misc]
    def __init__(self, family: Family, config: SimpleNamespace, rotates: list[bool], make: dict[str, Any]) -> None:
        super().__init__()
        # With a weight of its own it does not make up a random one, which on meta imports half of torch's compiler.
        weight = torch.empty(config.vocab_size, config.hidden_size, **make)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, _weight=weight)
        self.layers = nn.ModuleList([_Layer(family, config, turns, make) for turns in rotates])
        self.norm = _Norm(config.hidden_size, make)
        self.rotary_emb = Rotary(config.rope, config.head_dim)


class _Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, family: Family, config: SimpleNamespace, rotates: bool, make: dict[str, Any]) -> None:
        super().__init__()
        self.self_attn = _Attention(family, config, rotates, make)
        self.mlp = _Mlp(config, make)
        self.input_layernorm = _Norm(config.hidden_size, make)
        self.post_attention_layernorm = _Norm(config.hidden_size, make)


class _Attention(nn.Module):  # type: ignore[misc]
    def __init__(self, family: Family, config: SimpleNamespace, rotates: bool, make: dict[str, Any]) -> None:
        super().__init__()
        hidden, size, bias = config.hidden_size, config.head_dim, getattr(config, "attention_bias", False)
        query, key = config.num_attention_heads * size, config.num_key_value_heads * size
        self.q_proj = nn.Linear(hidden, query, bias=bias or family.qkv_bias, **make)
        self.k_proj = nn.Linear(hidden, key, bias=bias or family.qkv_bias, **make)
        self.v_proj = nn.Linear(hidden, key, bias=bias or family.qkv_bias, **make)
        self.o_proj = nn.Linear(query, hidden, bias=bias, **make)
        if family.qk_norm:
            self.q_norm, self.k_norm = _Norm(size, make), _Norm(size, make)
        self.use_rope = rotates


class _Mlp(nn.Module):  # type: ignore[misc]
    def __init__(self, config: SimpleNamespace, make: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, getattr(config, "mlp_bias", False)
        self.gate_proj = nn.Linear(hidden, inner, bias=bias, **make)
        self.up_proj = nn.Linear(hidden, inner, bias=bias, **make)
        self.down_proj = nn.Linear(inner, hidden, bias=bias, **make)
