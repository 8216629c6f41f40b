"""Importing the core, `--help` and reading manifests open no device file and load no driver, in any process they start.

An audit hook, put into every Python process through sitecustomize, writes down what is opened and loaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Files under /dev that belong to no device.
HARMLESS = ("/dev/null", "/dev/urandom", "/dev/random", "/dev/shm/", "/dev/fd/", "/dev/stdin", "/dev/tty")

HOOK = """
import os, sys

def _watch(event, arguments, _log=os.open({log!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        path = os.fsdecode(arguments[0])
        if path.startswith("/dev/"):
            os.write(_log, f"open {{path}}\\n".encode())
    elif event == "ctypes.dlopen" and arguments[0]:
        os.write(_log, f"dlopen {{os.fsdecode(arguments[0])}}\\n".encode())
    elif event == "import" and arguments[0] == "torch":
        os.write(_log, b"import torch\\n")

os.write(_watch.__defaults__[0], b"process\\n")
sys.addaudithook(_watch)
"""

CODE = {
    "import": "import enginecore, enginecore.device, enginecore.cli.main",
    "help": "from enginecore.cli.main import main; main(['--help']); main(['serve', '--help'])",
    "manifests": "from enginecore.device.discovery import discover; assert len(discover()) >= 5",
    "opens": "open('/dev/zero').close()",
    "loads": "import ctypes; ctypes.CDLL('libc.so.6')",
}


def watched(folder: Path, code: str) -> list[str]:
    """What Python processes opened and loaded while `code` ran; the first entries are one "process" for each."""
    log = folder / "log"
    (folder / "sitecustomize.py").write_text(HOOK.format(log=str(log)))
    paths = os.pathsep.join([str(folder), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = log.read_text().splitlines()
    return [line for line in lines if not line.startswith(tuple(f"open {path}" for path in HARMLESS))]


@pytest.mark.parametrize(("name", "processes"), [("import", 1), ("help", 1), ("manifests", 2)])
def test_no_device_file_no_library_no_torch(tmp_path: Path, name: str, processes: int) -> None:
    assert watched(tmp_path, CODE[name]) == ["process"] * processes


def test_the_watch_sees_what_it_must(tmp_path: Path) -> None:
    assert "open /dev/zero" in watched(tmp_path, CODE["opens"])
    assert "dlopen libc.so.6" in watched(tmp_path, CODE["loads"])
