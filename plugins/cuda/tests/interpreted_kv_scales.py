"""A cache in fp8 with the checkpoint's own scales, through the whole engine over interpreted Triton kernels.

    TRITON_INTERPRET=1 python interpreted_kv_scales.py FOLDER        writes FOLDER/result.json

The scales are small enough that codes saturate, so that every other reading of them shows: the oracle is transformers'
model with an attention that rounds keys and values as the cache does.

Shape suffixes: K key-value heads.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from interpreted_engine import generate, greedy, random_prompts, write_model
from safetensors.torch import load_file, save_file

LENGTHS, COUNT = (21,), 2
CONFIG = {
    "quant_method": "compressed-tensors", "format": "float-quantized",
    "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"},
}  # fmt: skip
#: (keys, values) of each layer: one number, one for each head; under the names of three tools.
SCALES = ((torch.tensor([0.004]), torch.tensor([0.003])), (torch.tensor([0.005, 0.002]), torch.tensor([0.002, 0.004])))
NAMES = (("k_scale", "v_scale"), ("k_proj.output_scale", "v_proj.output_scale"))


def rounded(states: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[1, K, T, D] as e4m3 holds it."""
    scales_K11 = scales.expand(states.shape[1])[:, None, None]
    codes = (states / scales_K11).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.float() * scales_K11


def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    from transformers.models.llama.modeling_llama import eager_attention_forward

    keys, values = SCALES[module.layer_idx]
    return eager_attention_forward(module, query, rounded(key, keys), rounded(value, values), mask, **options)


def main(folder: Path) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    model, prompts = write_model(folder), random_prompts(LENGTHS)
    tensors = load_file(folder / "model.safetensors")
    for i, (scales, names) in enumerate(zip(SCALES, NAMES, strict=True)):
        tensors |= {f"model.layers.{i}.self_attn.{name}": scale for name, scale in zip(names, scales, strict=True)}
    save_file(tensors, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": CONFIG}))
    AttentionInterface.register("rounded", attend)
    AttentionMaskInterface.register("rounded", eager_mask)
    unrounded = greedy(model, prompts, COUNT)[1]
    model.set_attn_implementation("rounded")
    answers, logprobs = greedy(model, prompts, COUNT)
    result = {"expected": answers, "expected_logprobs": logprobs, "unrounded_logprobs": unrounded}
    for fuse in (True, False):
        found = generate(folder, prompts, COUNT, num_blocks=16, kv_cache_dtype="fp8", fuse=fuse)
        result["fused" if fuse else "unfused"] = found
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
