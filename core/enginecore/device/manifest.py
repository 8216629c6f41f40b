"""What a plugin says about itself (manifest) and about this machine (probe). Pure data: no torch, no driver."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Static facts about a plugin, readable without importing torch or touching a driver.

    `devices` are the short names it serves ("cpu", "cuda"); `contract` is the "MAJOR.MINOR" it was written against;
    `torch_variant` is the local version prefix that its torch build must have ("cu", "rocm", "xpu"), None for any;
    `accelerator` says whether `--device auto` should prefer it over a CPU, `auto` whether it may choose it at all (a
    simulator says no). `simulated` devices are models of one, whose time can be virtual. `torch_install` is what to
    type to get the torch build that the device needs.
    """

    devices: tuple[str, ...]
    distribution: str
    version: str
    contract: str
    summary: str = ""
    torch_min: str | None = None
    torch_variant: str | None = None
    driver_min: str | None = None
    accelerator: bool = True
    auto: bool = True
    torch_install: str = ""
    simulated: bool = False


class ProbeStatus(str, Enum):
    AVAILABLE = "available"
    ABSENT = "absent"
    BROKEN = "broken"


class ProbeCause(str, Enum):
    """Why a device is not available; it decides the exit code."""

    NONE = "none"
    NO_DEVICE = "no_device"
    DRIVER_MISSING = "driver_missing"
    WRONG_TORCH = "wrong_torch"
    CONTRACT = "contract"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class ProbeContext:
    """What a probe is given. `torch_build` comes from package metadata ("2.13.0+cpu"), None when torch is missing."""

    device: str
    torch_build: str | None


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """The probe's answer: a status, one sentence why, and what to type when it is not `available`.

    `details` is plain data. The core reads two keys, both optional: "count", the number of devices (an index beyond it
    is refused), and "serves", False when this version of the plugin has no kernels to serve with.
    """

    status: ProbeStatus
    reason: str
    fix: str = ""
    cause: ProbeCause = ProbeCause.NONE
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class BackendContext:
    """What `enginecore_create_backend` is given, in the worker process only."""

    device: str
    index: int = 0
    num_threads: int | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ConfigContext:
    """What `enginecore_config_defaults` is given: the device, the model's shape and the settings the user left open."""

    device: str
    model_type: str
    hidden_size: int
    num_layers: int
    unset: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class DoctorContext:
    device: str
    torch_build: str | None


@dataclass(frozen=True, kw_only=True)
class DoctorFinding:
    """One check of `enginecore doctor`."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
