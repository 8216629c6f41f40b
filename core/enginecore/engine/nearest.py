"""What to type instead of settings that a device refuses."""

from __future__ import annotations

from enginecore.device import Capabilities

#: For each dtype those that hold its values best, best first. float16 has too small a range for many models made in
#: bfloat16, so it comes last there.
_SUBSTITUTES = {
    "bfloat16": ("float32", "float16"),
    "float16": ("bfloat16", "float32"),
    "float32": ("bfloat16", "float16"),
}


def nearest_settings(
    capabilities: Capabilities, dtype: str, block_size: int, kv_dtype: str | None = None
) -> str | None:
    """Options nearest to the refused ones that the device claims; None when none of these is at fault."""
    advice = []
    if dtype not in capabilities.dtypes:
        near = next((name for name in _SUBSTITUTES.get(dtype, ()) if name in capabilities.dtypes), None)
        if near is not None:
            advice.append(f"--dtype {near}")
    if capabilities.block_sizes and block_size not in capabilities.block_sizes:
        size = min(capabilities.block_sizes, key=lambda size: (abs(size - block_size), size))
        advice.append(f"--block-size {size}")
    if kv_dtype is not None and kv_dtype != dtype and kv_dtype not in capabilities.kv_dtypes:
        advice.append("--kv-cache-dtype auto")
    return "try " + " ".join(advice) if advice else None
