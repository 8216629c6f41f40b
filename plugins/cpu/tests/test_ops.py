"""Norms, rotary embedding and activations against float64."""

from __future__ import annotations

import pytest
import torch

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2}
DTYPES = [torch.float32, torch.bfloat16]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


def op(backend, name: str):
    return backend.ops.get(name).run


def norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 15, 16, 46, 64, 576, 1000])
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_rms_norm(native_backend, dtype, width, rows):
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(width).to(dtype)
    close(op(native_backend, "rms_norm")(x, weight, 1e-5), norm_reference(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_strided_heads(native_backend, dtype):
    fused = torch.randn(9, 12, 64).to(dtype)
    heads, weight = fused[:, 3:8], torch.randn(64).to(dtype)
    before = fused.clone()
    close(op(native_backend, "rms_norm")(heads, weight, 1e-6), norm_reference(heads, weight, 1e-6))
    assert torch.equal(fused, before)
    turned = torch.randn(64, 5).to(dtype).t()
    close(op(native_backend, "rms_norm")(turned, weight, 1e-6), norm_reference(turned, weight, 1e-6))


def test_rms_norm_with_a_float32_weight(native_backend):
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(64)
    close(op(native_backend, "rms_norm")(x, weight, 1e-6), norm_reference(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 46, 576])
@pytest.mark.parametrize("rows", [1, 33])
def test_fused_add_rms_norm(native_backend, dtype, width, rows):
    x, residual, weight = (torch.randn(rows, width).to(dtype) for _ in range(3))
    weight = weight[0].clone()
    total = x + residual
    out, kept = op(native_backend, "fused_add_rms_norm")(x.clone(), residual.clone(), weight, 1e-5)
    assert torch.equal(kept, total)
    close(out, norm_reference(total, weight, 1e-5))


def rotary_reference(positions, x, cos_sin, interleaved):
    size = cos_sin.shape[1]
    cos, sin = (part[:, None].double() for part in cos_sin[positions].chunk(2, -1))
    out = x.double().clone()
    rotated = out[..., :size]
    if interleaved:
        a, b = rotated[..., 0::2].clone(), rotated[..., 1::2].clone()
        rotated[..., 0::2], rotated[..., 1::2] = a * cos - b * sin, b * cos + a * sin
    else:
        a, b = rotated[..., : size // 2].clone(), rotated[..., size // 2 :].clone()
        rotated[..., : size // 2], rotated[..., size // 2 :] = a * cos - b * sin, b * cos + a * sin
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("size", "rotated"), [(64, 64), (64, 32), (46, 46), (80, 20), (128, 128)])
def test_rotary_embedding_in_place_on_a_fused_qkv(native_backend, dtype, interleaved, size, rotated):
    tokens, heads, kv_heads = 37, 9, 3
    fused = torch.randn(tokens, heads + 2 * kv_heads, size).to(dtype)
    before = fused.clone()
    positions = torch.randint(0, 100, (tokens,))
    cos_sin = torch.randn(100, rotated)
    query, key = fused[:, :heads], fused[:, heads : heads + kv_heads]
    expected = [rotary_reference(positions, t, cos_sin, interleaved) for t in (query, key)]
    got = op(native_backend, "rotary_embedding")(positions, query, key, cos_sin, interleaved)
    assert got[0].data_ptr() == query.data_ptr() and got[1].data_ptr() == key.data_ptr()
    for actual, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(
            actual.double(), wanted, rtol=TOLERANCE[dtype], atol=2e-6 if dtype is torch.float32 else 2e-2
        )
    assert torch.equal(fused[:, heads + kv_heads :], before[:, heads + kv_heads :])


def test_rotary_position_outside_the_table_is_refused(native_backend):
    query = torch.zeros(2, 4, 64)
    with pytest.raises(IndexError, match="position 100"):
        op(native_backend, "rotary_embedding")(torch.tensor([0, 100]), query, query[:, :1], torch.zeros(100, 64), False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 47, 1536])
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
def test_gated_activations(native_backend, dtype, width, name):
    x = (torch.randn(9, 2 * width) * 4).to(dtype)
    x[0, 0], x[1, 0], x[2, 0], x[3, 0] = 0, 90, -90, -3e4
    gate, up = x[:, :width].double(), x[:, width:].double()
    activation = {
        "silu_and_mul": torch.nn.functional.silu,
        "gelu_and_mul": torch.nn.functional.gelu,
        "gelu_tanh_and_mul": lambda t: torch.nn.functional.gelu(t, approximate="tanh"),
    }[name]
    expected = activation(gate) * up
    out = op(native_backend, name)(x)
    torch.testing.assert_close(
        out.double(), expected, rtol=TOLERANCE[dtype], atol=5e-6 if dtype is torch.float32 else 2e-2
    )
    wide = torch.zeros(9, 2 * width + 5).to(dtype)
    wide[:, : 2 * width] = x
    assert torch.equal(op(native_backend, name)(wide[:, : 2 * width]), out)


def test_leading_dimensions_are_kept(native_backend):
    x = torch.randn(2, 3, 32)
    assert op(native_backend, "silu_and_mul")(x).shape == (2, 3, 16)
    assert op(native_backend, "rms_norm")(x, torch.ones(32), 1e-6).shape == (2, 3, 32)


def test_wrong_arguments_are_refused(native_backend):
    with pytest.raises(ValueError, match="weight"):
        op(native_backend, "rms_norm")(torch.zeros(2, 32), torch.zeros(31), 1e-6)
    with pytest.raises(TypeError, match="float32 or bfloat16"):
        op(native_backend, "rms_norm")(torch.zeros(2, 32).half(), torch.zeros(32).half(), 1e-6)
    with pytest.raises(ValueError, match="even"):
        op(native_backend, "silu_and_mul")(torch.zeros(2, 31))
    with pytest.raises(ValueError, match="residual"):
        op(native_backend, "fused_add_rms_norm")(torch.zeros(2, 32), torch.zeros(1, 32), torch.zeros(32), 1e-6)
    with pytest.raises(TypeError, match="tensor"):
        native_backend.ops._kernels.rms_norm([1.0], torch.zeros(1), torch.zeros(1), 1e-6)
