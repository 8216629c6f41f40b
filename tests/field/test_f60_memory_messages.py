"""F60: a cache that cannot hold one sequence is refused with all numbers; auto takes what fits; bad sizes are named."""

from __future__ import annotations

import re

import pytest
from enginecore import LLM, SamplingParams
from enginecore.cli.main import main
from enginecore.errors import KVCacheTooSmall

#: Bytes that a block of 16 tokens takes in SmolLM2-135M: 30 layers, keys and values, 3 heads of 64, float32.
BLOCK = 30 * 2 * 16 * 3 * 64 * 4


def test_too_small_with_every_number() -> None:
    with pytest.raises(KVCacheTooSmall) as caught:
        LLM("smollm2-135m", device="cpu", dtype="float32", max_model_len=2048, kv_cache_memory=10**6)
    message = caught.value.message
    for number in (2048, 128, 128 * BLOCK, 10**6 // BLOCK, 10**6 // BLOCK * BLOCK):
        assert re.search(rf"\b{number}\b", message), (number, message)
    assert f"largest max_model_len that fits is {10**6 // BLOCK * 16}" in message
    assert caught.value.fix and "auto" in caught.value.fix and caught.value.exit_code


def test_auto_takes_the_longest_that_fits_and_serves_it() -> None:
    with LLM("smollm2-135m", device="sim", max_model_len="auto", num_blocks=3) as llm:
        assert llm.config.max_model_len == 48
        assert ("max_model_len", "48") in [choice[:2] for choice in llm.config.choices], "what was chosen is logged"
        (output,) = llm.generate([[5] * 40], SamplingParams(max_tokens=99, ignore_eos=True), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 8 and output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--memory-utilization", "0"], "memory_utilization"), (["--memory-utilization", "1.5"], "memory_utilization"),
        (["--memory-utilization", "-1"], "memory_utilization"), (["--memory-utilization", "nan"], "memory_utilization"),
        (["--memory-utilization", "x"], "memory-utilization"), (["--kv-cache-memory", "0"], "kv_cache_memory"),
        (["--kv-cache-memory", "-1GiB"], "kv_cache_memory"), (["--kv-cache-memory", "much"], "kv_cache_memory"),
        (["--num-blocks", "0"], "num_blocks"), (["--block-size", "0"], "block_size"),
        (["--block-size", "7"], "block_size"),
        (["--max-model-len", "0"], "max_model_len"), (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--max-num-batched-tokens", "-5"], "max_num_batched_tokens"),
    ],
)  # fmt: skip
def test_bad_sizes_end_serve_at_once(options: list[str], named: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--device", "sim", "--port", "0", *options]) == 2
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(said) == 1 and named in said[0], said


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--max-model-len", "1000000"], 2, ("1000000", "8192")),
        (["--num-blocks", "3", "--max-model-len", "64"], 1, ("needed 4 blocks", "available 3 blocks", "fits is 48")),
    ],
)
def test_refused_before_the_weights_are_read(
    options: list[str], code: int, said: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--device", "cpu", "--prompt", "hi", *options]) == code
    captured = capfd.readouterr()
    assert captured.out == "" and all(word in captured.err for word in said), captured.err
    assert "Traceback" not in captured.err and "fix: " in captured.err
