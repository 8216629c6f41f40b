"""The op table over the native kernels; signatures and meanings are those of `enginecore.ops.schema`.

Shapes: O outputs, I inputs; the rest as there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from enginecore.device.capabilities import Verdict
from enginecore.device.optable import Impl, OpQuery, OpTable
from enginecore.ops.quantized import QuantizedWeight

_DTYPES = ("float32", "bfloat16")
_ACTIVATIONS = {"silu_and_mul": 0, "gelu_and_mul": 1, "gelu_tanh_and_mul": 2}


def _supports(query: OpQuery) -> Verdict:
    reasons = [] if query.dtype in _DTYPES else [f"{query.op} has no {query.dtype} kernel, only {', '.join(_DTYPES)}"]
    return Verdict.of(reasons)


class PackedLinear:
    """A weight in the kernels' panel layout. Calling it multiplies: x [..., I] gives [..., O].

    The result has x's dtype, or float32 with `out_dtype=torch.float32` (logits without a rounding step). x must have
    the weight's dtype; a weight in blocks takes any and rounds x to bytes, 32 to a scale. A row's result does not
    depend on the other rows.
    """

    __slots__ = ("_packed", "_run", "dtype", "in_features", "nbytes", "out_features")

    def __init__(self, packed: Any, dtype: torch.dtype) -> None:
        self._packed = packed
        self._run = packed.run
        self.dtype = dtype
        self.in_features: int = packed.in_features
        self.out_features: int = packed.out_features
        self.nbytes: int = packed.nbytes

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        y = x.new_empty((*x.shape[:-1], self.out_features), dtype=out_dtype)
        try:
            self._run(x, y)
        except ValueError:
            if x.is_contiguous():
                raise
            self._run(x.contiguous(), y)
        return y

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` (int64) of the weight as it was given: [..., I]."""
        out = torch.empty((*ids.shape, self.in_features), dtype=self.dtype)
        self._packed.rows(ids.contiguous(), out)
        return out


class QuantizedLinear(PackedLinear):
    """A weight in blocks or bytes. A norm or an activation before it hands its rows over as bytes, not through memory:
    the same bits as one after the other, with two passes over the rows less."""

    __slots__ = ()

    def normed(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(product of rms_norm(s), s) with s = x + residual in residual's memory, or x itself without one."""
        y = x.new_empty((*x.shape[:-1], self.out_features))
        try:
            self._packed.run_normed(x, residual, weight, eps, y)
        except ValueError:
            if x.is_contiguous():
                raise
            self._packed.run_normed(x.contiguous(), residual, weight, eps, y)
        return y, x if residual is None else residual

    def activated(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        """The product of activation(x), the name of an op such as "silu_and_mul"; x [..., 2I]."""
        y = x.new_empty((*x.shape[:-1], self.out_features))
        kind = _ACTIVATIONS[activation]
        try:
            self._packed.run_gated(x, kind, y)
        except ValueError:
            if x.is_contiguous():
                raise
            self._packed.run_gated(x.contiguous(), kind, y)
        return y


class NativeOps(OpTable):
    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        table: dict[str, Callable[..., Any]] = {
            "rms_norm": self._rms_norm,
            "fused_add_rms_norm": self._fused_add_rms_norm,
            "rotary_embedding": self._rotary_embedding,
            "pack_linear": self._pack_linear,
            "sample": self._sample,
            **(
                {"lora_shrink": self._lora_shrink, "lora_expand": self._lora_expand}
                if hasattr(kernels, "lora_shrink")
                else {}
            ),
            **{name: self._gate(kind) for name, kind in _ACTIVATIONS.items()},
        }
        self._impls = {name: Impl(run, _supports, f"{kernels.isa}/{name}") for name, run in table.items()}

    def get(self, op: str) -> Impl | None:
        return self._impls.get(op)

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype)
        try:
            self._kernels.rms_norm(x, weight, out, eps)
        except ValueError:
            if x.is_contiguous():
                raise
            self._kernels.rms_norm(x.contiguous(), weight, out, eps)
        return out

    def _fused_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # The normalised rows take x's memory when nothing but x lies in it.
        out = x if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype)
        self._kernels.add_rms_norm(x, residual, weight, out, eps)
        return out, residual

    def _rotary_embedding(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        cos_sin: torch.Tensor,
        interleaved: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._kernels.rotary(positions, query, key, cos_sin, interleaved)
        return query, key

    def _lora_shrink(self, x: torch.Tensor, a: torch.Tensor, adapter: torch.Tensor) -> torch.Tensor:
        h = torch.empty((a.shape[0], x.shape[0], a.shape[2]), dtype=torch.float32)
        if x.shape[0]:
            self._kernels.lora_shrink(x if x.stride(1) == 1 else x.contiguous(), a, adapter, h)
        return h

    def _lora_expand(
        self, h: torch.Tensor, b: list[torch.Tensor], adapter: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        start = 0
        for part, weight in zip(h, b, strict=True) if y.shape[0] else ():
            self._kernels.lora_expand(part, weight, adapter, y, start)
            start += weight.shape[1]
        return y

    def _gate(self, kind: int) -> Callable[[torch.Tensor], torch.Tensor]:
        run = self._kernels.gate

        def gate(x: torch.Tensor) -> torch.Tensor:
            out = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
            try:
                run(x, out, kind)
            except ValueError:
                if x.is_contiguous():
                    raise
                run(x.contiguous(), out, kind)
            return out

        return gate

    def _pack_linear(self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None) -> PackedLinear:
        values = None if bias is None else bias.detach().float().contiguous()
        if isinstance(weight, QuantizedWeight):
            packed = self._kernels.quant_linear(weight.scheme, weight.data_OB, weight.in_features, values)
            return QuantizedLinear(packed, weight.dtype)
        weight = weight.detach()
        if weight.dim() == 2 and weight.stride(1) != 1:
            weight = weight.contiguous()
        return PackedLinear(self._kernels.linear(weight, values), weight.dtype)

    def _sample(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        top_k: torch.Tensor,
        top_p: torch.Tensor,
        min_p: torch.Tensor,
        uniform: torch.Tensor,
    ) -> torch.Tensor:
        ids = torch.empty(logits.shape[0], dtype=torch.int64)
        self._kernels.sample(
            logits,
            temperature.to(torch.float32).contiguous(),
            top_k.to(torch.int64).contiguous(),
            top_p.to(torch.float32).contiguous(),
            min_p.to(torch.float32).contiguous(),
            uniform.to(torch.float64).contiguous(),
            ids,
        )
        return ids
