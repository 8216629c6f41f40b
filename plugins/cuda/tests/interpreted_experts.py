"""Experts of quantised checkpoints through the whole engine over interpreted Triton kernels.

    TRITON_INTERPRET=1 python interpreted_experts.py FOLDER        writes FOLDER/result.json

A tiny random Mixtral, stored in the formats of `interpreted_quantized.py`; the oracle is transformers' model with the
unpacked weights. Linear layers and experts are quantised alike; the GPU is one that leaves activations as they are.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import interpreted_engine
import torch
from interpreted_engine import generate, greedy, random_prompts
from interpreted_quantized import A100, AWQ, GROUP, float8_blocks, four_bits, words
from safetensors.torch import load_file, save_file

LENGTHS, COUNT, EXPERTS = (1, 9), 2, 4
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}
_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def awq(weight_OI: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    codes, zeros, scales, exact = four_bits(weight_OI)
    return {"qweight": words(codes, AWQ), "qzeros": words(zeros, AWQ), "scales": scales}, exact


FORMATS: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({}, None),
    "awq": (_AWQ, awq),
    "fp8, blocks": (_BLOCKS, float8_blocks),
}


def write(folder: Path, kind: str) -> Any:
    import transformers

    config, store = FORMATS[kind]
    model_config = transformers.MixtralConfig(
        vocab_size=96, hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=2, max_position_embeddings=64,
        bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(model_config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.3 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    if store is None:
        return model
    tensors, exact = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if ".layers." in name and tensors[name].dim() == 2 and ".gate." not in name]:
        parts, exact[name] = store(tensors.pop(name))
        prefix = name.removesuffix(".weight")
        tensors |= {f"{prefix}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    unpacked = folder / "unpacked"
    model.save_pretrained(unpacked)
    save_file(load_file(unpacked / "model.safetensors") | {k: v.contiguous() for k, v in exact.items()},
              unpacked / "model.safetensors", {"format": "pt"})  # fmt: skip
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
    return transformers.MixtralForCausalLM.from_pretrained(unpacked, dtype=torch.float32).eval()


def compare(folder: Path, kind: str) -> dict[str, Any]:
    folder.mkdir()
    model, prompts = write(folder, kind), random_prompts(LENGTHS)
    interpreted_engine.GPUS.append(A100)
    answers, logprobs = greedy(model, prompts, COUNT)
    found = generate(folder, prompts, COUNT, num_blocks=16)
    plain = sum(parameter.nbytes for parameter in model.parameters())
    outer = sum(p.nbytes for name, p in model.named_parameters() if "embed_tokens" in name or "lm_head" in name)
    return {"expected": answers, "expected_logprobs": logprobs, "plain_bytes": plain, "outer_bytes": outer, **found}


def main(folder: Path) -> None:
    (folder / "result.json").write_text(json.dumps(
        {kind: compare(folder / str(i), kind) for i, kind in enumerate(FORMATS)}
    ))  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
