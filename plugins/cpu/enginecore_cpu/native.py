"""The compiled kernels, when there are any: `load()` gives the module, `status()` says what there is."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

_NAME = "enginecore_cpu._native"


def load() -> Any | None:
    """The compiled module, or None when the plugin was installed without a compiler."""
    if importlib.util.find_spec(_NAME) is None:
        return None
    return importlib.import_module(_NAME)


def status() -> tuple[str, str]:
    """(which kernels run, why they are not the native ones or an empty string)."""
    try:
        module = load()
    except ImportError as error:
        return "torch", f"the compiled kernels cannot be loaded: {error}"
    if module is None:
        return "torch", "no compiled kernels: the plugin was installed without a C++ compiler"
    return f"native {module.isa()}", ""
