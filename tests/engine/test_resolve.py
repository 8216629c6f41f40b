"""Settings: who wins, what is recorded, and the arithmetic of fitting the cache, with exact numbers."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
from enginecore.config import EngineArgs
from enginecore.device.discovery import InstalledPlugin
from enginecore.device.select import SelectedDevice
from enginecore.engine.resolve import Choices, Settings, fit_blocks, resolve_max_model_len, resolve_settings
from enginecore.errors import BrokenPluginError, KVCacheTooSmall, ParameterError

DTYPES = frozenset({"float32", "bfloat16"})


@pytest.fixture
def selected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device whose plugin prefers what the test says."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(preferred: str = "{}") -> SelectedDevice:
        name = f"plugin_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(
            textwrap.dedent(f"""
            from enginecore import hookimpl
            seen = []
            @hookimpl
            def enginecore_config_defaults(ctx):
                seen.append(ctx)
                return {preferred}
            """)
        )
        monkeypatch.setattr("enginecore.device.select.load_hooks", _hooks_of(name))
        plugin = InstalledPlugin(distribution="enginecore-acme", version="1.0", entry_point="acme", value=name)
        return SelectedDevice(plugin=plugin, device="acme")

    return make


def _hooks_of(name: str) -> Any:
    import importlib

    import pluggy
    from enginecore.device.hookspecs import PROJECT, HookSpecs

    def load(plugin: InstalledPlugin) -> Any:
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(HookSpecs)
        manager.register(importlib.import_module(name))
        return manager.hook

    return load


def resolve(
    selected: SelectedDevice, config: dict[str, Any] | None = None, dtypes: frozenset[str] = DTYPES, **args: Any
) -> tuple[Settings, dict[str, tuple[str, str]]]:
    choices = Choices()
    settings = resolve_settings(EngineArgs(**args), selected, config or {}, dtypes, choices)
    return settings, {name: (value, reason) for name, value, reason in choices.made}


# ---- settings ----------------------------------------------------------------------------------------------------


def test_defaults_are_noted(selected: Any) -> None:
    settings, noted = resolve(selected())
    assert settings == Settings("float32", 256, 2048, 0.9, "float32")
    assert noted["max_num_seqs"] == ("256", "default") and noted["memory_utilization"] == ("0.9", "default")


def test_the_plugins_preference_beats_the_default_and_the_user_beats_both(selected: Any) -> None:
    device = selected('{"max_num_seqs": 32, "max_num_batched_tokens": 512, "dtype": "bfloat16"}')
    settings, noted = resolve(device, max_num_seqs=7)
    assert settings == Settings("bfloat16", 7, 512, 0.9, "bfloat16")
    assert "max_num_seqs" not in noted
    assert noted["max_num_batched_tokens"] == ("512", "preferred by enginecore-acme")
    assert noted["dtype"] == ("bfloat16", "preferred by enginecore-acme")
    assert resolve(device, dtype="float32")[0].dtype == "float32"


def test_the_plugin_sees_the_model_and_what_is_open(selected: Any) -> None:
    device = selected()
    resolve(device, {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3}, max_num_seqs=7)
    import importlib

    [context] = importlib.import_module(device.plugin.value).seen
    assert (context.device, context.model_type, context.hidden_size, context.num_layers) == ("acme", "llama", 64, 3)
    assert set(context.unset) == {"max_num_batched_tokens", "memory_utilization", "dtype"}


def test_a_plugin_that_answers_nonsense_is_named(selected: Any) -> None:
    with pytest.raises(BrokenPluginError, match=r"enginecore-acme 1\.0"):
        resolve(selected('["max_num_seqs"]'))


@pytest.mark.parametrize(
    ("config", "dtypes", "dtype", "reason"),
    [
        ({"dtype": "bfloat16"}, DTYPES, "bfloat16", "the checkpoint's own"),
        ({"torch_dtype": "torch.bfloat16"}, DTYPES, "bfloat16", "the checkpoint's own"),
        ({"torch_dtype": "float16"}, DTYPES, "float32", "the device has no float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, DTYPES, "bfloat16", "the checkpoint's own"),
        ({}, DTYPES, "float32", "the checkpoint's own"),
    ],
)
def test_dtype_auto(selected: Any, config: dict[str, Any], dtypes: frozenset[str], dtype: str, reason: str) -> None:
    settings, noted = resolve(selected(), config, dtypes)
    assert settings.dtype == dtype and noted["dtype"] == (dtype, reason)


def test_dtype_of_the_user_is_taken_as_it_is(selected: Any) -> None:
    settings, noted = resolve(selected(), {"dtype": "bfloat16"}, dtype="float16")
    assert settings.dtype == "float16" and "dtype" not in noted


# ---- max_model_len -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "length", "noted"), [(None, 512, True), ("auto", 512, False), (100, 100, False)])
def test_max_model_len(asked: Any, length: int, noted: bool) -> None:
    choices = Choices()
    assert resolve_max_model_len(EngineArgs(max_model_len=asked), 512, choices) == length
    assert bool(choices.made) == noted


def test_max_model_len_above_the_models_positions() -> None:
    with pytest.raises(ParameterError, match="max_model_len 513 is above the model's 512 positions") as caught:
        resolve_max_model_len(EngineArgs(max_model_len=513), 512, Choices())
    assert caught.value.param == "max_model_len" and "512" in str(caught.value.fix)


# ---- fitting the cache -------------------------------------------------------------------------------------------


def fit(length: int, block_bytes: int, available: int | None, seqs: int = 4, **args: Any) -> tuple[int, int, Choices]:
    choices = Choices()
    blocks, fitted = fit_blocks(EngineArgs(**args), length, block_bytes, available, seqs, choices)
    return blocks, fitted, choices


def test_blocks_from_memory() -> None:
    assert fit(100, 1000, 20_999)[:2] == (20, 100)
    assert fit(100, 1000, 7000)[:2] == (7, 100), "100 tokens need exactly 7 blocks of 16"


def test_no_more_than_all_sequences_can_use() -> None:
    blocks, _, choices = fit(100, 1000, 10**9)
    assert blocks == 7 * 4
    assert choices.made == [("num_blocks", "28", "all that 4 sequences of 100 tokens can use")]


def test_the_users_blocks_are_taken_as_they_are() -> None:
    assert fit(100, 1000, None, num_blocks=500)[:2] == (500, 100)
    assert fit(100, 1000, 0, kv_cache_memory=9_999)[:2] == (9, 100)
    assert fit(100, 1000, 0, kv_cache_memory=10**9)[:2] == (28, 100)


@pytest.mark.parametrize(
    ("args", "available", "blocks"),
    [({}, 6_999, 6), ({}, 0, 0), ({}, -5, 0), ({"num_blocks": 6}, None, 6), ({"kv_cache_memory": 6_500}, None, 6)],
)
def test_too_small_says_how_much_is_missing(args: dict[str, Any], available: int | None, blocks: int) -> None:
    with pytest.raises(KVCacheTooSmall) as caught:
        fit(100, 1000, available, **args)
    text = str(caught.value)
    assert "cannot hold one sequence of 100 tokens: needed 7 blocks (7000 bytes)" in text
    assert f"available {blocks} blocks ({blocks * 1000} bytes)" in text
    assert f"the largest max_model_len that fits is {blocks * 16}" in text


def test_auto_takes_the_longest_that_fits() -> None:
    blocks, length, choices = fit(512, 1000, 6_999, max_model_len="auto")
    assert (blocks, length) == (6, 96)
    assert ("max_model_len", "96", "the longest sequence that the KV cache holds") in choices.made
    assert fit(512, 1000, 10**9, max_model_len="auto")[:2] == (32 * 4, 512)
    with pytest.raises(KVCacheTooSmall):
        fit(512, 1000, 999, max_model_len="auto")
