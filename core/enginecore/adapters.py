"""What everybody may know of low-rank adapters (LoRA): their names and keys. Plain data, no torch."""

from __future__ import annotations

import re

import msgspec

from enginecore.errors import ParameterError

#: An adapter as requests carry it and as block hashes have it: its name and which load of that name it is. No two loads
#: of an engine have one number, so that what was cached under other weights of the same name is never found.
AdapterKey = tuple[str, int]

#: Ranks that kernels are made for.
RANKS = (8, 16, 32, 64, 128, 256)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded adapter. `sha256` is of its files, `num_bytes` what it holds in host memory, `created` seconds since
    1970."""

    name: str
    generation: int
    path: str
    sha256: str
    rank: int
    num_modules: int
    num_bytes: int
    created: int = 0

    @property
    def key(self) -> AdapterKey:
        return (self.name, self.generation)


class LoadTicket(msgspec.Struct, frozen=True, kw_only=True):
    """How a load stands: `info` once it is done, `problem` where it has failed, neither while it goes on."""

    info: AdapterInfo | None = None
    problem: str | None = None


def check_adapter_name(name: object, param: str = "lora_name") -> str:
    """The name, or ParameterError."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ParameterError(
            f"{param} must have 1 to 128 letters, digits, '.', '_', ':', '/' or '-' and begin with a letter or digit",
            param=param,
        )
    return name
