"""How an op module tells the ahead-of-time compiler what to compile: plain data, returned by its `aot_cases()`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class AotCase:
    """One specialisation of a kernel, compiled for every target with the config which that target would pick.

    `signature` gives every parameter that is no constexpr: "*bf16", "i32", "fp32"; ":16" after it says that the value
    (an address for pointers) is a multiple of 16, as Triton finds out for itself at a launch. "*fp8e4nv" and the like
    need hardware: name the architectures that have it in `only`. `constants` are the constexprs that the op's config
    does not set. `config` is the name of the config file, "" for none; `sizes` pick its row. `options` go to the
    compiler where there is no config.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    config: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, int] = field(default_factory=dict)
    only: frozenset[str] | None = None
