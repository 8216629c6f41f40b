"""What a checkpoint says about its quantised weights, and what of that can be loaded. Plain data, no torch.

The formats are those of AutoAWQ ("awq"), AutoGPTQ and GPTQModel ("gptq"), llm-compressor ("compressed-tensors"), and
the block-scaled fp8 that DeepSeek introduced ("fp8"). `models/quantized_tensors.py` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "fbgemm_fp8")

#: compressed-tensors' names for how the weights of a group lie in the file.
_FORMATS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "dense", "mixed-precision")


@dataclass(frozen=True)
class QuantizedConfig:
    """`block` is the size of fp8 blocks (outputs, inputs), None where scales are for outputs or the whole;
    `zero_offset` is what a GPTQ file has subtracted from its zeros."""

    method: str
    block: tuple[int, int] | None = None
    zero_offset: int = 1


def read_config(config: dict[str, Any] | None) -> QuantizedConfig | None:
    """Of the `quantization_config` of a config.json that `config_reasons` has nothing against; None without one."""
    if not config:
        return None
    method = config["quant_method"]
    block = config.get("weight_block_size")
    for weights in _weights(config) if method == "compressed-tensors" else ():
        block = weights.get("block_structure") or block
    offset = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
    return QuantizedConfig(method, (int(block[0]), int(block[1])) if block else None, offset)


def config_reasons(config: dict[str, Any]) -> list[str]:
    """Why weights described so cannot be loaded; empty when they can."""
    method = config.get("quant_method", "unknown")
    if method not in METHODS:
        return [f"weights quantised with {method!r} are not supported (those of {', '.join(METHODS)} are)"]
    problems: list[str] = []
    if method in ("awq", "gptq"):
        if config.get("bits") != 4:
            problems.append(f"bits is {config.get('bits')}, only 4 is supported")
        if method == "awq" and str(config.get("version", "gemm")).lower() != "gemm":
            problems.append(f"version is {config['version']!r}, only 'gemm' is supported")
        if config.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2", "gemm"):
            problems.append(
                f"checkpoint_format is {config['checkpoint_format']!r}, only gptq and gptq_v2 are supported"
            )
    if method == "compressed-tensors":
        problems += _compressed_reasons(config)
    block = config.get("weight_block_size")
    if block and (len(block) != 2 or not all(isinstance(side, int) and side > 0 for side in block)):
        problems.append(f"weight_block_size is {block}, not two positive numbers")
    return [f"weights quantised with {method!r}: {problem}" for problem in problems]


def _weights(config: dict[str, Any]) -> list[dict[str, Any]]:
    return [group.get("weights") or {} for group in (config.get("config_groups") or {}).values()]


def _compressed_reasons(config: dict[str, Any]) -> list[str]:
    problems = []
    formats = {config.get("format", "dense")}
    formats |= {group.get("format") or "dense" for group in (config.get("config_groups") or {}).values()}
    if unknown := sorted(formats - set(_FORMATS)):
        problems.append(f"format {', '.join(unknown)} is not one of {', '.join(_FORMATS)}")
    for weights in _weights(config):
        bits, kind = weights.get("num_bits"), weights.get("type", "int")
        if (kind, bits) not in {("int", 4), ("int", 8), ("float", 8)}:
            problems.append(f"weights of {bits} bits ({kind}) are not supported")
        elif bits == 8 and "pack-quantized" in formats:
            problems.append("packed weights of 8 bits are not supported")
        elif (kind, bits) == ("int", 8) and weights.get("strategy", "channel") not in ("channel", "tensor"):
            problems.append(f"int8 scales for each {weights['strategy']} are not supported")
        elif (kind, bits) == ("int", 8) and not weights.get("symmetric", True):
            problems.append("asymmetric weights of 8 bits are not supported")
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        problems.append("sparse weights are not supported")
    return problems
