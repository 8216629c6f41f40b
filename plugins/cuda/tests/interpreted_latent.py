"""A model with latent attention through the whole engine over interpreted Triton kernels.

    TRITON_INTERPRET=1 python interpreted_latent.py FOLDER        writes FOLDER/result.json

The model is a tiny random DeepSeek-V3, with experts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from interpreted_engine import generate, greedy, random_prompts

LENGTHS, COUNT = (1, 30), 3
LATENT, ROPE = 32, 16


def main(folder: Path) -> None:
    import transformers

    config = transformers.DeepseekV3Config(
        vocab_size=96, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=48, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE,
        qk_nope_head_dim=24, v_head_dim=20, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=1, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1.3 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    prompts = random_prompts(LENGTHS)
    answers, logprobs = greedy(model, prompts, COUNT)
    found = generate(folder, prompts, COUNT, num_blocks=16)
    (folder / "result.json").write_text(json.dumps({"expected": answers, "expected_logprobs": logprobs, **found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
