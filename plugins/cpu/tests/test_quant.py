"""Products with weights in blocks: against float64, against the file's own values, and for any batch the same bits."""

from __future__ import annotations

import pytest
import torch
from enginecore.ops.quantized import SCHEMES, QuantizedWeight, quantize_int8
from gguf.quants import quantize

NAMES = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "int8"]


def weight_of(name, outputs, inputs, dtype=torch.float32):
    if name == "int8":
        return quantize_int8(torch.randn(outputs, inputs, dtype=dtype))
    blocks = quantize(torch.randn(outputs, inputs).numpy(), SCHEMES[name][0])
    return QuantizedWeight(name, torch.from_numpy(blocks), inputs, dtype)


def pack(backend, weight, bias=None):
    return backend.ops.get("pack_linear").run(weight, bias)


def nmse(y, expected):
    return float((y.double() - expected).pow(2).sum() / expected.pow(2).sum())


def product_nmse(y, x, weight_OI, bias=None):
    """Squared error over the squares of all terms: a sum that happens to cancel does not count as a large error."""
    x, weight = x.double(), weight_OI.double()
    error = y.double() - x @ weight.t() - (0 if bias is None else bias.double())
    return float(error.pow(2).sum() / (x.pow(2) @ weight.pow(2).t()).sum())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 1), (64, 33), (192, 77), (576, 160)])
def test_shapes(native_backend, name, inputs, outputs):
    weight, bias = weight_of(name, outputs, inputs), torch.randn(outputs)
    packed = pack(native_backend, weight, bias)
    assert (packed.in_features, packed.out_features) == (inputs, outputs)
    panels = -(-outputs // 16)  # the file's bytes, but for whole panels that end on whole cache lines
    assert packed.nbytes <= panels * (16 * weight.data_OB.shape[1] + 64) + bias.nbytes
    for rows in (0, 1, 2, 3, 4, 5, 6, 7, 13, 64, 70):
        x = torch.randn(rows, inputs)
        y = packed(x)
        assert y.shape == (rows, outputs)
        if rows:
            # What remains is that x is rounded to 8 bits: a step of 1/127 of a block's largest value.
            assert product_nmse(y, x, weight.dequantize(), bias) < 3e-4


@pytest.mark.parametrize("name", NAMES)
def test_rounding_of_rows_is_the_only_error(native_backend, name):
    """Rows that are whole multiples of their step lose nothing."""
    weight = weight_of(name, 50, 96)
    x = torch.randint(-127, 128, (9, 96)).float()
    x[:, ::32] = 127  # a step of exactly 1
    assert product_nmse(pack(native_backend, weight)(x), x, weight.dequantize()) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_its_batch(native_backend, name, dtype):
    packed, x = pack(native_backend, weight_of(name, 210, 320, dtype)), torch.randn(600, 320).to(dtype)
    whole = packed(x)
    for rows in [*range(1, 26), 48, 64, 300]:
        assert torch.equal(packed(x[5 : 5 + rows]), whole[5 : 5 + rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["q4_1", "q8_0", "int8"])
def test_a_norm_or_an_activation_with_the_product_gives_the_bits_of_one_after_the_other(native_backend, name, dtype):
    ops = native_backend.ops
    packed = pack(native_backend, weight_of(name, 70, 192, dtype), torch.randn(70))
    for rows in (0, 1, 5, 50):
        x, residual = torch.randn(rows, 192).to(dtype), torch.randn(rows, 192).to(dtype)
        weight = torch.rand(192)
        y, same = packed.normed(x, None, weight, 1e-5)
        assert same is x and torch.equal(y, packed(ops.get("rms_norm").run(x, weight, 1e-5)))
        normed, total = ops.get("fused_add_rms_norm").run(x.clone(), residual.clone(), weight.to(dtype), 1e-5)
        y, same = packed.normed(x, residual, weight.to(dtype), 1e-5)
        assert same is residual and torch.equal(residual, total) and torch.equal(y, packed(normed))
        pairs = torch.randn(rows, 2 * 192).to(dtype)
        for activation in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"):
            assert torch.equal(packed.activated(pairs, activation), packed(ops.get(activation).run(pairs)))


def test_a_norm_with_the_product_on_a_tape_and_on_bad_arguments(native_backend):
    packed, weight = pack(native_backend, weight_of("int8", 40, 64)), torch.rand(64)
    x, residual, y = torch.randn(2, 64), torch.zeros(2, 64), torch.zeros(2, 40)
    kernels = native_backend.ops._kernels
    kernels.start_tape()
    packed._packed.run_normed(x, residual, weight, 1e-5, y)
    tape = kernels.end_tape()
    assert len(tape) == 1 and not residual.any() and not y.any()  # nothing has run yet
    expected, _ = packed.normed(x, torch.zeros(2, 64), weight, 1e-5)
    tape.run(0, 1)
    assert torch.equal(y, expected) and torch.equal(residual, x)
    with pytest.raises(ValueError, match="features"):
        packed.normed(torch.zeros(2, 96), None, torch.rand(96), 1e-5)
    with pytest.raises(ValueError, match="weight"):
        packed.normed(x, None, torch.rand(63), 1e-5)
    with pytest.raises(ValueError, match="residual"):
        packed.normed(x, torch.zeros(3, 64), weight, 1e-5)
    with pytest.raises(ValueError, match="features"):
        packed.activated(torch.zeros(2, 64), "silu_and_mul")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_the_file(native_backend, name, dtype):
    weight = weight_of(name, 100, 64, dtype)
    ids = torch.tensor([[0, 99, 16], [15, 17, 0]])
    packed = pack(native_backend, weight)
    assert torch.equal(packed.rows(ids), weight.dequantize()[ids])
    with pytest.raises(IndexError, match="100"):
        packed.rows(torch.tensor([100]))


def test_rows_that_are_not_numbers_stay_so(native_backend):
    x = torch.randn(4, 64)
    x[1, 3], x[2, 40] = float("nan"), float("inf")
    y = pack(native_backend, weight_of("q4_1", 20, 64))(x)
    assert y[1:3].isnan().all() and y[[0, 3]].isfinite().all()


def test_rows_of_zeros_and_of_tiny_numbers(native_backend):
    x = torch.zeros(2, 64)
    x[1] = 1e-38
    assert pack(native_backend, weight_of("q8_0", 20, 64))(x).abs().max() < 1e-30


def test_float32_result_of_bfloat16_rows(native_backend):
    packed, x = pack(native_backend, weight_of("q4_1", 40, 64, torch.bfloat16)), torch.randn(3, 64).bfloat16()
    y = packed(x, out_dtype=torch.float32)
    assert y.dtype is torch.float32 and torch.equal(y.bfloat16(), packed(x))


def test_all_instruction_sets_agree_on_the_rounding(native_backend):
    """Integer sums are exact everywhere, so only the rounding of float additions may differ."""
    torch.manual_seed(5)
    weight, x = weight_of("q5_1", 48, 576), torch.randn(5, 576)
    assert product_nmse(pack(native_backend, weight)(x), x, weight.dequantize()) < 2e-4


def test_weights_turned_into_bytes(native_backend):
    weight, x = torch.randn(5000, 64), torch.randn(3, 64)
    made = quantize_int8(weight)
    assert nmse(made.dequantize(), weight.double()) < 1e-4
    assert product_nmse(pack(native_backend, made)(x), x, weight) < 2e-4


def test_wrong_arguments_are_refused(native_backend):
    weight = weight_of("q4_1", 4, 64)
    packed = pack(native_backend, weight)
    with pytest.raises(ValueError, match="features"):
        packed(torch.zeros(2, 96))
    with pytest.raises(ValueError, match="another size"):
        pack(native_backend, QuantizedWeight("q8_0", weight.data_OB, 64, torch.float32))
    with pytest.raises(ValueError, match="whole blocks"):
        pack(native_backend, QuantizedWeight("q4_1", weight.data_OB, 33, torch.float32))
    with pytest.raises(ValueError, match="q6_k"):
        pack(native_backend, QuantizedWeight("q6_k", weight.data_OB, 64, torch.float32))
