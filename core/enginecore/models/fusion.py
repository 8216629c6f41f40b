"""The fused decoder: Llama and its close relatives, without transformers' modules in the way.

One step runs over flat [T, E] rows, and each layer is nine calls: norm (with the residual added), QKV in one product,
rotary in place, cache write, paged attention, output product, norm, gate and up in one product, activation, down.
Where a weight has them so, a norm or an activation and the product behind it are one call (`layers/prepared.py`).
It must give what the unfused path gives; a class is on the list below because a test holds it to that.

Only rows whose logits are wanted go on after the last attention.

Shape suffixes: T tokens, E hidden size, H query heads, K key-value heads, D head size, J = H + 2K, R rows of logits,
V vocabulary, P positions, N rotary dimensions, F intermediate size, X = J * D.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from enginecore.device.attention import AttentionBackend, AttentionMetadata, AttentionParams
from enginecore.layers.prepared import NormedLinear, activated_linear, normed_linear
from enginecore.models.bridge import AttentionCall
from enginecore.models.materialize import Materializer, restore_buffers
from enginecore.models.skeleton import Skeleton
from enginecore.ops.dispatch import Ops

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: transformers' classes whose decoder layer is exactly the one above.
FUSED_CLASSES = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "SmolLM3ForCausalLM",
    }
)

_ACTIVATIONS = {"silu": "silu_and_mul", "swish": "silu_and_mul", "gelu": "gelu_and_mul",
                "gelu_pytorch_tanh": "gelu_tanh_and_mul"}  # fmt: skip

_APART = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_JOINED = frozenset({"qkv_proj", "o_proj"})
_ATTENTION_PARTS = {_APART, _APART | {"q_norm", "k_norm"}, _JOINED}


def why_not_fused(model: PreTrainedModel | Skeleton, calls: tuple[AttentionCall, ...]) -> str | None:
    """None when `model` (on meta) can run as a FusedDecoder, else the reason."""
    if isinstance(model, Skeleton):
        return None
    name = type(model).__name__
    if name not in FUSED_CLASSES or not type(model).__module__.startswith("transformers."):
        return f"{name} is not one of the fused architectures"
    config, layers = model.config, model.model.layers
    if config.hidden_act not in _ACTIVATIONS:
        return f"activation {config.hidden_act!r} has no fused form"
    if [(call.layer, call.call) for call in calls] != [(i, 0) for i in range(len(layers))]:
        return "its attention calls are not one for each layer in order"
    for layer in layers:
        parts = frozenset(part for part, _ in layer.self_attn.named_children()) - {"rotary_fn"}
        if parts not in _ATTENTION_PARTS:
            return f"its attention has the parts {sorted(parts)}"
    if calls[0].head_size % 2:
        return "its head size is odd"
    return None


@dataclass(frozen=True)
class _Layer:
    input_norm_E: torch.Tensor
    qkv: Any
    q_norm_D: torch.Tensor | None
    k_norm_D: torch.Tensor | None
    rotates: bool
    params: AttentionParams
    out: Any
    post_norm_E: torch.Tensor
    gate_up: Any
    down: Any


class FusedDecoder:
    """A loaded Llama-like model. Build it with `load_fused`."""

    def __init__(
        self,
        *,
        layers: list[_Layer],
        embed: Any,
        final_norm_E: torch.Tensor,
        head: Any,
        cos_sin_PN: torch.Tensor,
        eps: float,
        qk_eps: float,
        activation: str,
        attentions: Sequence[AttentionBackend],
        ops: Ops,
        dtype: str,
    ) -> None:
        """Each layer has its entry of `attentions`."""
        params = layers[0].params
        self._embed, self._head, self._final_norm_E = embed, head, final_norm_E
        self._cos_sin_PN, self._eps, self._qk_eps = cos_sin_PN, eps, qk_eps
        self._logits = float_output(head)
        self._splits = [params.num_heads, params.num_kv_heads, params.num_kv_heads]
        self._heads, self._head_size = params.num_heads + 2 * params.num_kv_heads, params.head_size
        self._rms_norm = ops.get("rms_norm", dtype)
        self._add_rms_norm = ops.get("fused_add_rms_norm", dtype)
        self._rotary = ops.get("rotary_embedding", dtype)
        run_activation = ops.get(activation, dtype)

        def normed(packed: Any, weight_E: torch.Tensor) -> NormedLinear:
            return normed_linear(packed, weight_E, eps, self._rms_norm, self._add_rms_norm)

        # Tuples unpack faster than attributes are looked up, and this is the hot path.
        self._layers = [
            (
                (normed(layer.qkv, layer.input_norm_E), layer.q_norm_D, layer.k_norm_D, layer.rotates, layer.params),
                (attention.reshape_and_cache, attention.forward),
                (
                    layer.out,
                    normed(layer.gate_up, layer.post_norm_E),
                    activated_linear(layer.down, activation, run_activation),
                ),
            )
            for layer, attention in zip(layers, attentions, strict=True)
        ]

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: list[torch.Tensor],
        logits_indices_R: torch.Tensor,
    ) -> torch.Tensor:
        rms_norm, rotary, cos_sin_PN, qk_eps = self._rms_norm, self._rotary, self._cos_sin_PN, self._qk_eps
        slots = metadata.slot_mapping
        splits, heads, head_size = self._splits, self._heads, self._head_size
        num_tokens, last = input_ids_T.shape[0], len(self._layers) - 1
        wanted = logits_indices_R.shape[0]

        x_TE: torch.Tensor = self._embed(input_ids_T)
        residual_TE: torch.Tensor | None = None
        for index, (first, (write, attend), second) in enumerate(self._layers):
            qkv, q_norm, k_norm, rotates, params = first
            out, gate_up, down = second
            qkv_TX, residual_TE = qkv(x_TE, residual_TE)
            query, key, value = qkv_TX.view(num_tokens, heads, head_size).split_with_sizes(splits, 1)
            if q_norm is not None:
                query, key = rms_norm(query, q_norm, qk_eps), rms_norm(key, k_norm, qk_eps)
            if rotates:
                rotary(positions_T, query, key, cos_sin_PN, False)
            cache = kv_caches[index]
            write(key, value, cache, slots)
            x_TE = attend(query, cache, metadata, params).view(num_tokens, -1)
            if index == last and wanted != num_tokens:
                if wanted == 0:  # a chunk of a prompt: its keys and values are cached, and that is all it is for
                    return x_TE.new_empty((0, self._head.out_features), dtype=torch.float32)
                x_TE, residual_TE = x_TE[logits_indices_R], residual_TE[logits_indices_R]
            x_T2F, residual_TE = gate_up(out(x_TE), residual_TE)
            x_TE = down(x_T2F)
        x_RE, _ = self._add_rms_norm(x_TE, residual_TE, self._final_norm_E, self._eps)
        if wanted == num_tokens:
            x_RE = x_RE[logits_indices_R]
        return self._logits(x_RE)


def load_fused(
    model: PreTrainedModel | Skeleton,
    calls: tuple[AttentionCall, ...],
    weights: Materializer,
    attentions: Sequence[AttentionBackend],
    ops: Ops,
    dtype: str,
    num_positions: int,
) -> FusedDecoder:
    """Read the weights of `model`, which `why_not_fused` had nothing against, into a FusedDecoder."""
    config = model.config
    # The largest first: packing needs the weight twice for a moment, which is cheapest while little else is there.
    head = weights.linear(["lm_head"])
    layers = [
        _load_layer(weights, f"model.layers.{i}", call, bool(getattr(layer.self_attn, "use_rope", True)))
        for i, (layer, call) in enumerate(zip(model.model.layers, calls, strict=True))
    ]
    if weights.checkpoint.is_tied("lm_head.weight", "model.embed_tokens.weight"):
        embed = head.rows
    else:
        embed = _Lookup(weights.tensor("model.embed_tokens.weight"))
    return FusedDecoder(
        layers=layers,
        embed=embed,
        final_norm_E=weights.tensor("model.norm.weight"),
        head=head,
        cos_sin_PN=rotary_table(model, weights, num_positions),
        eps=config.rms_norm_eps,
        qk_eps=config.rms_norm_eps,
        activation=_ACTIVATIONS[config.hidden_act],
        attentions=attentions,
        ops=ops,
        dtype=dtype,
    )


def float_output(packed: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A packed linear with float32 output, without the rounding to x's dtype in between where the device can."""
    if "out_dtype" in inspect.signature(packed).parameters:
        return partial(packed, out_dtype=torch.float32)
    return lambda x_TI: packed(x_TI).float()


class _Lookup:
    """An embedding that shares nothing with the head."""

    def __init__(self, weight_VE: torch.Tensor) -> None:
        self._weight_VE = weight_VE

    def __call__(self, ids_T: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids_T, self._weight_VE)


def _load_layer(weights: Materializer, prefix: str, call: AttentionCall, rotates: bool) -> _Layer:
    attention, mlp, known = f"{prefix}.self_attn", f"{prefix}.mlp", weights.checkpoint.parameters
    has_qk_norm = f"{attention}.q_norm.weight" in known
    qkv, gate_up = [f"{attention}.qkv_proj"], [f"{mlp}.gate_up_proj"]
    if f"{qkv[0]}.weight" not in known:
        qkv = [f"{attention}.{part}_proj" for part in "qkv"]
    if f"{gate_up[0]}.weight" not in known:
        gate_up = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
    return _Layer(
        input_norm_E=weights.tensor(f"{prefix}.input_layernorm.weight"),
        qkv=weights.linear(qkv),
        q_norm_D=weights.tensor(f"{attention}.q_norm.weight") if has_qk_norm else None,
        k_norm_D=weights.tensor(f"{attention}.k_norm.weight") if has_qk_norm else None,
        rotates=rotates,
        params=call.params(),
        out=weights.linear([f"{attention}.o_proj"]),
        post_norm_E=weights.tensor(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=weights.linear(gate_up),
        down=weights.linear([f"{mlp}.down_proj"]),
    )


def rotary_table(model: PreTrainedModel | Skeleton, weights: Materializer, num_positions: int) -> torch.Tensor:
    """float32 [P, N]: N/2 cosines then N/2 sines, from the model's own rotary module, scalings and all."""
    rotary = model.model.rotary_emb
    restore_buffers(model, weights.device, weights.checkpoint.rope_factors(), within=rotary)
    positions_1P = torch.arange(num_positions, device=weights.device).unsqueeze(0)
    like = torch.empty(1, 1, dtype=torch.float32, device=weights.device)
    cos_1PN, sin_1PN = rotary(like, position_ids=positions_1P)
    half = cos_1PN.shape[-1] // 2
    return torch.cat([cos_1PN[0, :, :half], sin_1PN[0, :, :half]], dim=-1).contiguous()
