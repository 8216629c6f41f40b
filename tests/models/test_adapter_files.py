"""Adapters are read as PEFT means them, and whatever is wrong with one is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from enginecore.errors import EngineCoreError, ModelError, ParameterError, UnsupportedError
from enginecore.models.adapter_files import Adapter, find_adapter, read_adapter

from tests.lora.making import make_tensors, write_adapter

LINEARS = tuple(
    (f"model.layers.{layer}.{part}", outputs, inputs)
    for layer in range(2)
    for part, outputs, inputs in (("self_attn.q_proj", 12, 16), ("mlp.down_proj", 16, 24))
)
MODULES = {name: (outputs, inputs) for name, outputs, inputs in LINEARS}
TARGETS = ("q_proj", "down_proj")
Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def tensors(rank: int = 4) -> dict[str, torch.Tensor]:
    return make_tensors(LINEARS, 0, rank, TARGETS)


def read(path: Path, max_rank: int = 8, dtype: torch.dtype = torch.float32) -> Adapter:
    return read_adapter(path, MODULES, max_rank, dtype)


@pytest.mark.parametrize(
    ("settings", "scale_q", "scale_down"),
    [
        ({}, 2.0, 2.0),
        ({"use_rslora": True}, 4.0, 4.0),
        ({"alpha_pattern": {"q_proj": 1, "layers.7.q_proj": 3}}, 0.25, 2.0),
        ({"alpha_pattern": {"^model.layers.0.mlp.down_proj": 6}}, 2.0, 1.5),
    ],
)
def test_the_scale_is_in_b(tmp_path: Path, settings: dict[str, Any], scale_q: float, scale_down: float) -> None:
    given = tensors()
    adapter = read(write_adapter(tmp_path / "a", given, 4, TARGETS, **settings))
    assert adapter.rank == 4 and set(adapter.weights) == set(MODULES)
    for name, scale in (("self_attn.q_proj", scale_q), ("mlp.down_proj", scale_down)):
        a_RI, b_OR = adapter.weights[f"model.layers.0.{name}"]
        prefix = f"base_model.model.model.layers.0.{name}.lora_"
        assert torch.equal(a_RI, given[f"{prefix}A.weight"])
        assert torch.equal(b_OR, given[f"{prefix}B.weight"] * scale)


def test_modules_of_other_ranks(tmp_path: Path) -> None:
    given = tensors() | {name: t for name, t in tensors(8).items() if "down_proj" in name}
    folder = write_adapter(tmp_path / "a", given, 4, TARGETS, rank_pattern={"down_proj": 8})
    adapter = read(folder, dtype=torch.bfloat16)
    assert adapter.rank == 8
    assert {a_RI.shape[0] for a_RI, _ in adapter.weights.values()} == {4, 8}
    assert all(part.dtype == torch.bfloat16 for pair in adapter.weights.values() for part in pair)


def test_the_hash_is_of_what_was_read(tmp_path: Path) -> None:
    first = read(write_adapter(tmp_path / "a", tensors(), 4, TARGETS)).sha256
    assert read(write_adapter(tmp_path / "b", tensors(), 4, TARGETS)).sha256 == first
    assert read(write_adapter(tmp_path / "c", tensors(), 4, TARGETS, lora_alpha=9)).sha256 != first


def test_all_reasons_at_once(tmp_path: Path) -> None:
    folder = write_adapter(
        tmp_path / "a", tensors(16), 16, TARGETS, use_dora=True, bias="all", modules_to_save=["lm_head"],
        init_lora_weights="pissa_niter_4", new_idea={"x": 1}, target_parameters=["experts"], lora_bias=True,
        alpha_pattern={"(a+)+$": 1}, trainable_token_indices=[1],
    )  # fmt: skip
    with pytest.raises(UnsupportedError) as caught:
        read(folder)
    told = "; ".join(caught.value.reasons)
    assert len(caught.value.reasons) == 10
    for word in ("use_dora", "biases", "modules_to_save", "pissa", "new_idea", "target_parameters", "lora_bias",
                 "r = 16", "regular expression", "trainable_token_indices"):  # fmt: skip
        assert word in told, word


def _change(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda given: given | {name: make(given[name])}


def _nan(tensor: torch.Tensor) -> torch.Tensor:
    out = tensor.clone()
    out[1, 2] = float("nan")
    return out


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_change(f"{Q0}A.weight", _nan), "lora_A holds NaN"),
        (_change(f"{Q0}B.weight", lambda t: t / 0), "lora_B holds NaN or infinity"),
        (_change(f"{Q0}B.weight", lambda t: t * 1e6), "too large for float16"),
        (_change(f"{Q0}A.weight", lambda t: t[:, :-1].contiguous()), "must be (4, 16) and (12, 4)"),
        (_change(f"{Q0}A.weight", lambda t: t[0].contiguous()), "lora_A is (16,)"),
        (_change(f"{Q0}A.weight", lambda t: t.to(torch.int8)), "int8"),
        (lambda given: {n: t for n, t in given.items() if n != f"{Q0}B.weight"}, "has no lora_B"),
        (lambda given: {n: t for n, t in given.items() if "layers.1.mlp" not in n}, "no weights for 1 of its modules"),
        (lambda given: {}, "it has no weights"),
        (lambda given: given | {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 16)}, "no module 'lm_head'"),
        (lambda given: given | {"base_model.model.x.lora_embedding_A": torch.ones(4, 16)}, "lora_embedding_A"),
        (lambda given: given | {f"{Q0}magnitude_vector": torch.ones(4)}, "neither lora_A nor lora_B"),
    ],
)
def test_weights_that_do_not_fit(tmp_path: Path, damage: Callable[..., dict[str, torch.Tensor]], told: str) -> None:
    folder = write_adapter(tmp_path / "a", damage(tensors()), 4, TARGETS)
    with pytest.raises(UnsupportedError) as caught:
        read(folder, dtype=torch.float16)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("adapter_config.json", b"{", "not JSON"),
        ("adapter_config.json", b"[" * 100_000, "not JSON"),
        ("adapter_config.json", b"[]", "not an object"),
        ("adapter_config.json", b'{"r": 1e9, "lora_alpha": 1}', "r must be a whole number"),
        ("adapter_config.json", b'{"r": 4, "lora_alpha": -1}', "lora_alpha must be"),
        ("adapter_config.json", b'{"r": 4, "lora_alpha": true}', "lora_alpha must be"),
        ("adapter_config.json", b'{"r": 4, "lora_alpha": 4, "rank_pattern": [1]}', "rank_pattern must be an object"),
        ("adapter_config.json", b" " * (1 << 20) + b"{}", "more than the"),
        ("adapter_model.safetensors", b"", "broken"),
        ("adapter_model.safetensors", b"\xff" * 64, "broken"),
        ("adapter_model.safetensors", b"\x02" + b"\0" * 7 + b"{}" + b"\0" * (17 << 20), "more than the"),
        ("adapter_model.safetensors", None, "has no adapter_model.safetensors"),
        ("adapter_config.json", None, "has no adapter_config.json"),
    ],
)
def test_files_that_are_broken(tmp_path: Path, file: str, content: bytes | None, told: str) -> None:
    folder = write_adapter(tmp_path / "a", tensors(), 4, TARGETS)
    if content is None:
        (folder / file).unlink()
        (folder / "adapter_model.bin").write_bytes(b"pickle")
    else:
        (folder / file).write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read(folder)
    assert told in str(caught.value)
    assert not isinstance(caught.value, UnsupportedError)


def test_a_truncated_file(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", tensors(), 4, TARGETS)
    file = folder / "adapter_model.safetensors"
    whole = file.read_bytes()
    for end in (4, 100, len(whole) - 1):
        file.write_bytes(whole[:end])
        with pytest.raises(ModelError):
            read(folder)


def test_nothing_outside_of_the_root(tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    inside = write_adapter(root / "team" / "a", tensors(), 4, TARGETS)
    outside = write_adapter(tmp_path / "secret", tensors(), 4, TARGETS)
    (root / "link").symlink_to(outside)
    (root / "good").symlink_to(inside)
    (root / "loop").symlink_to(root / "loop")
    (root / "file").write_text("x")
    for path in ("team/a", "good", str(inside), "../adapters/team/a"):
        assert find_adapter(path, str(root)) == inside
    escapes = ["../secret", "link", str(outside), "/etc", "team/a/../../../secret", "~", "nothing", "loop", "file"]
    for path in (*escapes, "\0", "x" * 5000):
        with pytest.raises(ParameterError, match="under the folder for adapters"):
            find_adapter(path, str(root))
    sly = root / "sly"
    sly.mkdir()
    (sly / "adapter_config.json").write_text((outside / "adapter_config.json").read_text())
    (sly / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    with pytest.raises(ParameterError, match="link out of the folder"):
        read_adapter(sly, MODULES, 8, torch.float32, str(root))
    with pytest.raises(EngineCoreError):
        find_adapter("anything", str(tmp_path / "no such root"))


def test_unknown_settings_that_ask_for_nothing(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", tensors(), 4, TARGETS, something_new=None, other={}, loftq_config={})
    assert len(read(folder).weights) == 4
    config = json.loads((folder / "adapter_config.json").read_text())
    assert "something_new" in config
