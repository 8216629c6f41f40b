"""The engine's options: one definition, both ways."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from enginecore.cli.common import engine_argv, engine_settings, with_engine
from enginecore.config import EngineArgs
from enginecore.errors import ParameterError

SET: dict[str, Any] = {
    "model": "some/model",
    "device": "sim",
    "dtype": "float32",
    "quantization": "int8",
    "kv_cache_dtype": "fp8_e5m2",
    "max_model_len": 128,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 64,
    "long_prefill_token_threshold": 32,
    "block_size": 8,
    "kv_cache_memory": 2**20,
    "memory_utilization": 0.25,
    "enable_prefix_caching": False,
    "scheduling_policy": "fair",
    "tenant_weights": {"a=b": 2.5, "c": 1.0},
    "tenant_cache_floor": 0.1,
    "tenant_cache_cap": 0.5,
    "seed": 7,
    "max_logprobs": 5,
    "generation_config": "none",
    "chat_template": "template.jinja",
    "trust_remote_code": True,
    "allow_pickle": True,
    "fuse": False,
    "strict_ops": True,
    "enforce_eager": True,
    "num_threads": 2,
    "overlap": "off",
    "speculation": "ngram",
    "num_speculative_tokens": 7,
    "runner": "generate",
    "pooler_config": {"pooling_type": "cls", "matryoshka": [8, 16]},
    "kv_events_endpoint": "tcp://*:5557",
    "kv_events_replay": "tcp://*:5558",
    "kv_events_topic": "kv@pod@model",
    "enable_lora": True,
    "lora_modules": {"a": "adapters/a", "b": "adapters/b=c"},
    "max_loras": 3,
    "max_lora_rank": 32,
    "max_cpu_loras": 5,
    "lora_root": "adapters",
    "device_options": {"step_time_s": 0.5, "output": "tokens"},
}
#: Settings that only a server has a use for; `serve` declares them itself.
SERVE_ONLY = {"served_model_name", "max_waiting"}
#: The other way of saying something in SET.
OTHER_WAY = {"num_blocks", "require_graphs", *(TIERS := {"kv_host_memory": 2**20, "kv_disk": "kv", "kv_disk_size": 9})}


def parse(argv: list[str]) -> EngineArgs:
    """`argv` through the command line's own parser."""
    import typer

    seen: list[EngineArgs] = []
    app = typer.Typer()

    @app.command()
    @with_engine
    def command(engine: EngineArgs) -> None:
        seen.append(engine)

    app(args=argv, standalone_mode=False)
    return seen[0]


def test_every_setting_of_an_engine_has_an_option() -> None:
    made = engine_settings(model="m", num_blocks=9)
    assert made == EngineArgs(model="m", num_blocks=9)
    assert set(SET) | SERVE_ONLY | OTHER_WAY == set(EngineArgs.__struct_fields__)


def test_no_options_give_the_defaults() -> None:
    assert parse([]) == EngineArgs()


@pytest.mark.parametrize("more", [{}, {"max_model_len": "auto", "kv_cache_memory": None, "num_blocks": 12},
                                  {"enforce_eager": False, "require_graphs": True},
                                  {"enable_prefix_caching": True, **TIERS}])  # fmt: skip
def test_written_settings_are_read_back(more: dict[str, Any]) -> None:
    wanted = EngineArgs(**{**SET, **more})
    assert parse(engine_argv(wanted)) == wanted


def test_defaults_are_not_written() -> None:
    assert engine_argv(EngineArgs()) == ["--", EngineArgs().model]


def test_sizes_have_units() -> None:
    assert parse(["--kv-cache-memory", "2GiB"]).kv_cache_memory == 2 * 2**30


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "9" * 30, "٣"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(ParameterError, match="max_model_len"):
        engine_settings(max_model_len=text)


def test_options_of_plugins_are_json_where_they_can_be() -> None:
    made = engine_settings(device_option=["a=1", "b=true", "c=plain text", "d=x=y", 'e={"f": 1}'])
    assert made.device_options == {"a": 1, "b": True, "c": "plain text", "d": "x=y", "e": {"f": 1}}


def test_each_option_is_explained() -> None:
    for name, parameter in inspect.signature(engine_settings, eval_str=True).parameters.items():
        [info] = parameter.annotation.__metadata__
        assert info.help and info.help.endswith("."), name
