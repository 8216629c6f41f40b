"""tools/check-tools, which says what is missing before anything is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "check-tools"


def check(python: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", str(SCRIPT), python], capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_no_python() -> None:
    done = check("python-that-is-not-there")
    assert done.returncode == 1
    assert "missing: python-that-is-not-there" in done.stderr and "fix: install Python 3.10 to 3.13" in done.stderr


def test_an_old_python(tmp_path: Path) -> None:
    old = tmp_path / "python-old"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.8.1 && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = check(str(old))
    assert done.returncode == 1 and "Python 3.8.1 found, 3.10 to 3.13 needed" in done.stderr


def test_no_compiler(tmp_path: Path) -> None:
    done = check(sys.executable, CXX=str(tmp_path / "no-compiler"))
    assert done.returncode == 1 and "a C++ compiler" in done.stderr and "fix: " in done.stderr


def test_no_compiler_on_the_path(tmp_path: Path) -> None:
    done = check(sys.executable, PATH=str(tmp_path), CXX="")
    assert done.returncode == 1 and "a C++ compiler" in done.stderr
