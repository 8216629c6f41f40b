"""Tiny random models of many architectures, written as a user would find them: config.json and safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 160

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

#: kind -> (config class, settings on top of _BASE)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama_bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    "llama3_rope": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": 8, "head_dim": 32}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 32,
            "sliding_window": 8,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32}),
    "phi3": ("Phi3Config", {}),
    "phi3_partial": ("Phi3Config", {"partial_rotary_factor": 0.5, "sliding_window": 8}),
    "olmo2": ("Olmo2Config", {}),
    "granite": ("GraniteConfig", {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 2}),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.5}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}),
    "mixtral": ("MixtralConfig", _EXPERTS),
    "qwen3_moe": ("Qwen3MoeConfig", dict(head_dim=32, **_EXPERTS)),
    "gpt_oss": ("GptOssConfig", dict(head_dim=32, sliding_window=8, **_EXPERTS)),
}


def make_tiny(kind: str, **settings: Any) -> Any:
    """The model in float32 with eager attention: the oracle. Weights are random with a spread that tells rows apart."""
    import transformers

    name, extra = KINDS[kind]
    base = {} if kind == "gpt2" else _BASE
    values = {**base, "vocab_size": VOCAB, "tie_word_embeddings": False, **extra, **settings}
    config = getattr(transformers, name)(**values)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.2 if parameter.dim() == 1 else 1.5 / parameter.shape[-1] ** 0.5
            center = parameter.mean() if parameter.dim() == 1 else 0.0
            parameter.copy_(center + spread * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def write_tiny(path: Path, kind: str, *, max_shard_size: str = "5GB", **settings: Any) -> Any:
    """Save `kind` at `path`; returns the model itself."""
    model = make_tiny(kind, **settings)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return model


def tiny_tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (count,), generator=generator).tolist()
