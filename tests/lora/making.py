"""Random adapters, written as the PEFT library writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

DATA = Path(__file__).resolve().parents[1] / "data"
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Linears = Iterable[tuple[str, int, int]]


def make_tensors(
    linears: Linears, seed: int, rank: int = 8, targets: Iterable[str] = ALL, spread: float = 0.1
) -> dict[str, torch.Tensor]:
    """A and B of the modules whose names end in one of the targets."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, outputs, inputs in linears:
        if name.rpartition(".")[2] in targets:
            prefix = f"base_model.model.{name}.lora_"
            tensors[f"{prefix}A.weight"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            tensors[f"{prefix}B.weight"] = torch.randn(outputs, rank, generator=generator) * spread
    return tensors


def write_adapter(
    path: Path, tensors: dict[str, torch.Tensor], rank: int = 8, targets: Iterable[str] = ALL, **settings: Any
) -> Path:
    """The folder. `settings` go over those of an ordinary adapter of scale 2."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "lora_dropout": 0.1,
        "target_modules": list(targets), "bias": "none", "inference_mode": True, "use_dora": False,
        "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {}, "init_lora_weights": True,
        "megatron_core": "megatron.core", "qalora_group_size": 16, "peft_version": "0.21.2",
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config | settings))
    return path


#: Those of tests/data/adapters_float32.json: name -> (seed, rank, targets, settings).
ADAPTERS: dict[str, tuple[int, int, tuple[str, ...], dict[str, Any]]] = {
    "a": (1, 8, ("q_proj", "v_proj", "down_proj"), {}),
    "b": (2, 16, ALL, {"use_rslora": True, "lora_alpha": 6}),
    "c": (3, 4, ("k_proj", "up_proj"), {"alpha_pattern": {"k_proj": 16}}),
}


def write_known(root: Path, linears: Linears) -> None:
    """The adapters of the table, each in a folder of its name."""
    linears = list(linears)
    for name, (seed, rank, targets, settings) in ADAPTERS.items():
        write_adapter(root / name, make_tensors(linears, seed, rank, targets), rank, targets, **settings)
