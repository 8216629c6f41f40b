"""`load_model`: weights on the device and a forward pass over the paged cache.

The fused decoder is used where the architecture is known to match it, the bridge everywhere else; both take the same
call, so that the runner never knows which one it has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from enginecore.device.attention import AttentionMetadata
from enginecore.device.backend import Backend
from enginecore.device.capabilities import AttentionQuery
from enginecore.device.memory import KVCacheSpec
from enginecore.errors import ModelError
from enginecore.layers.latent import absorb_latents
from enginecore.models.bridge import BridgedModel
from enginecore.models.checkpoint import Checkpoint
from enginecore.models.expert_loading import load_experts
from enginecore.models.fusion import load_fused, why_not_fused
from enginecore.models.inspect import ModelShape, inspect_meta
from enginecore.models.kv_scales import attention_of_calls, read_kv_scales
from enginecore.models.materialize import Adapt, Materializer, materialize
from enginecore.models.skeleton import Skeleton
from enginecore.models.store import ModelFiles
from enginecore.ops.dispatch import Ops

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class _Forward(Protocol):
    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: list[torch.Tensor],
        logits_indices_R: torch.Tensor,
    ) -> torch.Tensor: ...


class Model:
    """A loaded model. `weight_bytes` is what its weights hold on the device; `fused` says which path it took; so many
    layers have scales for cached keys and values."""

    def __init__(
        self, shape: ModelShape, implementation: _Forward, weight_bytes: int, fused: bool, scaled_layers: int = 0
    ) -> None:
        self.shape, self.weight_bytes, self.fused, self.scaled_layers = shape, weight_bytes, fused, scaled_layers
        self._implementation = implementation
        self._forward = implementation.forward

    @property
    def vocab_size(self) -> int:
        return self.shape.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.shape.hidden_size

    @property
    def max_positions(self) -> int:
        return self.shape.max_positions

    def kv_specs(self, block_size: int, kv_dtype: str | None = None) -> list[KVCacheSpec]:
        return self.shape.kv_specs(block_size, kv_dtype)

    def attention_queries(self, block_size: int, kv_dtype: str | None = None) -> list[AttentionQuery]:
        return self.shape.attention_queries(block_size, kv_dtype)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: list[torch.Tensor],
        logits_indices_R: torch.Tensor,
    ) -> torch.Tensor:
        """Run the tokens of a step and return float32 logits [R, V] for the tokens at `logits_indices_R`.

        All on the backend's device: input_ids, positions and logits_indices int64; `metadata` as
        `AttentionBackend.build_metadata` made it; `kv_caches` one tensor for each attention call, in their order.
        """
        return self._forward(input_ids_T, positions_T, metadata, kv_caches, logits_indices_R)


def load_model(
    files: ModelFiles,
    *,
    backend: Backend,
    dtype: str,
    fuse: bool = True,
    ops: Ops | None = None,
    max_model_len: int | None = None,
    quantization: str | None = None,
    inspected: tuple[ModelShape, PreTrainedModel | Skeleton] | None = None,
    adapt: Adapt | None = None,
    kv_dtype: str | None = None,
) -> Model:
    """Read the weights of `files` in `dtype` onto the backend's device.

    `ops` is the backend's op table behind the dispatch (made here when None); `fuse` False forces the bridge;
    `max_model_len` is the number of positions to prepare for (None: as many as the model has); `quantization` is None
    (weights of a quantised checkpoint stay as they are where the backend claims their scheme, else are unpacked),
    "gguf" or "int8", in schemes that the backend claims (`quantization_reasons`); `inspected` is what `inspect_meta`
    gave for these files and dtype, where that is at hand: it must not be used afterwards; `adapt` as `Materializer`
    takes it; `kv_dtype` is what the cache is kept in (None: `dtype`): for fp8 the checkpoint's scales of keys and
    values are read. Raises ModelError and UnsupportedError as `inspect_model` does, and ModelError when a weight file
    is broken or does not fit the model.
    """
    if backend.attention is None:
        raise ModelError("this backend has no attention; it runs whole models by itself")
    shape, model = inspected or inspect_meta(files, dtype, skeleton=fuse)
    if isinstance(model, Skeleton) and not fuse:
        shape, model = inspect_meta(files, dtype)
    ops = ops or Ops(backend.ops, dtype=dtype)
    try:
        checkpoint = Checkpoint(files, model)
    except ModelError:
        if not isinstance(model, Skeleton):
            raise
        # Perhaps the names in the files are others that transformers knows; if not, it is the one to complain.
        shape, model = inspect_meta(files, dtype)
        checkpoint = Checkpoint(files, model)
    scales = read_kv_scales(checkpoint, shape.calls) if (kv_dtype or "").startswith("float8") else {}
    attentions = attention_of_calls(backend.attention, shape.calls, scales, backend.torch_device())
    weights = Materializer(
        checkpoint,
        backend.torch_device(),
        ops.get("pack_linear", dtype),
        quantization,
        backend.capabilities.quantizations,
        adapt,
    )
    obstacle = why_not_fused(model, shape.calls) if fuse else "fusion is off"
    implementation: _Forward
    if obstacle is None:
        positions = max_model_len or shape.max_positions
        implementation = load_fused(model, shape.calls, weights, attentions, ops, dtype, positions)
    else:
        logger.info("%s runs unfused: %s", shape.model_class, obstacle)
        load_experts(model, weights, ops, dtype)
        materialize(model, weights)
        weights.bytes += absorb_latents(model)
        implementation = BridgedModel(model, attentions, shape.calls, _latent_ops(shape, ops, dtype))
    return Model(shape, implementation, weights.bytes, obstacle is None, len(scales))


def _latent_ops(shape: ModelShape, ops: Ops, dtype: str) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """What attention over latents is made of, None where there is none."""
    call = next((call for call in shape.calls if call.latent is not None), None)
    if call is None or call.latent is None:
        return None
    sizes = {"latent": call.latent, "rope": call.head_size - call.latent, "heads": call.num_heads}
    return ops.get("latent_cache", dtype, **sizes), ops.get("latent_attention", dtype, **sizes)
