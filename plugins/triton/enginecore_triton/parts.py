"""The kernels as a backend takes them, or the reason why there are none here."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from enginecore.device.accelerator import AcceleratorBackend, GuardedOps, PooledGraphs, guarded_attention
from enginecore.device.attention import AttentionBackend
from enginecore.device.capabilities import Capabilities
from enginecore.device.optable import Impl, OpTable

from enginecore_triton.device import DeviceDescription

if TYPE_CHECKING:
    import torch

#: Parts of the compiler as they stand in file names of a traceback.
_COMPILER = ("/triton/compiler/", "/triton/backends/", "/triton/runtime/build.py", "/triton/runtime/driver.py")


@dataclass(frozen=True)
class Kernels:
    """`attention` and `ops` are None, and `reason` says why, where Triton is missing or cannot build for the device."""

    attention: AttentionBackend | None = None
    ops: OpTable | None = None
    capabilities: Capabilities | None = None
    reason: str = ""


def cannot_build(error: BaseException) -> bool:
    """Whether a kernel cannot be built: nothing has run then.

    Triton's own errors say so by their class. What the compiler's native passes and the C compiler raise is a plain
    RuntimeError or OSError; the file that it came through tells it apart from faults of the device.
    """
    import triton.errors

    if isinstance(error, triton.errors.TritonError):
        return True
    if not isinstance(error, (RuntimeError, OSError)):
        return False
    files = (frame.filename.replace("\\", "/") for frame in traceback.extract_tb(error.__traceback__))
    return any(part in file for file in files for part in _COMPILER)


def load_kernels(
    description: DeviceDescription, claim: Callable[[Capabilities], Capabilities], device: torch.device
) -> Kernels:
    """Import Triton and build one small kernel on `device`. Errors other than of building pass."""
    import importlib.util

    if importlib.util.find_spec("triton") is None:
        return Kernels(reason="Triton is not installed")
    import torch

    try:
        from enginecore_triton.attention_backend import TRITON_CAPABILITIES, TritonAttention
        from enginecore_triton.ops.pack_linear import SCHEMES
        from enginecore_triton.optable import TritonOps
    except ImportError as error:
        return Kernels(reason=f"Triton cannot be loaded: {error}")
    ops = TritonOps(description)
    norm = ops.get("rms_norm")
    try:
        assert norm is not None
        norm.run(torch.ones(2, 16, device=device), torch.ones(16, device=device), 1e-6)
    except Exception as error:
        if not cannot_build(error):
            raise
        told = str(error).strip().splitlines() or [type(error).__name__]
        return Kernels(reason=f"Triton cannot build for {description.architecture}: {told[0]}")
    computed = replace(TRITON_CAPABILITIES, quantizations=TRITON_CAPABILITIES.quantizations | SCHEMES)
    capabilities = claim(computed)
    return Kernels(TritonAttention(description, capabilities), ops, capabilities)


class LibraryOps(OpTable):
    """`kernels`, and the products of torch's library for the device where they have none."""

    def __init__(self, kernels: OpTable) -> None:
        from enginecore.ops.reference import pack_linear

        self._kernels = kernels
        self._library = {"pack_linear": Impl(pack_linear, name="torch")}

    def get(self, op: str) -> Impl | None:
        return self._kernels.get(op) or self._library.get(op)


def equip(
    backend: AcceleratorBackend,
    description: DeviceDescription,
    claim: Callable[[Capabilities, bool], Capabilities],
    why_not: str = "",
    improve: Callable[[AttentionBackend], AttentionBackend] | None = None,
) -> None:
    """Give `backend` its capabilities, attention, ops and graphs: the kernels, or torch's references when `why_not` or
    the compiler says so.

    `claim(computed, graphs)` is what the device makes of what attention and ops compute; `graphs` says whether steps
    can be captured. `improve` may put something around the kernels' attention.
    """
    from enginecore.ops.torch_backend import TORCH_CAPABILITIES, ReferenceOps, TorchAttention

    runtime = backend.runtime_api
    device, graphs, kernels = runtime.device(), runtime.can_capture(), Kernels(reason=why_not)
    if not why_not:
        kernels = load_kernels(description, lambda computed: claim(computed, graphs), device)
    if kernels.attention is not None and improve is not None:
        kernels = replace(kernels, attention=improve(kernels.attention))
    # The reference looks at lengths on the host, which cannot be recorded.
    reference = TorchAttention(claim(TORCH_CAPABILITIES, False))
    attention = guarded_attention(kernels.attention, reference, cannot_build, device, kernels.reason)
    if kernels.ops is None or kernels.capabilities is None:
        backend.capabilities, backend.ops = reference.capabilities, ReferenceOps()
    else:
        backend.capabilities, backend.ops = (
            kernels.capabilities,
            GuardedOps(LibraryOps(kernels.ops), cannot_build, device),
        )
        if graphs:
            backend.graphs = PooledGraphs(runtime)
    backend.attach_mover(attention)
    backend.attention = attention
