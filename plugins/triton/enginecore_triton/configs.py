"""Tuning configs: data in `configs/OP.json`, keyed by architecture, with a default that fits every device.

    {"sm_90": [{"upto": {"head_size": 128}, "constants": {"BLOCK_N": 64}, "options": {"num_warps": 4}}, ...],
     "default": [...]}

The first row whose bounds all hold serves; the last row of every list has no bounds. An architecture without a list of
its own gets the default. `constants` are constexprs of the kernel, `options` go to the compiler.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "configs"
DEFAULT = "default"


@dataclass(frozen=True)
class Config:
    """One row. `bounds` maps a size to the largest value that the row serves."""

    constants: dict[str, int] = field(default_factory=dict)
    options: dict[str, int] = field(default_factory=dict)
    bounds: dict[str, int] = field(default_factory=dict)

    @property
    def keywords(self) -> dict[str, int]:
        """What a launch passes to the kernel."""
        return {**self.constants, **self.compiler}

    @property
    def compiler(self) -> dict[str, int]:
        """Options for the compiler. Fused multiply-add is named because its default differs between Tritons."""
        return {"enable_fp_fusion": True, **self.options}


@cache
def table(op: str) -> dict[str, tuple[Config, ...]]:
    """All rows of `op`, by architecture. ValueError when the file breaks the rules above."""
    data: dict[str, list[dict[str, Any]]] = json.loads((_FOLDER / f"{op}.json").read_text())
    if DEFAULT not in data:
        raise ValueError(f"configs/{op}.json has no {DEFAULT!r}")
    rows = {
        architecture: tuple(Config(r.get("constants", {}), r.get("options", {}), r.get("upto", {})) for r in listed)
        for architecture, listed in data.items()
    }
    for architecture, listed in rows.items():
        if not listed or listed[-1].bounds:
            raise ValueError(f"configs/{op}.json: the last row of {architecture!r} must have no bounds")
    return rows


def names() -> list[str]:
    """Every op that has configs."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def pick(op: str, architecture: str, **sizes: int) -> Config:
    """The row for `sizes`; a size that the row bounds and the caller does not give counts as 0."""
    return _pick(op, architecture, tuple(sorted(sizes.items())))


@cache
def _pick(op: str, architecture: str, sizes: tuple[tuple[str, int], ...]) -> Config:
    rows, given = table(op), dict(sizes)
    for config in rows.get(architecture, rows[DEFAULT]):
        if all(given.get(name, 0) <= bound for name, bound in config.bounds.items()):
            return config
    raise AssertionError("the last row has no bounds")
