"""Modelled times against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from batches import Part, batch, spec
from enginecore.errors import ModelError, ParameterError, UnsupportedError
from enginecore_sim.models import MODELS, ModelShape, model_shape, named_config
from enginecore_sim.options import SimOptions
from enginecore_sim.profiles import PROFILES, DeviceProfile, find_profile
from enginecore_sim.roofline import Roofline
from enginecore_sim.runtime import SimRuntime

#: Two layers; a layer's matrices are 8x16, 8x8, 8x32 and 16x8 (576 weights, 104 numbers in and out), the head 8x32.
TINY = {
    "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 16, "vocab_size": 32, "max_position_embeddings": 64,
}  # fmt: skip


def roofline(flops: float, bytes_per_s: float, launch_s: float = 0.0, **fields: float) -> Roofline:
    device = DeviceProfile(
        name="tiny", flops={"bfloat16": flops}, memory_bytes=10**6, bytes_per_s=bytes_per_s, launch_s=launch_s,
        link_bytes_per_s=100.0, source="made up",
    )  # fmt: skip
    return Roofline(device, model_shape("tiny", TINY, "bfloat16"), flops, **fields)  # type: ignore[arg-type]


def seconds(model: Roofline, parts: list[tuple[int, int]], rows: int) -> float:
    """A step of sequences that compute `n` tokens, `length` in all."""
    queries, lengths = zip(*parts, strict=True)
    return model.step_seconds(np.array(queries, np.int32), np.array(lengths, np.int32), rows)


def test_bytes_of_one_decode() -> None:
    layers = 2 * (2 * 576 + 2 * 104)  # bfloat16 weights, one token's inputs and outputs
    attention = 32 * (10 + 1)  # 2 (key, value) x 2 layers x 1 head x 4 numbers x 2 bytes; ten read, one written
    head = 8 * 32 * 2 + 8 * 2 + 32 * 4
    assert seconds(roofline(1e30, 1.0), [(1, 10)], 1) == pytest.approx(layers + attention + head)


def test_operations_of_a_chunk() -> None:
    layers = 3 * 2 * 2 * 576
    attention = 4 * 2 * 2 * 4 * (3 + 4 + 5)  # 2 layers, 2 heads of 4; three queries see 3, 4 and 5 keys
    head = 2 * 8 * 32
    assert seconds(roofline(1.0, 1e30), [(3, 5)], 1) == pytest.approx(layers + attention + head)


def test_each_part_takes_the_longer_of_both_and_parts_follow_each_other() -> None:
    """At 500 operations and 1,000 bytes a second: operations decide the layers and the attention of a long chunk,
    bytes the head of one row."""
    layers = max(64 * 2 * 2 * 576 / 500, 2 * (2 * 576 + 64 * 2 * 104) / 1000)
    attention = max(4 * 2 * 2 * 4 * (64 * 65 / 2) / 500, 32 * 128 / 1000)
    head = max(2 * 8 * 32 / 500, (8 * 32 * 2 + 8 * 2 + 32 * 4) / 1000)
    assert layers == 64 * 2 * 2 * 576 / 500 and attention == 4 * 2 * 2 * 4 * (64 * 65 / 2) / 500
    assert seconds(roofline(500.0, 1000.0), [(64, 64)], 1) == pytest.approx(layers + attention + head)


def test_sequences_add_up_and_weights_are_read_once() -> None:
    model = roofline(1e30, 1.0)
    one, two = seconds(model, [(1, 10)], 0), seconds(model, [(1, 10), (1, 20)], 0)
    assert two - one == pytest.approx(2 * 2 * 104 + 32 * (20 + 1))


def test_a_step_that_wants_no_logits_has_no_head() -> None:
    with_head, without = (seconds(roofline(1e30, 1.0), [(4, 4)], rows) for rows in (1, 0))
    assert with_head - without == pytest.approx(8 * 32 * 2 + 8 * 2 + 32 * 4)


def test_launches_come_on_top() -> None:
    assert seconds(roofline(1e30, 1e30, launch_s=1.0), [(1, 1)], 1) == pytest.approx(2 * 10 + 4)


def test_a_group_splits_the_work_and_pays_for_its_links() -> None:
    alone, pair = roofline(1e30, 1.0), roofline(1e30, 1.0, num_devices=2)
    all_reduces = 2 * 2 * (2 * 1 / 2) * (3 * 8 * 2) / 100
    assert seconds(pair, [(3, 5)], 1) == pytest.approx(seconds(alone, [(3, 5)], 1) / 2 + all_reduces)
    assert seconds(replace(pair, profile=replace(pair.profile, launch_s=1.0)), [(3, 5)], 1) == pytest.approx(
        seconds(pair, [(3, 5)], 1) + 2 * (10 + 2) + 4
    )


def test_efficiency_scales_the_peaks() -> None:
    assert seconds(roofline(1.0, 1e30, compute_efficiency=0.5), [(3, 5)], 1) == pytest.approx(
        2 * seconds(roofline(1.0, 1e30), [(3, 5)], 1)
    )
    assert seconds(roofline(1e30, 1.0, bandwidth_efficiency=0.25), [(3, 5)], 1) == pytest.approx(
        4 * seconds(roofline(1e30, 1.0), [(3, 5)], 1)
    )


def shape(name: str) -> ModelShape:
    return model_shape(name, MODELS[name], MODELS[name]["torch_dtype"])


def test_sizes_of_known_models() -> None:
    """Parameters as their papers round them, and cache bytes of a token: OPT-13B's 800 KB are the figure that the paper
    on PagedAttention gives."""
    names = ("opt-13b", "llama-3-8b", "llama-3-70b")
    assert [round(shape(name).weight_bytes / 2e9, 1) for name in names] == [12.8, 8.0, 70.6]
    assert shape("opt-13b").kv_bytes_per_token == 800 * 1024
    assert shape("llama-3-8b").kv_bytes_per_token == 128 * 1024
    assert shape("llama-3-70b").kv_bytes_per_token == 320 * 1024


def test_one_llama_decode_on_an_h100_takes_its_weights_over_the_bandwidth() -> None:
    model = Roofline(find_profile("h100"), shape("llama-3-8b"), 989.4e12)
    read_once = model.shape.weight_bytes - model.shape.head.size * 2  # the embedding is looked up, not multiplied
    taken = seconds(replace(model, profile=replace(model.profile, launch_s=0.0)), [(1, 1)], 1)
    assert taken == pytest.approx(read_once / 3.35e12, rel=0.001)


def test_every_profile_says_where_it_is_from() -> None:
    assert list(PROFILES) == ["a100-40g", "h100", "h200", "mi300x", "cpu-2core"]
    for profile in PROFILES.values():
        assert "bfloat16" in profile.flops and len(profile.source) > 60
    with pytest.raises(ParameterError, match="it has a100-40g, h100"):
        find_profile("b9000")


def test_configurations_by_name_and_by_path(tmp_path: object) -> None:
    import json
    from pathlib import Path

    path = Path(str(tmp_path)) / "config.json"
    path.write_text(json.dumps(TINY))
    assert named_config(str(path)) == TINY
    assert named_config("smollm2-135m") is None and named_config(str(tmp_path)) is None
    named_config("opt-13b")["vocab_size"] = 1  # type: ignore[index]
    assert MODELS["opt-13b"]["vocab_size"] == 50272
    for text in ("[]", "{", "\xff"):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(ModelError, match=r"config\.json"):
            named_config(str(path))
    with pytest.raises(ModelError, match="cannot read"):
        named_config(str(path) + ".json")


def test_what_the_arithmetic_does_not_describe_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"experts.*latent attention"):
        model_shape("moe", {**TINY, "num_local_experts": 8, "kv_lora_rank": 512}, "bfloat16")
    with pytest.raises(ModelError, match="intermediate_size or ffn_dim"):
        model_shape("odd", {**TINY, "intermediate_size": None}, "bfloat16")


def loaded(config: dict[str, object], **options: object) -> SimRuntime:
    runtime = SimRuntime(SimOptions.of(options))
    runtime.load(replace(spec(), config=config, dtype="bfloat16"), None)
    return runtime


def test_the_runtime_says_how_long_its_last_step_takes() -> None:
    runtime = loaded(TINY, profile="h100")
    assert runtime.step_seconds() == 0.0
    runtime.execute(batch([Part(list(range(40)), [5, 2, 9], 0, 40)]))
    model = Roofline(find_profile("h100"), model_shape("tiny", TINY, "bfloat16"), 989.4e12)
    assert runtime.step_seconds() == seconds(model, [(40, 40)], 1)
    fixed = loaded({}, step_time_s=0.5, token_time_s=0.25)
    fixed.execute(batch([Part(list(range(40)), [5, 2, 9], 0, 40)]))
    assert fixed.step_seconds() == 0.5 + 40 * 0.25
    assert loaded({}).step_seconds() is None


def test_memory_is_planned_from_the_model() -> None:
    plan = SimRuntime(SimOptions(profile="h100")).memory_plan(
        replace(spec(num_blocks=0), config=TINY, dtype="bfloat16", max_num_batched_tokens=100)
    )
    assert plan is not None
    assert (plan.weight_bytes, plan.block_bytes) == (2 * (2 * 576 + 2 * 8 * 32), 16 * 32)
    assert plan.activation_bytes == 100 * (2 * 8 + 40) * 2 + 8 * 1000 * 4
    assert SimRuntime(SimOptions()).memory_plan(spec()) is None
    runtime = loaded(TINY, profile="h100", output="hash")
    assert runtime.memory_bytes() == plan.weight_bytes + 32 * 16 * 32


def test_hashed_tokens_depend_on_the_token_and_its_position_only() -> None:
    runtime = loaded(TINY, profile="h100", output="hash")
    tokens = list(range(40))
    alone = runtime.execute(batch([Part(tokens, [5, 2, 9], 0, 40)]))
    among = runtime.execute(batch([Part([7] * 9, [1], 3, 9), Part(tokens, [8, 8, 8], 39, 40)]))
    assert alone.dtype == np.int64 and alone[0] == among[1] and 0 <= alone[0] < 1000
    assert among[0] != among[1]


def test_a_profile_without_the_dtype_cannot_load() -> None:
    runtime = SimRuntime(SimOptions(profile="cpu-2core"))
    with pytest.raises(UnsupportedError, match="no rate for float16; it has bfloat16"):
        runtime.load(replace(spec(), config=TINY, dtype="float16"), None)


@pytest.mark.parametrize(
    "options",
    [
        {"profile": "b9000"},
        {"tensor_parallel": 2},
        {"tensor_parallel": 2, "profile": "cpu-2core"},
        {"tensor_parallel": 0, "profile": "h100"},
        {"tensor_parallel": 1.5, "profile": "h100"},
        {"compute_efficiency": 0},
        {"bandwidth_efficiency": 1.5},
        {"step_time_s": float("nan")},
        {"token_time_s": "1"},
        {"memory_bytes": True},
    ],
    ids=str,
)
def test_senseless_options_are_refused_by_name(options: dict[str, object]) -> None:
    with pytest.raises(ParameterError, match=next(iter(options))):
        SimOptions.of(options)


def test_a_group_has_the_memory_of_all() -> None:
    assert SimOptions(profile="h100", tensor_parallel=4).total_memory == 4 * 80 * 10**9
    assert SimOptions(profile="h100", memory_bytes=7).total_memory == 7
    assert SimOptions().total_memory == 4 * 2**30
