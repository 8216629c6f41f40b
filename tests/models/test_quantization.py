"""Quantised weights through a whole model: what is needed, what is refused, how close answers stay."""

from __future__ import annotations

import gguf
import pytest
import torch
from enginecore.config import EngineArgs
from enginecore.device.capabilities import Capabilities
from enginecore.engine.build import build_engine
from enginecore.errors import ParameterError, UnsupportedError
from enginecore.models.checkpoint import Checkpoint
from enginecore.models.inspect import inspect_meta
from enginecore.models.quantization import needed_schemes, quantization_reasons
from enginecore.models.store import resolve_model
from enginecore.ops.quantized import QuantizedWeight
from enginecore.ops.reference import pack_linear

from tests.models.tiny import write_tiny

CLAIMED = Capabilities(quantizations=frozenset({"q4_1", "q8_0"}))


def test_schemes_of_a_file(smollm2):
    files = resolve_model(smollm2)
    assert needed_schemes(files, "gguf") == ["q4_1", "q8_0"]
    assert needed_schemes(files, "int8") == ["int8"] and needed_schemes(files, None) == []
    assert quantization_reasons(files, "gguf", CLAIMED) == []
    [reason] = quantization_reasons(files, "gguf", Capabilities(quantizations=frozenset({"q8_0"})))
    assert "q4_1" in reason


def test_unknown_quantization_is_refused():
    with pytest.raises(ParameterError, match="awq"):
        EngineArgs(quantization="awq")


def test_blocks_need_a_gguf_file(tmp_path):
    write_tiny(tmp_path, "llama")
    with pytest.raises(ParameterError, match="GGUF"):
        needed_schemes(resolve_model(str(tmp_path)), "gguf")


def test_a_device_without_the_scheme_is_named(smollm2):
    with pytest.raises(UnsupportedError, match="q4_1"):
        build_engine(EngineArgs(model=smollm2, device="cpu", quantization="gguf", device_options={"kernels": "torch"}))


def test_blocks_read_are_those_of_the_weights(smollm2):
    """Rotary pairs undone and all: blocks of q and k dequantise to what the plain reader gives."""
    files = resolve_model(smollm2)
    _, model = inspect_meta(files, "float32")
    checkpoint = Checkpoint(files, model)
    for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
        name = f"model.layers.3.{part}.weight"
        plain = torch.empty(checkpoint.parameters[name].shape)
        checkpoint.read_into(name, plain)
        blocks = checkpoint.read_quantized(name, torch.float32)
        assert blocks is not None and blocks.scheme == "q4_1" and torch.equal(blocks.dequantize(), plain)
    assert checkpoint.read_quantized("model.norm.weight", torch.float32) is None


def test_the_reference_takes_blocks():
    kind = gguf.GGMLQuantizationType.Q4_1
    weight = torch.randn(6, 64)
    blocks = QuantizedWeight("q4_1", torch.from_numpy(gguf.quants.quantize(weight.numpy(), kind)), 64, torch.float32)
    x = torch.randn(2, 64)
    torch.testing.assert_close(pack_linear(blocks, None)(x), x @ blocks.dequantize().t())
    assert blocks.out_features == 6


@pytest.mark.parametrize("quantization", ["gguf", "int8"])
def test_answers_stay_close_to_float32(smollm2, greedy_reference, quantization):
    """Teacher-forced against the float32 oracle: nearly every next token is its choice or among its five likeliest."""
    from enginecore.frontend.llm import LLM
    from enginecore.request import SamplingParams

    llm = LLM(smollm2, device="cpu", quantization=quantization, max_model_len=1024, max_num_seqs=16)
    try:
        same = total = 0
        for case in greedy_reference[:4]:
            prompt, answer = case["prompt_token_ids"], case["output_token_ids"][:24]
            params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
            [output] = llm.generate([prompt + answer], params, use_tqdm=False)
            for token, entry in zip(answer, output.prompt_logprobs[len(prompt) :], strict=True):
                same += entry[token].rank == 1
                total += 1
        assert same >= 0.9 * total, f"{same} of {total} tokens are the oracle's"
    finally:
        llm.shutdown()
