"""Models with latent attention (DeepSeek V2, V3): a cache of latents, and transformers' answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from enginecore.config import EngineArgs
from enginecore.engine.build import plan_engine
from enginecore.engine.client import InprocClient
from enginecore.errors import UnsupportedError
from enginecore.request import EngineRequest, SamplingParams

from tests.engine.accelerated import run
from tests.models.tiny import tiny_tokens

PROMPTS, COUNT = [tiny_tokens(n, seed=n) for n in (3, 19, 40)], 5
LATENT, ROPE = 32, 16
_SIZES: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": 24, "v_head_dim": 20, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32,
         "mscale": 1.0, "mscale_all_dim": 0.7}  # fmt: skip
KINDS = {
    "v2": ("DeepseekV2Config", {"q_lora_rank": None, "topk_method": "greedy"}),
    "v3": ("DeepseekV3Config", {"q_lora_rank": 48}),
    "v3, yarn, halves": ("DeepseekV3Config", {"q_lora_rank": None, "rope_parameters": _YARN, "rope_interleave": False}),
}


def write(folder: Path, kind: str) -> Any:
    import transformers

    name, extra = KINDS[kind]
    config = getattr(transformers, name)(**_SIZES | extra)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.3 / parameter.shape[-1] ** 0.5)
    model.eval().save_pretrained(folder)
    return model


@torch.inference_mode()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(COUNT):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    model = write(tmp_path, kind)
    args = EngineArgs(
        model=str(tmp_path), device="cpu", dtype="float32", num_blocks=32, max_num_seqs=4, max_num_batched_tokens=32
    )
    client = InprocClient(args)
    right = [greedy(model, prompt) for prompt in PROMPTS]
    assert run(client, PROMPTS, COUNT) == right
    assert run(client, PROMPTS[2:], COUNT, name="again") == right[2:], "from the prefix cache"
    ready = client.ready
    assert ready.ledger["kv_cache"] == 32 * 16 * 2 * (LATENT + ROPE) * 4, "latents are all that is cached"
    for i, seed in enumerate((1, 2)):  # two answers to one prompt: its last block is copied
        params = SamplingParams(temperature=0, ignore_eos=True, seed=seed)
        client.add(EngineRequest(f"fork{i}", PROMPTS[1], params, COUNT, fork_of="fork0" if i else None))
    answers: dict[str, list[int]] = {"fork0": [], "fork1": []}
    while client.has_work():
        for output in client.step().outputs:
            assert output.error is None
            answers[output.request_id] += output.token_ids
    assert answers == {"fork0": right[1], "fork1": right[1]} and client.step().stats.num_forks == 1
    client.shutdown()


def test_a_cache_in_another_dtype_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "v3")
    with pytest.raises(UnsupportedError) as refusal:
        plan_engine(EngineArgs(model=str(tmp_path), device="cpu", dtype="float32", kv_cache_dtype="bfloat16"))
    assert "latents are cached in float32, as activations are, not in bfloat16" in refusal.value.reasons
