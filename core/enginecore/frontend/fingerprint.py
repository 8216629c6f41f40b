"""What can change a result, in one place, and a short name for it: `system_fingerprint`.

Two servers with one fingerprint run the same weights, tokenizer, template, code, kernels and settings on the same kind
of device. Where the device is batch invariant they give the same tokens for the same seeded request.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from enginecore._version import __version__
from enginecore.adapters import AdapterInfo
from enginecore.config import EngineArgs, EngineConfig, ReadyInfo
from enginecore.device.discovery import GROUP
from enginecore.errors import EngineCoreError
from enginecore.models.store import resolve_model

#: Weights of up to this many bytes are read whole for their hash; of larger ones as many blocks, evenly spread, and the
#: start and end of each file. Files that differ in a few bytes only may then look the same.
WEIGHTS_SAMPLE_BYTES = 64 * 2**20
_BLOCK = 64 * 2**10
_EDGE = 2**20

#: Settings that say where things are or how they are called, not what comes out.
_NOT_SETTINGS = frozenset({"model", "model_path", "served_model_name", "choices", "device", "plugin", "dtype",
                           "max_cpu_loras", "lora_root"})  # fmt: skip
#: Code that is hashed: what runs, and what it is compiled from.
_CODE = frozenset({".py", ".so", ".pyd", ".dll", ".dylib", ".json", ".cpp", ".h", ".cu"})
_LIBRARIES = ("torch", "triton", "transformers", "tokenizers", "numpy", "jinja2", "llguidance")


def fingerprint(
    ready: ReadyInfo, *, tokenizer: Any = None, chat_template: str | None = None, defaults: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Everything that can change a result; `id` is the name of all the rest. `defaults` are those of sampling. Reads
    files: some tenths of a second for a large model."""
    config = ready.config
    settings = {name: value for name, value in msgspec.to_builtins(config).items() if name not in _NOT_SETTINGS}
    facts: dict[str, Any] = {
        "weights": weights_hash(Path(config.model_path)),
        "tokenizer": _tokenizer_hash(tokenizer) if tokenizer is not None else None,
        "chat_template": _text_hash(chat_template or ""),
        "dtype": config.dtype,
        "device": {"summary": ready.device_summary, "machine": platform.machine(), "details": ready.details},
        "batch_invariant": bool(ready.details.get("batch_invariant", False)),
        "code": _code(config),
        "libraries": _versions(_LIBRARIES),
        "settings": settings,
        "sampling_defaults": defaults or {},
        "seed_policy": f"requests without a seed get one from the engine's ({config.seed}) and their order of arrival; "
        "choice i of a request has seed + i",
    }
    return _named(facts)


def with_adapter(base: dict[str, Any], adapter: AdapterInfo) -> dict[str, Any]:
    """The fingerprint of answers that an adapter has a part in, from that of its base model."""
    facts = {name: value for name, value in base.items() if name not in ("id", "object")}
    told = {"name": adapter.name, "sha256": adapter.sha256, "rank": adapter.rank}
    return _named({**facts, "adapter": told})


def _named(facts: dict[str, Any]) -> dict[str, Any]:
    digest = hashlib.sha256(msgspec.json.encode(facts, order="deterministic", enc_hook=str)).hexdigest()
    return {"id": f"fp_{digest[:20]}", "object": "fingerprint", **facts}


def prepare_fingerprint(args: EngineArgs) -> None:
    """Hash now the files of the model and of the code, as `fingerprint` would later. What is wrong with a model is left
    to the engine to say."""
    with contextlib.suppress(EngineCoreError, OSError):
        package_hash("enginecore")
        model = resolve_model(
            args.model,
            allow_download=False,
            allow_pickle=args.allow_pickle,
            trust_remote_code=args.trust_remote_code,
        )
        weights_hash(Path(model.path))


def weights_hash(path: Path) -> dict[str, str]:
    """A hash of a model's files, and whether all of their bytes are in it. Files that look unchanged are not read
    again."""
    files = [path] if path.is_file() else sorted(each for each in _weight_files(path))
    seen = [(file, file.stat()) for file in files]
    digest, whole = _hash_files(path, tuple((file, stat.st_size, stat.st_mtime_ns) for file, stat in seen))
    return {"sha256": digest, "method": "whole" if whole else "sampled"}


@functools.lru_cache(maxsize=8)
def _hash_files(path: Path, seen: tuple[tuple[Path, int, int], ...]) -> tuple[str, bool]:
    """(sha256, whether of every byte) of (file, bytes, time of change) below `path`."""
    files, sizes = [file for file, _, _ in seen], [size for _, size, _ in seen]
    whole = sum(sizes) <= WEIGHTS_SAMPLE_BYTES
    state = hashlib.sha256()
    for file, size in zip(files, sizes, strict=True):
        state.update(f"{'' if file == path else file.relative_to(path).as_posix()}\0{size}\0".encode())
        share = size if whole else WEIGHTS_SAMPLE_BYTES * size // sum(sizes)
        _add_file(state, file, size, share)
    return state.hexdigest(), whole


def _weight_files(path: Path) -> Iterable[Path]:
    if not path.is_dir():
        return []
    named = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "config.json",
             "[0-9]*_*/*.safetensors", "[0-9]*_*/config.json")  # fmt: skip
    return {file for pattern in named for file in path.glob(pattern) if file.is_file()}


def _add_file(state: Any, file: Path, size: int, share: int) -> None:
    with open(file, "rb") as stream:
        if share >= size:
            for block in iter(lambda: stream.read(2**20), b""):
                state.update(block)
            return
        state.update(stream.read(_EDGE))
        count = max(1, share // _BLOCK)
        for index in range(count):
            stream.seek(index * (size - _BLOCK) // count)
            state.update(stream.read(_BLOCK))
        stream.seek(max(0, size - _EDGE))
        state.update(stream.read(_EDGE))


def _text_hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _tokenizer_hash(tokenizer: Any) -> str:
    serialized = getattr(tokenizer, "serialized", None)
    if serialized is None:  # one that is not from a file
        pieces = [bytes(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)]
        return hashlib.sha256(b"\0".join(pieces)).hexdigest()
    return _text_hash(serialized())


def _code(config: EngineConfig) -> dict[str, Any]:
    """Version and hash of the engine's own code and of the plugin's, kernels included."""
    found = {"enginecore": {"version": __version__, "sha256": package_hash("enginecore")}}
    plugin = config.plugin.partition(" ")[0]
    for entry in metadata.entry_points(group=GROUP):
        if entry.dist is not None and entry.dist.name == plugin:
            found[plugin] = {"version": entry.dist.version, "sha256": package_hash(entry.module.partition(".")[0])}
    for package in ("enginecore_triton",):  # kernels that several plugins use
        if package not in found and importlib.util.find_spec(package) is not None:
            found[package] = {"version": "", "sha256": package_hash(package)}
    return found


@functools.cache
def package_hash(package: str) -> str:
    """A hash over a package's code, found without importing it; "" when it is not there."""
    spec = importlib.util.find_spec(package)
    state = hashlib.sha256()
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            for name in sorted(names):
                file = Path(folder, name)
                if file.suffix in _CODE:
                    state.update(str(file.relative_to(root)).encode() + b"\0")
                    state.update(hashlib.sha256(file.read_bytes()).digest())
    return state.hexdigest() if spec is not None else ""


def _versions(names: Iterable[str]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
