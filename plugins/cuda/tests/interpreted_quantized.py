"""Quantised checkpoints through the whole engine over the CUDA backend's Triton kernels, interpreted.

    TRITON_INTERPRET=1 python interpreted_quantized.py FOLDER        writes FOLDER/result.json

For each format a tiny random Llama is written as its tools write it; the oracle is transformers' model in float32 with
the unpacked weights. Where a format's products round activations too, the oracle's linear layers do the same. Packing
here is written out from the formats' descriptions and shares nothing with the engine.

Shape suffixes: O outputs, I inputs, G groups of inputs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import interpreted_engine
import torch
from enginecore_cuda.capabilities import Gpu
from interpreted_engine import generate, greedy, random_prompts, write_model
from safetensors.torch import load_file, save_file
from torch import nn

#: Of one multiprocessor each: nothing is cut into parts, and little is to be interpreted.
A100 = Gpu(name="NVIDIA A100", capability=(8, 0), multiprocessors=1)
H200 = replace(interpreted_engine.H200, multiprocessors=1)
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
GROUP, LENGTHS, COUNT = 64, (1, 9), 2
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
Parts = dict[str, torch.Tensor]


def words(nibbles: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """[R, C] codes as int32 [R, C / 8]: nibble i of a word is its code order[i]."""
    grouped = nibbles.long().unflatten(1, (-1, 8))
    total = sum(grouped[:, :, place] << (4 * i) for i, place in enumerate(order))
    return torch.where(total >= 2**31, total - 2**32, total).int()


def four_bits(weight_OI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [I, O], zeros and scales [G, O] of groups of inputs, and the weight [O, I] that they mean."""
    groups_GNO = weight_OI.t().unflatten(0, (-1, GROUP))
    low, high = groups_GNO.amin(1).clamp(max=0), groups_GNO.amax(1).clamp(min=0)
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round().clamp(1, 15)
    codes = (groups_GNO / scales[:, None] + zeros[:, None]).round().clamp(0, 15)
    exact = ((codes - zeros[:, None]) * scales[:, None]).flatten(0, 1).t()
    return codes.flatten(0, 1), zeros, scales.half(), exact


def awq(weight_OI: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    codes, zeros, scales, exact = four_bits(weight_OI)
    return {"qweight": words(codes, AWQ), "qzeros": words(zeros, AWQ), "scales": scales}, exact


def gptq(weight_OI: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    """With "act-order": which group an input is in is told by g_idx."""
    inputs = weight_OI.shape[1]
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    codes, zeros, scales, exact = four_bits(weight_OI[:, order])
    back = order.argsort()
    stored = {"qweight": words(codes[back].t()).t().contiguous(), "qzeros": words(zeros - 1), "scales": scales}
    return {**stored, "g_idx": (torch.arange(inputs) // GROUP)[back].int()}, exact[:, back]


def float8(weight_OI: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    scale = weight_OI.abs().amax(1, keepdim=True) / 448
    values = (weight_OI / scale).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale": scale, "input_scale": torch.ones(1)}, values.float() * scale


def float8_blocks(weight_OI: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    outputs, inputs = weight_OI.shape
    tiles = nn.functional.pad(weight_OI, (0, -inputs % 128, 0, -outputs % 128)).unflatten(0, (-1, 128))
    scale = tiles.unflatten(2, (-1, 128)).abs().amax((1, 3)) / 448
    spread = scale.repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
    values = (weight_OI / spread).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": scale}, values.float() * spread


def int8(weight_OI: torch.Tensor) -> tuple[Parts, torch.Tensor]:
    scale = weight_OI.abs().amax(1, keepdim=True) / 127
    values = (weight_OI / scale).round().to(torch.int8)
    return {"weight": values, "weight_scale": scale}, values.float() * scale


def rounded(x: torch.Tensor, dtype: torch.dtype, size: int) -> torch.Tensor:
    """Activations as products of eight bits take them: each `size` inputs with a scale of their own."""
    parts = x.unflatten(-1, (-1, min(size, x.shape[-1])))
    top = 127.0 if dtype == torch.int8 else 448.0
    scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12) / top
    codes = (parts / scale).round() if dtype == torch.int8 else parts / scale
    return (codes.to(dtype).float() * scale).flatten(-2)


def compressed(kind: str, bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": "channel", "symmetric": True}
    return {"quant_method": "compressed-tensors", "format": f"{kind}-quantized", "config_groups": {"a": {
        "targets": ["Linear"], "weights": weights}}}  # fmt: skip


#: name -> the checkpoint's quantization_config, how a weight is stored, the GPU, how its products round activations.
FORMATS: dict[str, tuple[dict[str, Any], Callable[..., Any], Gpu, tuple[torch.dtype, int] | None]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq, H200, None),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}, gptq, H200, None),
    "fp8": (compressed("float", 8), float8, H200, (torch.float8_e4m3fn, 10**9)),
    "fp8, blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, float8_blocks, H200,
                    (torch.float8_e4m3fn, 128)),
    "int8": (compressed("int", 8), int8, H200, (torch.int8, 10**9)),
}  # fmt: skip


def write_quantized(folder: Path, config: dict[str, Any], store: Callable[..., Any]) -> Any:
    """transformers' model with the weights that the checkpoint in `folder` means."""
    model = write_model(folder, **SIZES)
    tensors = load_file(folder / "model.safetensors")
    for name, module in model.model.named_modules():
        if isinstance(module, nn.Linear):
            prefix = f"model.{name}"
            parts, exact = store(tensors.pop(f"{prefix}.weight"))
            tensors |= {f"{prefix}.{part}": value.contiguous() for part, value in parts.items()}
            module.weight.data.copy_(exact)
    save_file(tensors, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
    return model


def compare(folder: Path, kind: str) -> dict[str, Any]:
    config, store, gpu, rounding = FORMATS[kind]
    model, prompts = write_quantized(folder, config, store), random_prompts(LENGTHS)
    if rounding is not None:
        for module in model.model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0], *rounding),))
    interpreted_engine.GPUS.append(gpu)
    answers, logprobs = greedy(model, prompts, COUNT)
    found = generate(folder, prompts, COUNT, num_blocks=16)
    plain = sum(parameter.nbytes for parameter in model.parameters())
    return {"expected": answers, "expected_logprobs": logprobs, "plain_bytes": plain, **found}


def main(folder: Path) -> None:
    result = {}
    for i, kind in enumerate(FORMATS):
        (folder / str(i)).mkdir()
        result[kind] = compare(folder / str(i), kind)
    (folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
