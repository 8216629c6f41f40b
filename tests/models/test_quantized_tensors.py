"""Quantised checkpoints of every format: the model they give is the one with their weights unpacked, on any device."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from enginecore.device import Impl, OpTable
from enginecore.errors import ModelError
from enginecore.models.loader import load_model
from enginecore.models.quantized_config import config_reasons
from enginecore.models.store import resolve_model
from enginecore.ops import int4
from enginecore.ops.reference import pack_linear
from safetensors.torch import load_file, save_file

from tests.models.tiny import tiny_tokens, write_tiny
from tests.models.torch_backend import CAPABILITIES, Paged, TorchBackend

GROUP = 32
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": True}
_PACKED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": GROUP}}},
}  # fmt: skip
_INT8 = {
    "quant_method": "compressed-tensors", "format": "int-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}},
}  # fmt: skip
_FLOAT8 = {
    "quant_method": "compressed-tensors", "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}},
}  # fmt: skip
_BLOCKS = {"quant_method": "fp8", "weight_block_size": [16, 32]}
FORMATS = {
    "awq": (_AWQ, "int4"),
    "gptq": (_GPTQ, "int4"),
    "gptq_v2": ({**_GPTQ, "checkpoint_format": "gptq_v2"}, "int4"),
    "packed": (_PACKED, "int4"),
    "int8": (_INT8, "int8"),
    "fp8": (_FLOAT8, "fp8"),
    "fp8_blocks": (_BLOCKS, "fp8"),
}


def columns(codes: torch.Tensor, order: tuple[int, ...] = int4.IN_ORDER) -> torch.Tensor:
    """[R, C] packed along C."""
    return int4.pack_rows(codes.unflatten(1, (-1, 8))[:, :, list(order)].flatten(1).t()).t().contiguous()


def four_bits(kind: str, name: str, weight_OI: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The tensors of a layer whose codes, zeros and scales are random, and its weight as "NAME.weight"."""
    outputs, inputs = weight_OI.shape
    codes_IO = torch.randint(0, 16, (inputs, outputs), generator=generator)
    zeros_GO = torch.randint(0, 16, (inputs // GROUP, outputs), generator=generator)
    scales_GO = (torch.rand(inputs // GROUP, outputs, generator=generator) / 20 + 0.01).half()
    group_I = torch.arange(inputs) // GROUP
    if kind == "gptq":
        group_I = group_I[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    exact = ((codes_IO - zeros_GO[group_I]) * scales_GO[group_I].float()).t()
    if kind == "awq":
        stored = {"qweight": columns(codes_IO, int4.AWQ_ORDER), "qzeros": columns(zeros_GO, int4.AWQ_ORDER)}
        stored["scales"] = scales_GO
    elif kind == "packed":
        stored = {"weight_packed": columns(codes_IO.t()), "weight_scale": scales_GO.t().contiguous()}
        stored |= {"weight_zero_point": int4.pack_rows(zeros_GO.t()), "weight_shape": torch.tensor([outputs, inputs])}
    else:
        offset = 0 if kind == "gptq_v2" else 1
        stored = {"qweight": int4.pack_rows(codes_IO), "qzeros": columns((zeros_GO - offset) % 16),
                  "scales": scales_GO, "g_idx": group_I.int()}  # fmt: skip
    return {f"{name}.{part}": tensor for part, tensor in stored.items()} | {f"{name}.weight": exact.contiguous()}


def eight_bits(kind: str, name: str, weight_OI: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
    scale_of, shape = "weight_scale", (weight_OI.shape[0], 1)
    if kind == "fp8_blocks":
        scale_of, shape = "weight_scale_inv", (-(-weight_OI.shape[0] // 16), -(-weight_OI.shape[1] // 32))
    scales = torch.rand(shape, generator=generator) / 100 + 0.005
    spread = scales.repeat_interleave(16, 0)[: weight_OI.shape[0]].repeat_interleave(32, 1)[:, : weight_OI.shape[1]]
    spread = spread if kind == "fp8_blocks" else scales
    codes = (weight_OI / spread).round() if kind == "int8" else weight_OI / spread
    values = codes.clamp(-127, 127).to(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    return {f"{name}.values": values, f"{name}.{scale_of}": scales, f"{name}.input_scale": torch.ones(1),
            f"{name}.weight": values.float() * spread}  # fmt: skip


def write(folder: Path, kind: str) -> tuple[str, str]:
    """Paths of a quantised checkpoint in two files, and of the same model in plain numbers."""
    plain, quantized = folder / "plain", folder / "quantized"
    write_tiny(plain, "llama", num_hidden_layers=1)
    write_tiny(quantized, "llama", num_hidden_layers=1)
    generator, tensors, kept = torch.Generator().manual_seed(3), load_file(plain / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        kept[name] = tensor
        if name.endswith("_proj.weight"):
            make = eight_bits if kind in ("int8", "fp8", "fp8_blocks") else four_bits
            made = make(kind, name.removesuffix(".weight"), tensor, generator)
            tensors[name] = made.pop(name)
            del kept[name]
            kept |= {part.replace(".values", ".weight"): value for part, value in made.items()}
    save_file(tensors, plain / "model.safetensors")
    (quantized / "model.safetensors").unlink()
    names, index = sorted(kept), {}
    for number, part in enumerate((names[::2], names[1::2])):  # the parts of a layer lie in both files
        file = f"model-{number}.safetensors"
        save_file({name: kept[name] for name in part}, quantized / file)
        index |= dict.fromkeys(part, file)
    (quantized / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": FORMATS[kind][0]}))
    return str(quantized), str(plain)


class Packing(OpTable):
    """Notes in which schemes weights arrive."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def get(self, op: str) -> Impl | None:
        return Impl(self.pack) if op == "pack_linear" else None

    def pack(self, weight: Any, bias: Any) -> Any:
        self.seen.append(getattr(weight, "scheme", "plain"))
        return pack_linear(weight, bias)


def logits(path: str, schemes: frozenset[str], *, fuse: bool) -> tuple[torch.Tensor, list[str]]:
    packing = Packing()
    backend = TorchBackend(packing)
    backend.capabilities = replace(CAPABILITIES, quantizations=schemes)
    model = load_model(resolve_model(path), backend=backend, dtype="float32", fuse=fuse)
    return Paged(model, backend).step({"a": tiny_tokens(9)}), packing.seen


@pytest.mark.parametrize("kind", FORMATS)
def test_as_the_unpacked_model(tmp_path: Path, kind: str) -> None:
    quantized, plain = write(tmp_path, kind)
    expected, _ = logits(plain, frozenset(), fuse=True)
    unpacked, seen = logits(quantized, frozenset(), fuse=True)
    torch.testing.assert_close(unpacked, expected, atol=1e-4, rtol=1e-4)
    assert set(seen) == {"plain"}
    for fuse in (True, False) if kind == "gptq" else (True,):
        kept, seen = logits(quantized, frozenset({FORMATS[kind][1]}), fuse=fuse)
        torch.testing.assert_close(kept, expected, atol=1e-4, rtol=1e-4)
        # All but the head. Fused, four products a layer; those over inputs in an order of their own can be joined too.
        assert seen.count("plain") == 1 and seen.count(FORMATS[kind][1]) == (4 if fuse else 7)


def test_four_bits_in_blocks_where_a_device_has_only_those(tmp_path: Path) -> None:
    quantized, plain = write(tmp_path, "awq")
    expected, _ = logits(plain, frozenset(), fuse=True)
    kept, seen = logits(quantized, frozenset({"q4_1"}), fuse=True)
    assert seen.count("q4_1") == 4 and seen.count("plain") == 1
    torch.testing.assert_close(kept, expected, atol=2e-2, rtol=2e-2)  # scales and minima in half precision


def test_missing_parts_are_named(tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, "gptq")
    for file in Path(quantized).glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name: value for name, value in tensors.items() if "0.mlp.up_proj.scales" not in name}, file)
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.up_proj\.weight.*scales is missing"):
        logits(quantized, frozenset(), fuse=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' are not supported"),
        ({"bits": 8}, "bits is 8"),
        ({"version": "gemv"}, "'gemv'"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "'marlin'"),
        ({**_PACKED, "format": "marlin-24"}, "marlin-24"),
        ({**_PACKED, "config_groups": {"a": {"weights": {"num_bits": 2}}}}, "2 bits"),
        ({**_PACKED, "config_groups": {"a": {"weights": {"num_bits": 8}}}}, "packed weights of 8 bits"),
        ({**_BLOCKS, "weight_block_size": [128]}, "weight_block_size"),
    ],
)
def test_what_cannot_be_loaded_is_refused(change: dict[str, Any], reason: str) -> None:
    [told] = config_reasons({**_AWQ, **change})
    assert reason in told
    for config, _ in FORMATS.values():
        assert config_reasons(config) == []
