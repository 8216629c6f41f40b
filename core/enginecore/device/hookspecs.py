"""The hooks that a plugin implements, called at start-up only. Each takes one frozen context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

from enginecore.device.manifest import (
    BackendContext,
    ConfigContext,
    DoctorContext,
    DoctorFinding,
    Manifest,
    ProbeContext,
    ProbeResult,
)

if TYPE_CHECKING:
    from enginecore.device.backend import Backend

PROJECT = "enginecore"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

REQUIRED_HOOKS = ("enginecore_manifest", "enginecore_probe", "enginecore_create_backend")


class HookSpecs:
    @hookspec(firstresult=True)
    def enginecore_manifest(self) -> Manifest:  # type: ignore[empty-body]
        """Required. Pure data; imports neither torch nor a driver."""

    @hookspec(firstresult=True)
    def enginecore_probe(self, ctx: ProbeContext) -> ProbeResult:  # type: ignore[empty-body]
        """Required. Run in a subprocess with a timeout: is the device usable here, and if not, why and what to do?"""

    @hookspec(firstresult=True)
    def enginecore_create_backend(self, ctx: BackendContext) -> Backend:  # type: ignore[empty-body]
        """Required. Called in the worker process only."""

    @hookspec(firstresult=True)
    def enginecore_config_defaults(self, ctx: ConfigContext) -> dict[str, Any]:  # type: ignore[empty-body]
        """Optional. Preferred settings as data; the user's values win and each change is logged."""

    @hookspec(firstresult=True)
    def enginecore_doctor(self, ctx: DoctorContext) -> list[DoctorFinding]:  # type: ignore[empty-body]
        """Optional. Extra checks for `enginecore doctor`, run in a subprocess."""

    @hookspec(firstresult=True)
    def enginecore_conformance_profile(self) -> Any:
        """Optional. Tolerances, declared performance floors and declared gaps with reason and expiry."""
