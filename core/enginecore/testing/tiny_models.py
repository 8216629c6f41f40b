"""Tiny random models of many architectures, and what transformers computes with them in float32: the oracle."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VOCAB = 211

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
}  # fmt: skip

#: name: (configuration class, settings on top of the base). Each brings something that the others do not have.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_tied_head_46": ("LlamaConfig", {"head_dim": 46, "tie_word_embeddings": True}),
    "qwen2_bias": ("Qwen2Config", {}),
    "qwen3_qk_norm": ("Qwen3Config", {"head_dim": 32}),
    "mistral_window": ("MistralConfig", {"sliding_window": 24, "head_dim": 32, "num_key_value_heads": 1}),
    "gemma2_soft_cap": (
        "Gemma2Config",
        {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0},
    ),
    "gpt_neox_partial_rotary": ("GPTNeoXConfig", {"rotary_pct": 0.5}),
    "mixtral_experts": ("MixtralConfig", _EXPERTS),
    "gpt_oss_sinks": ("GptOssConfig", {"head_dim": 32, "sliding_window": 24, **_EXPERTS}),
}


@dataclass(frozen=True)
class Step:
    """What the oracle says of one position: the best token, the gap to the second best, all log-probabilities [V]."""

    token: int
    gap: float
    logprobs_V: torch.Tensor


def write_model(name: str, path: Path) -> Any:
    """Write architecture `name` at `path` as config.json and safetensors; returns the model, float32 and eager.

    Weights are spread so that tokens differ clearly: the default initialisation gives nearly flat logits.
    """
    import transformers

    kind, extra = ARCHITECTURES[name]
    config = getattr(transformers, kind)(**{**_BASE, **extra})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.2 if parameter.dim() == 1 else 1.3 / math.sqrt(parameter.shape[-1])
            center = float(parameter.mean()) if parameter.dim() == 1 else 0.0
            parameter.copy_(center + spread * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(path)
    return model.eval()


def load_oracle(path: str, kind: str) -> Any:
    """A real model of ours (`kind` "safetensors" or "gguf") in transformers, float32 and eager."""
    import transformers

    where = Path(path)
    files = {"gguf_file": where.name} if kind == "gguf" else {}
    folder = where.parent if kind == "gguf" else where
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(str(folder), dtype=torch.float32, attn_implementation="eager", **files).eval()


def greedy(model: Any, prompt: list[int], count: int) -> list[Step]:
    """The next `count` steps after `prompt`, the sequence computed anew for each: no cache that could be wrong."""
    tokens, steps = list(prompt), []
    for _ in range(count):
        with torch.inference_mode():
            logits_V = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].double()
        best = torch.topk(logits_V, 2)
        gap = float(best.values[0] - best.values[1])
        steps.append(Step(int(best.indices[0]), gap, torch.log_softmax(logits_V, -1).clone()))
        tokens.append(steps[-1].token)
    return steps


def made_up_prompts(vocab: int, lengths: tuple[int, ...], shared: int = 0) -> list[list[int]]:
    """Random prompts of these lengths; those longer than `shared` begin with the same `shared` tokens."""
    generator = torch.Generator().manual_seed(11)

    def tokens(count: int) -> list[int]:
        drawn: list[int] = torch.randint(3, vocab, (count,), generator=generator).tolist()
        return drawn

    prefix = tokens(shared)
    return [prefix + tokens(n - shared) if n > shared else tokens(n) for n in lengths]
