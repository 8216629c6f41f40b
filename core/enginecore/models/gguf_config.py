"""From GGUF metadata to what the rest of enginecore knows: a config in transformers' form, and tensor names. No torch.

llama.cpp stores the rows of q and k of the "llama" architecture with each head's rotary pairs interleaved; the
`permuted` tensors below need that undone. Architectures that are not in ARCHITECTURES are refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from enginecore.errors import ModelError
from enginecore.models.gguf_reader import GGUFFile


@dataclass(frozen=True)
class Architecture:
    """`model_class` and `model_type` are transformers'; `permuted`: q and k rows are interleaved in the file."""

    model_type: str
    model_class: str
    permuted: bool = False
    qk_norm: bool = False


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", permuted=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", qk_norm=True),
}

_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight"}  # fmt: skip
_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

#: Divisors of the rotary frequencies (llama 3's scaling, worked out by the converter).
ROPE_FACTORS = "rope_freqs.weight"


def architecture(file: GGUFFile) -> Architecture:
    name = file.get("general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: GGUF architecture {name!r} is not supported (supported: {', '.join(ARCHITECTURES)})",
            fix="use the model's safetensors files",
        )
    if file.get(f"{name}.expert_count", 0):
        raise ModelError(f"{file.path}: experts in GGUF files are not supported", fix="use its safetensors files")
    if file.get("split.count", 1) > 1:
        raise ModelError(
            f"{file.path} is one of {file.get('split.count')} parts", fix="join them with `llama-gguf-split --merge`"
        )
    return ARCHITECTURES[name]


def hf_name(name: str) -> str | None:
    """transformers' name of a GGUF tensor; None when the model has no such weight."""
    if name in _TOP:
        return _TOP[name]
    match = _BLOCK.fullmatch(name)
    if match and match.group(2) in _LAYER:
        return f"model.layers.{match.group(1)}.{_LAYER[match.group(2)]}.{match.group(3)}"
    return None


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The config.json that this file stands for."""
    arch = architecture(file)
    prefix = file.get("general.architecture")

    def number(key: str, default: Any = None, kinds: Any = int) -> Any:
        value = file.get(f"{prefix}.{key}", default)
        if not isinstance(value, kinds) or isinstance(value, bool) or (value is not default and value <= 0):
            raise ModelError(f"{file.path}: the metadata {prefix}.{key} is {value!r}, a positive number was expected")
        return value

    hidden, heads = number("embedding_length"), number("attention.head_count")
    rows = file.tensors["token_embd.weight"].shape if "token_embd.weight" in file.tensors else ()
    if len(rows) != 2:
        raise ModelError(f"{file.path} has no token_embd.weight matrix")
    config: dict[str, Any] = {
        "architectures": [arch.model_class],
        "model_type": arch.model_type,
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": number("attention.key_length", number("rope.dimension_count", hidden // heads)),
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon", 1e-6, (int, float)),
        "vocab_size": rows[0],
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(file, prefix, number),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        **token_ids(file),
    }
    if config["head_dim"] != number("rope.dimension_count", config["head_dim"]):
        raise ModelError(f"{file.path}: rotary embedding over a part of each head is not supported")
    return config


def _rope(file: GGUFFile, prefix: str, number: Any) -> dict[str, Any]:
    theta = float(number("rope.freq_base", 10000.0, (int, float)))
    kind = file.get(f"{prefix}.rope.scaling.type", "none")
    if kind in ("none", "") or ROPE_FACTORS in file.tensors:
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{file.path}: rotary scaling {kind!r} is not supported")
    rope = {"rope_type": kind, "rope_theta": theta, "factor": float(number("rope.scaling.factor", None, (int, float)))}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = number("rope.scaling.original_context_length")
    return rope


def token_ids(file: GGUFFile) -> dict[str, Any]:
    """bos, eos and pad ids. eos is a list when the file names an end-of-turn token besides."""
    ids: dict[str, Any] = {}
    for name, key in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        value = file.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(value, int):
            ids[name] = value
    eos = [file.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    unique = list(dict.fromkeys(token for token in eos if isinstance(token, int)))
    if len(unique) > 1:
        ids["eos_token_id"] = unique
    return ids
