"""Which schemes a model's weights need on the device, and what stands against them. No torch."""

from __future__ import annotations

from enginecore.device.capabilities import Capabilities
from enginecore.errors import ParameterError
from enginecore.models.gguf_reader import GGML_TYPES, GGUFFile
from enginecore.models.store import ModelFiles

#: Types in a GGUF file that are plain numbers.
FLOAT_TYPES = frozenset({0, 1, 28, 30})

#: What GGUF's K-quants are turned into for devices that do not have them (`enginecore.ops.kquants`).
SIMPLER = {"q4_k": "q4_1", "q5_k": "q5_1", "q2_k": "q8_0", "q3_k": "q8_0", "q6_k": "q8_0"}

#: How the weights that are quantised while loading lie on the device.
INT8_SCHEME = "int8"


def needed_schemes(files: ModelFiles, quantization: str | None) -> list[str]:
    """Sorted names such as "q4_1". ParameterError when `quantization` does not apply to these files."""
    if quantization is None:
        return []
    if quantization == "int8":
        return [INT8_SCHEME]
    if files.kind != "gguf":
        raise ParameterError(
            f"quantization 'gguf' serves the blocks of a GGUF file; {files.name} is {files.kind}",
            param="quantization",
            fix="use int8, which works on any checkpoint",
        )
    types = {
        info.ggml_type for path in files.weights for info in GGUFFile(path).tensors.values() if len(info.shape) == 2
    }
    return sorted(GGML_TYPES[kind][0].lower() for kind in types - FLOAT_TYPES)


def served_scheme(scheme: str, capabilities: Capabilities) -> str | None:
    """What weights in `scheme` are on a device with `capabilities`: as they are, simpler, or None: not at all."""
    for choice in (scheme, SIMPLER.get(scheme)):
        if choice in capabilities.quantizations:
            return choice
    return None


def quantization_reasons(files: ModelFiles, quantization: str | None, capabilities: Capabilities) -> list[str]:
    """Why a device with `capabilities` cannot serve it so; empty when it can."""
    known = ", ".join(sorted(capabilities.quantizations)) or "none"
    return [
        f"quantization {quantization} needs weights in {scheme}, which the device does not have (it has: {known})"
        for scheme in needed_schemes(files, quantization)
        if served_scheme(scheme, capabilities) is None
    ]
