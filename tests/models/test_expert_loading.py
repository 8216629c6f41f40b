"""Experts go through the ops where a device has them: packed, plain, or left to transformers' module."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from enginecore.device import Impl, OpQuery, OpTable, Verdict
from enginecore.errors import ModelError
from enginecore.models.loader import load_model
from enginecore.models.store import resolve_model
from enginecore.ops.reference import REFERENCE
from safetensors.torch import load_file, save_file

from tests.models.test_quantized_tensors import FORMATS, eight_bits, four_bits
from tests.models.tiny import tiny_tokens, write_tiny
from tests.models.torch_backend import CAPABILITIES, Paged, TorchBackend


class Table(OpTable):
    """Products of experts that count their calls and note what they were asked about."""

    def __init__(self, *ops: str, refuses: str = "") -> None:
        self.ops, self.refuses = ops, refuses
        self.asked: list[dict[str, Any]] = []
        self.calls = dict.fromkeys(ops, 0)

    def get(self, op: str) -> Impl | None:
        if op not in self.ops:
            return None

        def run(*args: Any) -> Any:
            self.calls[op] += 1
            return REFERENCE[op](*args)

        def supports(query: OpQuery) -> Verdict:
            self.asked.append(query.attributes)
            return Verdict.of([self.refuses] if self.refuses else [])

        return Impl(run, supports)


def write(folder: Path, kind: str, model: str = "mixtral") -> tuple[str, str]:
    """Paths of a checkpoint whose experts alone are quantised, and of the same model in plain numbers."""
    plain, quantized = folder / "plain", folder / "quantized"
    for path in (plain, quantized):
        write_tiny(path, model, num_hidden_layers=2)
    generator, tensors = torch.Generator().manual_seed(3), load_file(plain / "model.safetensors")
    kept = dict(tensors)
    make = four_bits if kind in ("awq", "gptq", "packed") else eight_bits
    for name in [name for name in tensors if ".experts." in name]:
        made = make(kind, name.removesuffix(".weight"), kept.pop(name), generator)
        tensors[name] = made.pop(name)
        kept |= {part.replace(".values", ".weight"): value for part, value in made.items()}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    save_file(kept, quantized / "model.safetensors")
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": FORMATS[kind][0]}))
    return str(quantized), str(plain)


def load(path: str, table: OpTable | None, schemes: frozenset[str] = frozenset({"int4", "fp8", "int8"})) -> Any:
    backend = TorchBackend(table) if table is not None else TorchBackend()
    backend.capabilities = replace(CAPABILITIES, quantizations=schemes)
    model = load_model(resolve_model(path), backend=backend, dtype="float32")
    return model, Paged(model, backend).step({"a": tiny_tokens(9)})


@pytest.mark.parametrize("kind", ["awq", "fp8_blocks", "int8"])
def test_packed_experts(tmp_path: Path, kind: str) -> None:
    quantized, plain = write(tmp_path, kind)
    whole, expected = load(plain, None)
    table = Table("quantized_experts")
    packed, logits = load(quantized, table)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert table.calls == {"quantized_experts": 2} and {asked["scheme"] for asked in table.asked if asked} == {
        FORMATS[kind][1]
    }
    experts = 2 * 4 * 3 * 64 * 96 * 4  # layers, experts, products, sides, bytes
    saved = whole.weight_bytes - packed.weight_bytes
    assert saved > (0.78 if FORMATS[kind][1] == "int4" else 0.7) * experts, "the books of memory say what was kept"


def test_the_layers_of_another_family(tmp_path: Path) -> None:
    quantized, plain = write(tmp_path, "fp8", "qwen3_moe")
    table = Table("quantized_experts")
    torch.testing.assert_close(load(quantized, table)[1], load(plain, None)[1], atol=1e-4, rtol=1e-4)
    assert table.calls == {"quantized_experts": 2}


@pytest.mark.parametrize("table", [Table(), Table("quantized_experts", refuses="no"), Table("moe_experts")])
def test_without_a_product_of_the_scheme_they_are_unpacked(
    tmp_path: Path, table: Table, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, plain = write(tmp_path, "fp8")
    whole, expected = load(plain, None)
    unpacked, logits = load(quantized, table)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
    assert unpacked.weight_bytes == whole.weight_bytes and "experts of 2 layers are unpacked" in caplog.text
    assert table.calls.get("moe_experts", 2) == 2, "a device's product of plain experts is used"


def test_an_order_of_inputs_is_told(tmp_path: Path) -> None:
    quantized, plain = write(tmp_path, "gptq")
    table = Table("quantized_experts")
    torch.testing.assert_close(load(quantized, table)[1], load(plain, None)[1], atol=1e-4, rtol=1e-4)
    assert all(asked["ordered"] for asked in table.asked if asked) and len(table.asked) > 1


@pytest.mark.parametrize("model", ["mixtral", "gpt_oss"])
def test_plain_experts(tmp_path: Path, model: str) -> None:
    """Those with biases and a gate of their own are transformers' business."""
    write_tiny(tmp_path, model)
    table = Table("moe_experts")
    logits = load(str(tmp_path), table)[1]
    torch.testing.assert_close(logits, load(str(tmp_path), None)[1], atol=1e-4, rtol=1e-4)
    assert table.calls["moe_experts"] == (3 if model == "mixtral" else 0)


def test_an_expert_of_another_size_is_refused(tmp_path: Path) -> None:
    quantized, _ = write(tmp_path, "fp8")
    file = Path(quantized) / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.block_sparse_moe.experts.2.w2"
    name = name if f"{name}.weight" in tensors else name.replace("block_sparse_moe", "mlp")
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].view(torch.uint8)[:32].view(torch.float8_e4m3fn)
    tensors[f"{name}.weight_scale"] = tensors[f"{name}.weight_scale"][:32].contiguous()
    save_file(tensors, file)
    with pytest.raises(ModelError, match="different sizes"):
        load(quantized, Table("quantized_experts"))
