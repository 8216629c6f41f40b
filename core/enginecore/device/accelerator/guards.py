"""Kernels that cannot be built here give way to the torch reference on the same device.

Compilers of kernels work when a kernel is first used, so a failure would meet the first request. Ops are caught at that
moment, before anything has run; attention is rehearsed when it is first asked whether it supports a use, which is
before weights are read and before the cache has a layout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from enginecore.device.attention import AttentionBackend, AttentionMetadata, AttentionParams
from enginecore.device.capabilities import AttentionQuery, Verdict
from enginecore.device.memory import KVCacheLayout, KVCacheSpec, is_out_of_memory
from enginecore.device.optable import Impl, OpTable
from enginecore.errors import DeviceError, OutOfDeviceMemory

if TYPE_CHECKING:
    import torch

Swap = Callable[["list[torch.Tensor]", "list[torch.Tensor]", "list[tuple[int, int]]"], None]
#: Whether an error says that a kernel could not be built, and nothing has run.
CannotBuild = Callable[[BaseException], bool]

#: Rows of activations on which a packed weight is tried: one token, and a prompt.
_ROWS = (1, 33)


class KernelBuildError(DeviceError):
    """A kernel cannot be built on this machine."""


class GuardedOps(OpTable):
    """The ops of `inner`; a kernel that cannot be built raises KernelBuildError, on which the core runs the reference.

    The first weight of each kind and size that `pack_linear` packs is multiplied once on `device`, so that its kernels
    are built then.
    """

    def __init__(self, inner: OpTable, cannot_build: CannotBuild, device: torch.device) -> None:
        self._inner, self._cannot_build, self._device = inner, cannot_build, device
        self._packed: set[tuple[Any, ...]] = set()

    def get(self, op: str) -> Impl | None:
        impl = self._inner.get(op)
        if impl is None:
            return None
        run = partial(self._run, self._pack(impl.run) if op == "pack_linear" else impl.run)
        return replace(impl, run=run, build_errors=(*impl.build_errors, KernelBuildError))

    def _run(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except Exception as error:
            if not self._cannot_build(error):
                raise
            raise KernelBuildError(_line(error)) from error

    def _pack(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def pack(weight_OI: Any, bias_O: Any) -> Any:
            import torch

            packed = run(weight_OI, bias_O)
            scheme, dtype = getattr(weight_OI, "scheme", None), weight_OI.dtype
            kind = (type(packed), scheme, dtype, packed.in_features, packed.out_features)
            if kind not in self._packed:
                for rows in _ROWS:
                    packed(torch.zeros(rows, packed.in_features, dtype=dtype, device=self._device))
                self._packed.add(kind)
            return packed

        return pack


class GuardedAttention(AttentionBackend):
    """`kernels`, or `reference` for everything once one of the kernels could not be built. Kernels that replace what
    cannot be built by themselves, call after call, say so in a dict `fallbacks`.

    `swap` takes the place of the kernels' own swap_blocks (a `BlockMover`'s, say); `device` is where to rehearse.
    """

    def __init__(
        self,
        kernels: AttentionBackend | None,
        reference: AttentionBackend,
        cannot_build: CannotBuild,
        device: torch.device,
        why_none: str = "",
    ) -> None:
        self._chosen = kernels or reference
        self._reference, self._cannot_build, self._device = reference, cannot_build, device
        self._rehearsed: set[AttentionQuery] = set()
        self._reason = why_none or "there are no kernels for this device" if kernels is None else None
        self._bind()
        self.swap: Swap = self.plain_swap

    def _bind(self) -> None:
        """Steps call the chosen backend's own functions, without a detour."""
        for name in ("build_metadata", "reshape_and_cache", "forward", "copy_blocks", "merge_attn_states"):
            setattr(self, name, getattr(self._chosen, name))

    def reference_reason(self) -> str | None:
        return self._reason

    def supports(self, query: AttentionQuery) -> Verdict:
        verdict = self._chosen.supports(query)
        if not verdict or self._chosen is self._reference or query in self._rehearsed:
            return verdict
        self._rehearsed.add(query)
        try:
            rehearse(self._chosen, query, self._device)
            replaced: dict[str, int] = getattr(self._chosen, "fallbacks", {})
            failure = "they are " + ", ".join(replaced) if replaced else None
        except Exception as error:
            if is_out_of_memory(error):
                raise OutOfDeviceMemory(
                    f"there is no memory for the smallest attention call: {_line(error)}",
                    fix="stop what else uses the device",
                ) from error
            if not self._cannot_build(error):
                raise
            failure = _line(error)
        if failure is None:
            return verdict
        self._reason = f"kernels for {query.dtype}, head size {query.head_size} cannot be built: {failure}"
        self._chosen = self._reference
        self._bind()
        return self._reference.supports(query)

    def kv_cache_layout(self, spec: KVCacheSpec) -> KVCacheLayout:
        return self._chosen.kv_cache_layout(spec)

    def build_metadata(self, common: AttentionMetadata) -> AttentionMetadata:
        return self._chosen.build_metadata(common)

    def reshape_and_cache(
        self, key_TKD: torch.Tensor, value_TKD: torch.Tensor, kv_cache: torch.Tensor, slot_mapping_T: torch.Tensor
    ) -> None:
        self._chosen.reshape_and_cache(key_TKD, value_TKD, kv_cache, slot_mapping_T)

    def forward(
        self,
        query_THD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        params: AttentionParams,
        out_THD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self._chosen.forward(query_THD, kv_cache, metadata, params, out_THD)

    def copy_blocks(self, caches: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
        self._chosen.copy_blocks(caches, pairs)

    def swap_blocks(self, src: list[torch.Tensor], dst: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
        self.swap(src, dst, pairs)

    def with_kv_scales(self, key_scales_K: torch.Tensor, value_scales_K: torch.Tensor) -> AttentionBackend | None:
        """Of what was chosen: all kernels are built by then."""
        made: AttentionBackend | None = self._chosen.with_kv_scales(key_scales_K, value_scales_K)
        return made

    def plain_swap(self, src: list[torch.Tensor], dst: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
        """The chosen backend's own swap_blocks, on the current stream."""
        self._chosen.swap_blocks(src, dst, pairs)


class _RefreshingAttention(GuardedAttention):
    """For kernels whose metadata is renewed before a replay; what the reference needs no renewal of stays as it is."""

    def refresh_metadata(self, metadata: AttentionMetadata) -> None:
        self._chosen.refresh_metadata(metadata)


def guarded_attention(
    kernels: AttentionBackend | None,
    reference: AttentionBackend,
    cannot_build: CannotBuild,
    device: torch.device,
    why_none: str = "",
) -> GuardedAttention:
    """A `GuardedAttention` that renews metadata if and only if `kernels` do."""
    renews = kernels is not None and type(kernels).refresh_metadata is not AttentionBackend.refresh_metadata
    kind = _RefreshingAttention if renews else GuardedAttention
    return kind(kernels, reference, cannot_build, device, why_none)


def rehearse(attention: AttentionBackend, query: AttentionQuery, device: torch.device) -> None:
    """Run a prefill and a decode step of the smallest size, so that every kernel that `query` needs is built."""
    import torch

    spec = KVCacheSpec(
        num_layers=1,
        num_kv_heads=query.num_kv_heads,
        head_size=query.head_size,
        dtype=query.kv_dtype,
        block_size=query.block_size,
    )
    layout = attention.kv_cache_layout(spec)
    cache = torch.zeros(layout.shape_for(2), device=device).to(getattr(torch, layout.dtype))
    dtype, features = getattr(torch, query.dtype), query.features
    ones_H = torch.ones(query.num_heads, device=device)
    params = AttentionParams(
        scale=query.head_size**-0.5,
        num_heads=query.num_heads,
        num_kv_heads=query.num_kv_heads,
        head_size=query.head_size,
        sliding_window=4 if "sliding_window" in features else None,
        soft_cap=5.0 if "soft_cap" in features else None,
        sinks=ones_H if "sinks" in features else None,
        alibi_slopes=ones_H if "alibi" in features else None,
        causal="non_causal" not in features,
    )
    # A prompt (longer than what is decoded at once), a first decode step, and one far into a text, all over one block.
    for tokens, length in ((33, 33), (1, 1), (1, 32 * query.block_size)):
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, tokens], dtype=torch.int32, device=device),
            seq_lens=torch.tensor([length], dtype=torch.int32, device=device),
            block_table=torch.ones(1, -(-length // query.block_size), dtype=torch.int32, device=device),
            slot_mapping=torch.arange(tokens, device=device) % query.block_size + query.block_size,
            max_query_len=tokens,
            max_seq_len=length,
        )
        metadata = attention.build_metadata(metadata)
        states_TKD = torch.zeros(tokens, query.num_kv_heads, query.head_size, dtype=dtype, device=device)
        attention.reshape_and_cache(states_TKD, states_TKD, cache, metadata.slot_mapping)
        query_THD = torch.zeros(tokens, query.num_heads, query.head_size, dtype=dtype, device=device)
        attention.forward(query_THD, cache, metadata, params)


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
