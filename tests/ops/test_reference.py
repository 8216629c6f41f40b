"""The torch references against float64 arithmetic written out another way."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch
from enginecore.ops.reference import REFERENCE, pack_linear, rms_norm, rotary_embedding, sample
from enginecore.ops.schema import OPS
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_every_op_of_the_schema_has_a_reference_of_its_signature() -> None:
    assert set(REFERENCE) == set(OPS)
    for name, function in REFERENCE.items():
        arguments = OPS[name].signature.split(" -> ")[0].strip("()").split(", ")
        expected = [argument.split(":")[0].split(" ")[0] for argument in arguments]
        assert list(inspect.signature(function).parameters) == expected, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (5, 48), (3, 4, 16)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype), random(shape[-1], seed=1, dtype=dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    kept = x.clone()
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5).double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )
    assert torch.equal(x, kept)
    strided = torch.stack([x, x], dim=-2).flatten(-2)[..., : shape[-1]]
    assert torch.equal(rms_norm(strided, weight, 1e-5), rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_add_rms_norm(dtype: torch.dtype) -> None:
    x, residual, weight = (
        random(5, 32, dtype=dtype),
        random(5, 32, seed=1, dtype=dtype),
        random(32, seed=2, dtype=dtype),
    )
    out, total = REFERENCE["fused_add_rms_norm"](x.clone(), residual.clone(), weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(out, rms_norm(x + residual, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [16, 8])
def test_rotary_embedding_turns_pairs_in_place(rotated: int, interleaved: bool, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 3, 9, 3])
    angles = torch.arange(12).double().unsqueeze(1) * 10.0 ** -torch.arange(rotated // 2).double()
    table = torch.cat([angles.cos(), angles.sin()], dim=-1).float()
    # Strided over T, as slices of one QKV product are.
    joint = random(4, 5, 16, dtype=dtype)
    before = joint.double()
    query, key = joint[:, :2], joint[:, 2:3]
    got = rotary_embedding(positions, query, key, table, interleaved)
    assert got[0].data_ptr() == query.data_ptr() and got[1].data_ptr() == key.data_ptr()
    expected = before.clone()
    for t, position in enumerate(positions.tolist()):
        for head in range(3):
            for i in range(rotated // 2):
                a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + rotated // 2)
                turn = complex(math.cos(angles[position, i]), math.sin(angles[position, i]))
                value = complex(before[t, head, a], before[t, head, b]) * turn
                expected[t, head, a], expected[t, head, b] = value.real, value.imag
    torch.testing.assert_close(joint.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
def test_gates(name: str, dtype: torch.dtype) -> None:
    x = random(5, 24, dtype=dtype)
    gate, up = x.double()[:, :12], x.double()[:, 12:]
    if name == "silu_and_mul":
        expected = gate / (1 + (-gate).exp()) * up
    elif name == "gelu_and_mul":
        expected = gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))) * up
    else:
        expected = gate * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    got = REFERENCE[name](x)
    assert got.dtype == dtype and got.shape == (5, 12)
    torch.testing.assert_close(got.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("bias", [True, False])
def test_packed_linear(bias: bool) -> None:
    weight, offset = random(7, 5), random(7, seed=1) if bias else None
    packed = pack_linear(weight, offset)
    x = random(3, 5, seed=2)
    torch.testing.assert_close(packed(x), x @ weight.T + (offset if offset is not None else 0))
    assert packed(x, out_dtype=torch.float64).dtype == torch.float64
    assert torch.equal(packed.rows(torch.tensor([6, 0, 6])), weight[[6, 0, 6]])
    assert (packed.in_features, packed.out_features) == (5, 7)
    assert packed.nbytes == 4 * (35 + (7 if bias else 0))


def sample_one(logits: np.ndarray, t: float, k: int, p: float, m: float, u: float) -> tuple[int, float]:
    """One row by the book, and how near the draw came to a border (there rounding may decide)."""
    if t == 0:
        return int(logits.argmax()), 1.0
    z = logits.astype(np.float64) - logits.max()
    probs = np.exp(z / t) / np.exp(z / t).sum()
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    order = order[: k or len(order)]
    total, mass, kept, near = sum(probs[i] for i in order), 0.0, [], 1.0
    for i in order:
        near = min(near, abs(mass - p * total))
        if kept and mass >= p * total:
            break
        kept.append(i)
        mass += probs[i]
    near = min([near, *(abs(probs[i] - m * probs[order[0]]) for i in kept if i != order[0])])
    kept = sorted(i for i in kept if probs[i] >= m * probs[order[0]])
    target, mass = u * sum(probs[i] for i in kept), 0.0
    for i in kept:
        near = min(near, abs(mass + probs[i] - target))
        mass += probs[i]
        if mass > target:
            return i, near
    return kept[-1], near


@given(
    logits=st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=12),
    t=st.sampled_from([0.0, 0.02, 0.7, 1.0, 3.0]),
    k=st.sampled_from([0, 1, 2, 5, 99]),
    p=st.sampled_from([1.0, 0.9, 0.5, 1e-6]),
    m=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    u=st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=400, deadline=None)
def test_sample_follows_the_book(logits: list[float], t: float, k: int, p: float, m: float, u: float) -> None:
    row = np.array(logits, dtype=np.float32)
    expected, near = sample_one(row, t, k, p, m, u)
    got = sample(
        torch.from_numpy(row.copy())[None],
        torch.tensor([t]),
        torch.tensor([k]),
        torch.tensor([p], dtype=torch.float32),
        torch.tensor([m], dtype=torch.float32),
        torch.tensor([u], dtype=torch.float64),
    )
    assert got.dtype == torch.int64 and 0 <= int(got) < len(logits)
    if near > 1e-6:
        assert int(got) == expected


def test_a_row_is_sampled_alike_whatever_else_is_in_the_batch() -> None:
    logits = random(6, 50)
    settings_ = [
        torch.tensor([0.0, 1.0, 0.5, 2.0, 0.0, 0.9]),
        torch.tensor([0, 5, 0, 1, 3, 0]),
        torch.tensor([1.0, 0.9, 0.5, 1.0, 0.2, 0.99]),
        torch.tensor([0.0, 0.0, 0.1, 0.0, 0.5, 0.02]),
        torch.tensor([0.1, 0.99, 0.5, 0.0, 0.7, 0.3], dtype=torch.float64),
    ]
    together = sample(logits.clone(), *settings_)
    for i in range(6):
        assert int(sample(logits[i : i + 1].clone(), *(value[i : i + 1] for value in settings_))) == int(together[i])


def test_banned_tokens_are_never_drawn() -> None:
    logits = torch.full((64, 8), float("-inf"))
    logits[:, 3] = 0.0
    logits[:, 5] = 1.0
    ones = torch.ones(64)
    drawn = sample(
        logits, ones, torch.zeros(64, dtype=torch.int64), ones, 0 * ones, torch.linspace(0, 1 - 1e-9, 64).double()
    )
    assert set(drawn.tolist()) == {3, 5}
