"""Makes the planted machine importable and available."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    from machine_xpu import Machine

    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    return Machine(tmp_path)
