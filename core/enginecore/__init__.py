"""enginecore: an inference and serving engine for language models whose core knows nothing about hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from enginecore._version import __version__

if TYPE_CHECKING:
    from enginecore.constraints import StructuredOutputsParams
    from enginecore.device.hookspecs import hookimpl
    from enginecore.frontend.async_llm import AsyncLLM
    from enginecore.frontend.beam_search import BeamSearchParams
    from enginecore.frontend.llm import LLM
    from enginecore.request import SamplingParams

__all__ = [
    "LLM", "AsyncLLM", "BeamSearchParams", "SamplingParams", "StructuredOutputsParams", "__version__", "hookimpl",
]  # fmt: skip

_HOMES = {
    "LLM": "enginecore.frontend.llm",
    "AsyncLLM": "enginecore.frontend.async_llm",
    "BeamSearchParams": "enginecore.frontend.beam_search",
    "SamplingParams": "enginecore.request",
    "StructuredOutputsParams": "enginecore.constraints",
    "hookimpl": "enginecore.device.hookspecs",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `enginecore --help` and plugin manifests must not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'enginecore' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
