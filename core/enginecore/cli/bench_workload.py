"""Workloads: what a benchmark asks for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from enginecore.errors import ParameterError

BUILT_IN = "sharegpt_like.json"


@dataclass(frozen=True)
class WorkItem:
    """One request: text or token ids, and how many tokens to generate."""

    prompt: str | list[int]
    output_tokens: int


def load_workload(path: Path | None, count: int) -> list[WorkItem]:
    """The first `count` requests of a workload file (None: the built-in one), repeated when it holds fewer."""
    name = str(path) if path is not None else BUILT_IN
    try:
        if path is None:
            text = resources.files("enginecore.cli").joinpath("data").joinpath(BUILT_IN).read_text(encoding="utf-8")
        else:
            text = path.read_text(encoding="utf-8")
        entries = json.loads(text)
    except OSError as error:
        raise ParameterError(f"workload {name}: {error.strerror}", param="workload") from error
    except ValueError as error:
        raise ParameterError(f"workload {name} is not JSON: {error}", param="workload") from error
    if not isinstance(entries, list) or not entries:
        raise ParameterError(f"workload {name} must be a list of requests that is not empty", param="workload")
    items = [_item(entry, f"workload {name}, request {index}") for index, entry in enumerate(entries)]
    return [items[index % len(items)] for index in range(count)]


def _item(entry: Any, where: str) -> WorkItem:
    if not isinstance(entry, dict):
        raise ParameterError(f"{where} is not an object", param="workload")
    prompt = entry.get("prompt_token_ids", entry.get("prompt"))
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not prompt or not (isinstance(prompt, str) or is_ids):
        raise ParameterError(f'{where} needs "prompt" (text) or "prompt_token_ids" (integers)', param="workload")
    tokens = entry.get("output_tokens")
    if type(tokens) is not int or tokens < 1:
        raise ParameterError(f'{where} needs "output_tokens", at least 1, got {tokens!r}', param="workload")
    return WorkItem(prompt, tokens)
