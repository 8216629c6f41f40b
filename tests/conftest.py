"""Fixtures that every test may use."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
# Before torch is loaded, and inherited by servers: threads that wait must not spin where engines share few cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
sys.path.insert(0, str(ROOT))  # so that tests can share helpers: `from tests.models.tiny import ...`

DATA = Path(__file__).parent / "data"

# How long an example takes says more about the machine's other work than about the code.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Path of the small real model's GGUF file, fetched into the user's cache when it is not there. Never skips."""
    from enginecore.models.store import resolve_model

    return resolve_model("smollm2-135m").path


@pytest.fixture(scope="session")
def greedy_reference() -> list[dict[str, Any]]:
    """Cases with prompt_token_ids, output_token_ids and top5, from an independent oracle in float32."""
    return json.loads((DATA / "greedy_float32.json").read_text())["cases"]
