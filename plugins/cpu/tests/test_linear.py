"""Packed products against float64, and the promise that a row does not depend on its company."""

from __future__ import annotations

import pytest
import torch

DTYPES = [torch.float32, torch.bfloat16]


def pack(backend, weight, bias=None):
    return backend.ops.get("pack_linear").run(weight, bias)


def check(x, weight, bias, y):
    expected = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    tolerance = 1e-5 if x.dtype is torch.float32 else 1e-2
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance * weight.shape[1] ** 0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (3, 17), (46, 33), (64, 64), (97, 130), (576, 79)])
def test_shapes(native_backend, dtype, inputs, outputs):
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    plain, biased = pack(native_backend, weight), pack(native_backend, weight, bias)
    assert (plain.in_features, plain.out_features) == (inputs, outputs) and plain.nbytes >= weight.nbytes
    for rows in (0, 1, 2, 3, 5, 6, 7, 13, 31, 64, 70):
        x = torch.randn(rows, inputs).to(dtype)
        for packed, b in ((plain, None), (biased, bias)):
            y = packed(x)
            assert y.dtype == dtype and y.shape == (rows, outputs)
            check(x, weight, b, y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch(native_backend, dtype):
    weight, x = torch.randn(210, 577).to(dtype), torch.randn(700, 577).to(dtype)
    packed = pack(native_backend, weight, torch.randn(210))
    whole = packed(x)
    for rows in [*range(1, 34), 48, 64, 70, 300]:
        assert torch.equal(packed(x[5 : 5 + rows]), whole[5 : 5 + rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows(native_backend, dtype):
    weight, x = torch.randn(100, 64).to(dtype), torch.randn(3000, 64).to(dtype)
    check(x, weight, None, pack(native_backend, weight)(x))


def test_float32_result_of_a_bfloat16_product(native_backend):
    weight, x = torch.randn(77, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    packed = pack(native_backend, weight)
    y = packed(x, out_dtype=torch.float32)
    assert y.dtype is torch.float32 and torch.equal(y.bfloat16(), packed(x))
    torch.testing.assert_close(y.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_inputs(native_backend, dtype):
    weight = torch.randn(40, 32).to(dtype)
    packed = pack(native_backend, weight)
    wide = torch.randn(9, 50).to(dtype)
    check(wide[:, 7:39], weight, None, packed(wide[:, 7:39]))
    turned = torch.randn(32, 9).to(dtype).t()
    check(turned, weight, None, packed(turned))
    assert packed(torch.zeros(2, 3, 32, dtype=dtype)).shape == (2, 3, 40)
    check(wide[:, :32], weight, None, pack(native_backend, weight.t().contiguous().t())(wide[:, :32]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", [33, 64])
def test_rows_of_the_original_weight(native_backend, dtype, inputs):
    weight = torch.randn(100, inputs).to(dtype)
    packed = pack(native_backend, weight)
    ids = torch.tensor([[0, 99, 16], [15, 17, 0]])
    assert torch.equal(packed.rows(ids), weight[ids])
    with pytest.raises(IndexError, match="100"):
        packed.rows(torch.tensor([100]))


def test_wrong_arguments_are_refused(native_backend):
    packed = pack(native_backend, torch.zeros(4, 8))
    with pytest.raises(ValueError, match="features"):
        packed(torch.zeros(2, 9))
    with pytest.raises(TypeError, match="dtype"):
        packed(torch.zeros(2, 8).bfloat16())
    with pytest.raises(ValueError, match="bias"):
        pack(native_backend, torch.zeros(4, 8), torch.zeros(5))


def test_parameters_and_inference_tensors(native_backend):
    packed = pack(native_backend, torch.nn.Parameter(torch.ones(4, 8)), torch.nn.Parameter(torch.ones(4)))
    with torch.inference_mode():
        assert torch.equal(packed(torch.ones(2, 8)), torch.full((2, 4), 9.0))
