"""A vendor's machine for tests: an environment of its own that sees this one's packages, so that nothing is fetched."""

from __future__ import annotations

import os
import signal
import site
import subprocess
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Vendor:
    """`folder` is where its shell stands; `bin` is the environment's."""

    folder: Path
    bin: Path

    @classmethod
    def new(cls, root: Path) -> Vendor:
        """An empty folder, and an environment whose commands are those that are written to a user."""
        venv.create(root / "venv", with_pip=False, symlinks=True)
        vendor = cls(root / "home", root / "venv" / "bin")
        vendor.folder.mkdir()
        [packages] = (root / "venv" / "lib").glob("python*/site-packages")
        # addsitedir, because this environment's own .pth files (editable installs) count too.
        lines = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
        (packages / "shared.pth").write_text("".join(lines))
        for name in ("enginecore", "pytest", "pip"):
            script = vendor.bin / name
            script.write_text(f'#!/bin/sh\nexec "{vendor.bin}/python" -m {name} "$@"\n')
            script.chmod(0o755)
        return vendor

    @property
    def environment(self) -> dict[str, str]:
        """pip fetches nothing, also where the command says nothing of it."""
        offline = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_QUIET": "1"}
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, **offline, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PATH": path}

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        """A line of a shell; `cd` holds for the next one."""
        if command.startswith("cd "):
            self.folder = self.folder / command.removeprefix("cd ")
        return subprocess.run(
            command if not command.startswith("cd ") else "true",
            shell=True, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip

    @contextmanager
    def start(self, command: str) -> Iterator[subprocess.Popen[str]]:
        """A command that runs until the block is left, and is interrupted then; read its `stderr`."""
        process = subprocess.Popen(
            command.split(), cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
