"""Sampling defaults that come with a model.

Precedence, the same on every route: the request's value, the operator's override, the model's generation_config.json,
the API's default. An explicit null counts as absent. An explicit `SamplingParams` in Python is complete: nothing is
filled in.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from enginecore.errors import ParameterError
from enginecore.request import SamplingParams

logger = logging.getLogger("enginecore.frontend")

#: Field of generation_config.json -> field of SamplingParams.
_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def sampling_defaults(source: str, model_path: str, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """Defaults by SamplingParams field.

    `source` is "auto" (the model's own directory), "none" (switched off) or a directory that holds a
    generation_config.json. `overrides` uses the same names as generation_config.json. Raises ParameterError for a
    directory without the file and for an override that is unknown or out of range; a bad value in the model's own file
    is skipped with a warning.
    """
    defaults: dict[str, Any] = {}
    if source != "none":
        path = Path(model_path if source == "auto" else source) / "generation_config.json"
        if path.is_file():
            defaults = _usable(json.loads(path.read_text(encoding="utf-8")), str(path))
        elif source != "auto":
            raise ParameterError(f"no generation_config.json in {source!r}", param="generation_config")
    for name, value in (overrides or {}).items():
        if name not in _FIELDS:
            raise ParameterError(
                f"{name!r} cannot be overridden; known: {', '.join(_FIELDS)}", param="override_generation_config"
            )
        defaults[_FIELDS[name]] = value
    SamplingParams(**defaults)
    shown = ", ".join(f"{name}={value}" for name, value in defaults.items())
    logger.info("sampling defaults for requests that do not say otherwise: %s", shown or "the API's own")
    return defaults


def _usable(raw: Any, path: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, field in _FIELDS.items():
        value = raw.get(name) if isinstance(raw, dict) else None
        if value is None:
            continue
        try:
            SamplingParams(**{field: value})
        except ParameterError as error:
            logger.warning("ignored %s of %s: %s", name, path, error)
        else:
            values[field] = value
    return values
