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

from enginecore.cli.main import main


@dataclass(frozen=True)
class Vendor:
    """`folder` is the package's; `python` the interpreter of the environment that it is installed in."""

    folder: Path
    python: Path

    @classmethod
    def new(cls, root: Path) -> Vendor:
        """Write the template for acme's acme_npu, and install it with pip."""
        assert main(["plugin", "new", "acme", "--device", "acme_npu", "--dir", str(root / "acme")]) == 0
        return cls.install(root, root / "acme")

    @classmethod
    def install(cls, root: Path, folder: Path) -> Vendor:
        venv.create(root / "venv", with_pip=False, symlinks=True)
        found = cls(folder, root / "venv" / "bin" / "python")
        [packages] = (root / "venv" / "lib").glob("python*/site-packages")
        # addsitedir, because this environment's own .pth files (editable installs) count too.
        lines = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
        (packages / "shared.pth").write_text("".join(lines))
        done = found.run("pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-e", ".")
        assert done.returncode == 0, done.stdout + done.stderr
        return found

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """`python -m COMMAND` in the package's folder."""
        return subprocess.run(
            [str(self.python), "-m", *command],
            cwd=self.folder,
            env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    @contextmanager
    def start(self, *command: str) -> Iterator[subprocess.Popen[str]]:
        """`python -m COMMAND`, ended with an interrupt when the block is left; its output is one stream, `stderr`."""
        process = subprocess.Popen(
            [str(self.python), "-m", *command],
            cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)


