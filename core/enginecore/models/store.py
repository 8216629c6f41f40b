"""From what the user typed to files on disk: a directory, a .gguf file, an alias or a hub id. No torch here.

The order is: alias, then path, then hub id. `./NAME` always means a path.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from enginecore.errors import ModelError
from enginecore.models.aliases import ALIASES, Progress, fetch_alias
from enginecore.models.gguf_config import hf_config, token_ids
from enginecore.models.gguf_reader import GGUFFile

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt", "*.tiktoken"]
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk.

    `path` is a directory or a .gguf file (what the tokenizer loads from); `kind` is "safetensors", "gguf" or "bin";
    `weights` are the weight files in order; `config` is transformers' config.json as plain data, `generation_config`
    likewise (empty when there is none).
    """

    name: str
    path: str
    kind: str
    config: dict[str, Any]
    generation_config: dict[str, Any] = field(default_factory=dict)
    weights: tuple[str, ...] = ()
    trust_remote_code: bool = False

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weight files."""
        return sum(os.path.getsize(path) for path in self.weights)

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end a text: those of generation_config, else of config."""
        value = self.generation_config.get("eos_token_id", self.config.get("eos_token_id"))
        return value if isinstance(value, list) else [] if value is None else [value]


def resolve_model(
    name: str,
    *,
    allow_download: bool = True,
    progress: Progress | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> ModelFiles:
    """Find the files of model `name`, fetching them when it is an alias or a hub id.

    `progress` gets a line of text now and then. Raises ModelError, in one line, when there is no such model, when its
    files are incomplete, when the weights are pickled and `allow_pickle` is off, and when the model brings code of its
    own and `trust_remote_code` is off.
    """
    if not name:
        raise ModelError("the name of the model is empty")
    if name in ALIASES:
        found = fetch_alias(name, allow_download=allow_download, progress=progress)
        return _from_gguf(name, found) if found.is_file() else _from_directory(name, found, allow_pickle, False)
    path = Path(name).expanduser()
    if path.is_dir():
        return _from_directory(name, path, allow_pickle, trust_remote_code)
    if path.is_file():
        if path.suffix == ".gguf":
            return _from_gguf(name, path)
        raise ModelError(f"model {name!r} is a file but not a .gguf file; give the directory that holds config.json")
    if name.startswith((".", "/", "~")) or name.endswith(".gguf") or not _HUB_ID.fullmatch(name):
        raise ModelError(f"model {name!r} does not exist: no such file or directory")
    return _from_directory(name, _from_hub(name, allow_download, progress), allow_pickle, trust_remote_code)


def _from_gguf(name: str, path: Path) -> ModelFiles:
    file = GGUFFile(str(path))
    return ModelFiles(name, str(path), "gguf", hf_config(file), token_ids(file), (str(path),))


def _from_directory(name: str, path: Path, allow_pickle: bool, trust_remote_code: bool) -> ModelFiles:
    config_path = path / "config.json"
    if not config_path.is_file():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return _from_gguf(name, ggufs[0])
        more = f" and {len(ggufs)} .gguf files; name one of them" if ggufs else ""
        raise ModelError(f"{path} has no config.json{more}")
    config = read_json(config_path)
    if config.get("auto_map") and not trust_remote_code:
        raise ModelError(
            f"model {name!r} brings Python code of its own (auto_map in {config_path})",
            fix="pass --trust-remote-code if you trust its author",
        )
    generation_path = path / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    kind, weights = _weights(path, allow_pickle)
    return ModelFiles(name, str(path), kind, config, generation, weights, trust_remote_code)


def _weights(path: Path, allow_pickle: bool) -> tuple[str, tuple[str, ...]]:
    for kind, single, index_name in (
        ("safetensors", "model.safetensors", "model.safetensors.index.json"),
        ("bin", "pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        found: tuple[str, ...] = ()
        if (path / index_name).is_file():
            found = _indexed(path, path / index_name)
        elif (path / single).is_file():
            found = (str(path / single),)
        elif kind == "safetensors":
            files = sorted(path.glob("*.safetensors"))
            found = tuple(str(file) for file in files if not file.name.startswith("adapter_"))
        if found and kind == "bin" and not allow_pickle:
            break
        if found:
            return kind, found
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        raise ModelError(
            f"{path} has only pickled weights ({pickles[0]}), which can run code when opened; nothing was read",
            fix="convert them to safetensors, or pass --allow-pickle for torch's weights-only loader",
        )
    raise ModelError(f"{path} has a config.json but no weights (looked for model.safetensors and its index)")


def _indexed(path: Path, index_path: Path) -> tuple[str, ...]:
    """The shards that an index names, all of which must be there and inside the directory."""
    mapping = read_json(index_path).get("weight_map")
    if not isinstance(mapping, dict) or not mapping or not all(isinstance(name, str) for name in mapping.values()):
        raise ModelError(f"{index_path} has no usable weight_map")
    shards = sorted(set(mapping.values()))
    for shard in shards:
        if os.path.basename(shard) != shard:
            raise ModelError(f"{index_path} names a file outside the directory: {shard!r}")
        if not (path / shard).is_file():
            raise ModelError(f"{path / shard} is missing ({index_path.name} names it)")
    return tuple(str(path / shard) for shard in shards)


def _from_hub(name: str, allow_download: bool, progress: Progress | None) -> Path:
    tried = f"no such file or directory, not one of the aliases ({', '.join(ALIASES)})"
    try:
        import huggingface_hub
    except ImportError as error:
        raise ModelError(f"model {name!r} not found: {tried}, and huggingface_hub is not installed") from error
    local_only = not allow_download or bool(os.environ.get("HF_HUB_OFFLINE"))
    if progress and not local_only:
        progress(f"looking for {name} on the Hugging Face hub")
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=_HUB_FILES, local_files_only=local_only, etag_timeout=10, max_workers=4
            )
        )
    except Exception as error:  # the hub client raises many kinds, network libraries' own among them
        told = f"model {name!r} not found: {tried}, {_hub_problem(error, local_only)}"
        raise ModelError(told, fix=_meant(name)) from error


def _hub_problem(error: Exception, local_only: bool) -> str:
    if local_only:
        return "not in the hub's cache (downloads are off)"
    text = str(error).strip()
    if "onnect" in text:  # ConnectError, ConnectTimeout, "connection refused": the words of several libraries
        return "and the Hugging Face hub cannot be reached from here"
    return f"the hub said {type(error).__name__}: {text.splitlines()[0][:200] if text else 'no details'}"


def _meant(name: str) -> str | None:
    close = difflib.get_close_matches(name, ALIASES, n=1)
    return f"did you mean {close[0]}?" if close else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; ModelError when the file cannot be read or is something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value
