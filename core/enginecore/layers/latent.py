"""Multi-head latent attention over a cache of latents, in place of transformers' modules, which expand what they cache.

With W_UK and W_UV the two halves of the up-projection `kv_b_proj`, the score of a head is

    q_nope . (W_UK c) + q_rope . k_rope  =  (W_UK^T q_nope) . c + q_rope . k_rope

so queries are brought down to the latents once, instead of every cached latent up to keys, and the same for values:
W_UV sum(p c). The cache has L + R numbers a token for all heads together. Source: DeepSeek-V2, arXiv:2405.04434, 2.1.

Shape suffixes: T tokens, H heads, N and R the parts of a head without and with rotation, L latent, V value, W = L + R.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from enginecore.errors import ModelError
from enginecore.layers.linear import PackedLinear

#: transformers' classes whose attention is exactly the one above.
CLASSES = frozenset({"DeepseekV2Attention", "DeepseekV3Attention"})

_PARTS = ("q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "o_proj")


def replace_latent_attention(model: nn.Module) -> int:
    """Put LatentAttention in the place of transformers' modules of CLASSES; how many there were."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__ in CLASSES and type(module).__module__.startswith("transformers.")
    ]
    for name, module in found:
        model.set_submodule(name, LatentAttention(module))
    return len(found)


class LatentAttention(nn.Module):  # type: ignore[misc]
    """Takes over the parts of `source` under their own names, so that weights are found as before.

    `absorb` must be called once the weights are loaded; until then only shapes come out right.
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.layer_idx, self.scaling = source.layer_idx, float(source.scaling)
        self.num_heads, self.latent, self.rope = source.num_heads, source.kv_lora_rank, source.qk_rope_head_dim
        self.nope, self.value = source.qk_nope_head_dim, source.v_head_dim
        for part in _PARTS:
            setattr(self, part, getattr(source, part, None))
        self._rotate = _rotation(source)
        self.kv_b_proj: Any = source.kv_b_proj
        self.up_key_HNL: torch.Tensor | None = None
        self.up_value_HLV: torch.Tensor | None = None

    def absorb(self) -> int:
        """Take the up-projection apart. Returns by how many bytes the weights have grown by that."""
        packed = self.kv_b_proj.packed
        device = next(iter(self.kv_a_layernorm.parameters())).device
        rows = packed.rows(torch.arange(packed.out_features, device=device))
        weight_HAL = rows.view(self.num_heads, self.nope + self.value, self.latent)
        self.up_key_HNL = weight_HAL[:, : self.nope].contiguous()
        self.up_value_HLV = weight_HAL[:, self.nope :].transpose(1, 2).contiguous()
        self.kv_b_proj = None
        return int(self.up_key_HNL.nbytes + self.up_value_HLV.nbytes - packed.nbytes)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any = None, enginecore_step: Any = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [1, T, E] -> [1, T, E]."""
        if enginecore_step is None:
            raise ModelError("LatentAttention was called without the step's context")
        tokens = hidden_states.shape[1]
        if self.q_a_proj is None:
            query = self.q_proj(hidden_states)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        query_1HTA = query.view(1, tokens, self.num_heads, self.nope + self.rope).transpose(1, 2)
        plain_1HTN, turned_1HTR = query_1HTA.split([self.nope, self.rope], dim=-1)
        latent_1TL, key_1TR = self.kv_a_proj_with_mqa(hidden_states).split([self.latent, self.rope], dim=-1)
        turned_1HTR, key_11TR = self._rotate(turned_1HTR, key_1TR.unsqueeze(1), position_embeddings)
        rows_TW = torch.cat([self.kv_a_layernorm(latent_1TL)[0], key_11TR[0, 0]], dim=-1)
        if self.up_key_HNL is None or self.up_value_HLV is None:  # traced on meta
            query_THW = rows_TW.new_empty(tokens, self.num_heads, self.latent + self.rope)
            enginecore_step.attend_latent(self, query_THW, rows_TW)
            out_HTV = rows_TW.new_empty(self.num_heads, tokens, self.value)
        else:
            down_HTL = torch.bmm(plain_1HTN[0], self.up_key_HNL)
            query_THW = torch.cat([down_HTL, turned_1HTR[0]], dim=-1).transpose(0, 1).contiguous()
            out_THL = enginecore_step.attend_latent(self, query_THW, rows_TW)
            out_HTV = torch.bmm(out_THL.transpose(0, 1), self.up_value_HLV)
        return self.o_proj(out_HTV.transpose(0, 1).reshape(1, tokens, -1)), None


def absorb_latents(model: nn.Module) -> int:
    """`absorb` of every LatentAttention with packed weights in `model`: bytes that the weights have grown by."""
    modules = [module for module in model.modules() if isinstance(module, LatentAttention)]
    return sum(module.absorb() for module in modules if isinstance(module.kv_b_proj, PackedLinear))


def _rotation(source: Any) -> Callable[[torch.Tensor, torch.Tensor, Any], tuple[torch.Tensor, torch.Tensor]]:
    """The library's own rotation for this class: angles are complex numbers in V2, cosines and sines in V3."""
    modeling = sys.modules[type(source).__module__]
    interleaved = bool(getattr(source.config, "rope_interleave", False))

    def rotate(query: torch.Tensor, key: torch.Tensor, angles: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(angles, torch.Tensor):
            return modeling.apply_rotary_emb(query, key, angles)  # type: ignore[no-any-return]
        turn = modeling.apply_rotary_pos_emb_interleave if interleaved else modeling.apply_rotary_pos_emb
        return turn(query, key, *angles)  # type: ignore[no-any-return]

    return rotate
