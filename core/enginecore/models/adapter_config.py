"""PEFT's adapter_config.json: what is read of it, and which of its settings ask for more than is served."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from enginecore.errors import ModelError

#: Settings that say nothing about what is computed, or only how training began or went.
_HARMLESS = frozenset({
    "auto_mapping", "base_model_name_or_path", "eva_config", "inference_mode", "lora_dropout", "megatron_core",
    "peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type", "ensure_weight_tying",
})  # fmt: skip
#: Settings that are taken into account.
_READ = frozenset({
    "alpha_pattern", "bias", "exclude_modules", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "lora_alpha", "r", "rank_pattern", "target_modules", "use_rslora",
})  # fmt: skip
#: What others ask for, in words.
_REFUSED = {
    "use_dora": "DoRA (use_dora) is not served",
    "lora_bias": "biases of adapters (lora_bias) are not served",
    "modules_to_save": "whole modules (modules_to_save) are not served",
    "trainable_token_indices": "changed embeddings (trainable_token_indices) are not served",
    "target_parameters": "adapters of bare parameters (target_parameters) are not served",
    "layer_replication": "replicated layers (layer_replication) are not served",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out) are not served",
    "alora_invocation_tokens": "activated adapters (alora_invocation_tokens) are not served",
}
#: Ways to begin training that change the base model's weights, which the adapter then needs.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_PLAIN = re.compile(r"[\w.]+")


@dataclass(frozen=True)
class AdapterConfig:
    """The settings that count. `ranks` and `alphas` are for modules with that name, or that end of a name.

    `targets` None, or `partial`: which modules there should be is not known.
    """

    rank: int
    alpha: float
    rslora: bool = False
    targets: tuple[str, ...] | None = None
    ranks: dict[str, int] = field(default_factory=dict)
    alphas: dict[str, float] = field(default_factory=dict)
    partial: bool = False

    @classmethod
    def of(cls, raw: Any) -> AdapterConfig:
        """Raises ModelError where a setting is not what it must be."""
        if not isinstance(raw, dict):
            raise ModelError("adapter_config.json is not an object")
        targets = raw.get("target_modules")
        listed = isinstance(targets, list) and all(isinstance(each, str) for each in targets)
        return cls(
            rank=int(_number(raw.get("r"), "r", whole=True)),
            alpha=_number(raw.get("lora_alpha"), "lora_alpha"),
            rslora=raw.get("use_rslora") is True,
            targets=tuple(targets) if listed and targets is not None else None,
            ranks={k: int(_number(v, "rank_pattern", whole=True)) for k, v in _pattern(raw, "rank_pattern").items()},
            alphas={k: _number(v, "alpha_pattern") for k, v in _pattern(raw, "alpha_pattern").items()},
            partial=any(raw.get(name) for name in ("layers_to_transform", "layers_pattern", "exclude_modules")),
        )

    def rank_of(self, module: str) -> int:
        return self.ranks.get(_matching(self.ranks, module), self.rank)

    def scale_of(self, module: str, rank: int) -> float:
        alpha = self.alphas.get(_matching(self.alphas, module), self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def missing(self, found: Iterable[str], modules: Mapping[str, tuple[int, int]]) -> list[str]:
        """What the file should have but has not: an adapter that has lost half of its layers is none."""
        there = set(found)
        if not there:
            return ["it has no weights"]
        if self.targets is None or self.partial:
            return []
        wanted = [name for name in modules if any(name == t or name.endswith(f".{t}") for t in self.targets)]
        lacking = [name for name in wanted if name not in there]
        return [f"it has no weights for {len(lacking)} of its modules, such as {lacking[0]}"] if lacking else []


def config_reasons(raw: dict[str, Any], config: AdapterConfig, max_rank: int) -> list[str]:
    """Everything that an adapter's settings ask for and that is not served."""
    # PEFT takes patterns for regular expressions; one from a stranger can take for ever.
    reasons = [
        f"the pattern {key[:64]!r} is a regular expression; the ends of modules' names are served"
        for key in (*config.ranks, *config.alphas)
        if _PLAIN.fullmatch(_plain(key)) is None
    ]
    if raw.get("peft_type") != "LORA":
        reasons.append(f"peft_type {str(raw.get('peft_type'))[:64]!r} is not LORA")
    for name, rank in (("r", config.rank), *((f"rank_pattern {key[:64]!r}", r) for key, r in config.ranks.items())):
        if rank > max_rank:
            reasons.append(f"{name} = {rank} is above max_lora_rank {max_rank}")
    if raw.get("bias", "none") not in ("none", None):
        reasons.append(f"changed biases (bias = {str(raw['bias'])[:64]!r}) are not served")
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        reasons.append(f"it needs a changed base model (init_lora_weights = {start[:64]!r}); save it converted")
    for name, value in raw.items():
        if value and name not in _HARMLESS and name not in _READ:
            reasons.append(_REFUSED.get(name, f"the setting {name[:64]!r} is not known"))
    return reasons


def _number(value: Any, name: str, *, whole: bool = False) -> float:
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < 2**31:
        told = "a whole number" if whole else "a number"
        raise ModelError(f"adapter_config.json: {name} must be {told} above 0, got {str(value)[:64]}")
    return float(value)


def _pattern(raw: dict[str, Any], name: str) -> dict[str, Any]:
    value = raw.get(name) or {}
    if not isinstance(value, dict) or len(value) > 4096:
        raise ModelError(f"adapter_config.json: {name} must be an object")
    return value


def _matching(patterns: Mapping[str, Any], module: str) -> str:
    """The first pattern that is the module's name or its end; else the name."""
    for pattern in patterns:
        plain = _plain(pattern)
        if module == plain or (not pattern.startswith("^") and module.endswith(f".{plain}")):
            return pattern
    return module


def _plain(pattern: str) -> str:
    return pattern.removeprefix("^").removesuffix("$").replace("\\.", ".")
