"""Kernels that cannot be built give way to the reference on the same device, before a request meets them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from enginecore.device import AttentionQuery, Impl
from enginecore.device.accelerator import GuardedOps, guarded_attention
from enginecore.errors import UnsupportedError
from enginecore.ops.dispatch import Ops
from enginecore.ops.reference import REFERENCE
from enginecore.ops.torch_backend import ReferenceOps, TorchAttention

DEVICE = torch.device("cpu")
QUERY = AttentionQuery(dtype="float32", kv_dtype="float32", head_size=32, num_heads=4, num_kv_heads=2, block_size=16)


class CompilerError(Exception):
    pass


def cannot_build(error: BaseException) -> bool:
    return isinstance(error, CompilerError)


def unbuildable(*args: Any) -> Any:
    raise CompilerError("PassManager::run failed\nfourteen more lines")


class Table(ReferenceOps):
    table = {
        "rms_norm": Impl(unbuildable),
        "silu_and_mul": Impl(REFERENCE["silu_and_mul"]),
        "pack_linear": Impl(lambda weight, bias: Unpackable(weight)),
    }


class Unpackable:
    """Packs well; its product is what cannot be built."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.out_features, self.in_features = weight.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return unbuildable()


def test_an_op_falls_back_at_its_first_use_once_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    ops = Ops(GuardedOps(Table(), cannot_build, DEVICE))
    norm, x, weight = ops.rms_norm, torch.randn(3, 8), torch.ones(8)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(norm(x, weight, 1e-6), REFERENCE["rms_norm"](x, weight, 1e-6))
    assert ops.fallbacks == {"rms_norm": 1}
    assert (
        caplog.text.count("cannot be built") == 1 and "PassManager" in caplog.text and "more lines" not in caplog.text
    )
    ops.silu_and_mul(x)
    assert "silu_and_mul" not in ops.fallbacks


def test_strict_makes_it_fatal() -> None:
    ops = Ops(GuardedOps(Table(), cannot_build, DEVICE), strict=True)
    with pytest.raises(UnsupportedError, match=r"rms_norm.*PassManager"):
        ops.rms_norm(torch.ones(1, 8), torch.ones(8), 1e-6)


def test_a_packed_weight_is_tried_when_it_is_packed() -> None:
    ops, weight = Ops(GuardedOps(Table(), cannot_build, DEVICE)), torch.randn(5, 8)
    packed = ops.pack_linear(weight, None)
    assert ops.fallbacks == {"pack_linear": 1}
    assert torch.allclose(packed(torch.ones(2, 8)), weight.sum(1).expand(2, 5), atol=1e-5)


def test_other_errors_of_a_kernel_pass() -> None:
    class Faulty(ReferenceOps):
        table = {"rms_norm": Impl(lambda x, w, eps: x + torch.ones(7))}

    with pytest.raises(RuntimeError, match="size"):
        Ops(GuardedOps(Faulty(), cannot_build, DEVICE)).rms_norm(torch.ones(1, 8), torch.ones(8), 1e-6)


class Kernels(TorchAttention):
    """`broken` head sizes have no kernel that can be built. Its layout is not the reference's."""

    def __init__(self, broken: tuple[int, ...]) -> None:
        super().__init__()
        self.broken, self.rehearsals = broken, 0

    def kv_cache_layout(self, spec: Any) -> Any:
        layout = super().kv_cache_layout(spec)
        return type(layout)(shape=(-1, 2, *layout.shape[2:], 1), dtype=layout.dtype, page_bytes=layout.page_bytes)

    def reshape_and_cache(self, key_TKD: Any, value_TKD: Any, kv_cache: Any, slot_mapping_T: Any) -> None:
        super().reshape_and_cache(key_TKD, value_TKD, kv_cache[..., 0], slot_mapping_T)

    def forward(self, query_THD: Any, kv_cache: Any, metadata: Any, params: Any, out_THD: Any = None) -> Any:
        self.rehearsals += 1
        if query_THD.shape[2] in self.broken:
            unbuildable()
        return super().forward(query_THD, kv_cache[..., 0], metadata, params, out_THD)


def test_attention_is_rehearsed_when_it_is_asked_and_replaced_whole() -> None:
    kernels, reference = Kernels(broken=(48,)), TorchAttention()
    attention = guarded_attention(kernels, reference, cannot_build, DEVICE)
    assert attention.supports(QUERY) and attention.supports(QUERY)
    assert kernels.rehearsals == 3, "a prompt, a first step and a late one, once"
    assert attention.reference_reason() is None and attention.forward == kernels.forward
    query = AttentionQuery(**{**vars(QUERY), "head_size": 48})
    assert attention.supports(query)
    assert "head size 48 cannot be built: CompilerError: PassManager" in str(attention.reference_reason())
    assert attention.forward == reference.forward
    assert attention.kv_cache_layout is not None and len(attention.kv_cache_layout(_spec()).shape) == 5


def test_kernels_that_replace_themselves_call_after_call_are_replaced_whole() -> None:
    class Patient(Kernels):
        fallbacks: dict[str, int] = {}

        def forward(self, query_THD: Any, kv_cache: Any, metadata: Any, params: Any, out_THD: Any = None) -> Any:
            self.fallbacks["attention"] = self.fallbacks.get("attention", 0) + 1
            return super().forward(query_THD, kv_cache, metadata, params, out_THD)

    attention = guarded_attention(Patient(()), TorchAttention(), cannot_build, DEVICE)
    assert attention.supports(QUERY)
    assert "they are attention" in str(attention.reference_reason())


def _spec() -> Any:
    from enginecore.device import KVCacheSpec

    return KVCacheSpec(num_layers=1, num_kv_heads=2, head_size=48, dtype="float32", block_size=16)


def test_what_the_kernels_refuse_is_not_rehearsed_and_no_kernels_have_a_reason() -> None:
    kernels = Kernels(broken=())
    refused = AttentionQuery(**{**vars(QUERY), "block_size": 24})
    verdict = guarded_attention(kernels, TorchAttention(), cannot_build, DEVICE).supports(refused)
    assert not verdict and "block size 24" in verdict.reasons[0] and kernels.rehearsals == 0
    bare = guarded_attention(None, TorchAttention(), cannot_build, DEVICE, "Triton is not installed")
    assert bare.supports(QUERY) and bare.reference_reason() == "Triton is not installed"


def test_metadata_is_renewed_if_and_only_if_the_kernels_do() -> None:
    from enginecore.device import AttentionBackend

    class Renewing(Kernels):
        renewed = 0

        def refresh_metadata(self, metadata: Any) -> None:
            self.renewed += 1

    plain = guarded_attention(Kernels(()), TorchAttention(), cannot_build, DEVICE)
    kernels = Renewing(())
    renewing = guarded_attention(kernels, TorchAttention(), cannot_build, DEVICE)
    assert type(plain).refresh_metadata is AttentionBackend.refresh_metadata
    renewing.refresh_metadata(None)  # type: ignore[arg-type]
    assert kernels.renewed == 1
