"""The kernels on the host's tensors, run by Triton's interpreter: a whole backend for the conformance kit."""

from __future__ import annotations

from dataclasses import replace

from enginecore.device import BackendContext
from enginecore.ops.torch_backend import TorchBackend
from enginecore_triton import DeviceDescription
from enginecore_triton.attention_backend import TRITON_CAPABILITIES, TritonAttention
from enginecore_triton.optable import TritonOps

#: Enough multiprocessors that contexts of a few hundred tokens are cut into parts.
DEVICE = DeviceDescription(multiprocessors=64)


class InterpretedBackend(TorchBackend):
    def __init__(self, ctx: BackendContext) -> None:
        super().__init__(ctx)
        # The interpreter's bfloat16 is wrong: hardware has to show it.
        self.capabilities = replace(TRITON_CAPABILITIES, dtypes=frozenset({"float32", "float16"}))
        self.attention = TritonAttention(DEVICE, self.capabilities)
        self.ops = TritonOps(DEVICE)


def make() -> InterpretedBackend:
    return InterpretedBackend(BackendContext(device="interpreted", index=0))
