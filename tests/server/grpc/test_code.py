"""The code in the tree is what the definition gives, and its packages are optional."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from enginecore.errors import EngineCoreError
from enginecore.server.grpc import check_installed

ROOT = Path(__file__).resolve().parents[3]

WITHOUT = """
import sys
for name in ("grpc", "grpc_health", "grpc_reflection", "google.protobuf", "opentelemetry"):
    sys.modules[name] = None
import enginecore.server.run
from enginecore.cli.main import main
sys.exit(main(["serve", "no-such-model", "--grpc-port", "0"]))
"""


def test_the_code_is_what_the_definition_gives() -> None:
    script = [sys.executable, str(ROOT / "tools" / "write_grpc_code.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_missing_package_is_told_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    check_installed()
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "enginecore[grpc]" in done.stderr and "Traceback" not in done.stderr, done.stderr
    monkeypatch.setitem(sys.modules, "grpc_health", None)
    with pytest.raises(EngineCoreError, match=r"grpc\.health"):
        check_installed()
