"""Sampling against a plain numpy statement of the schema."""

from __future__ import annotations

import numpy as np
import pytest
import torch


def reference(logits, temperature, top_k, top_p, min_p, uniform) -> int:
    logits = logits.astype(np.float64)
    if temperature == 0:
        return int(np.argmax(logits))
    probs = np.exp((logits - logits.max()) / temperature)
    order = np.lexsort((np.arange(len(logits)), -logits))
    if top_k > 0:
        order = order[:top_k]
    mass = np.cumsum(probs[order])
    if top_p < 1:
        order = order[: int(np.searchsorted(mass, top_p * mass[-1] * (1 - 1e-12))) + 1]
    order = order[probs[order] >= min_p * probs[order[0]]]
    kept = np.sort(order)
    mass = np.cumsum(probs[kept])
    return int(kept[min(int(np.searchsorted(mass, uniform * mass[-1], side="right")), len(kept) - 1)])


def run(backend, logits, temperature, top_k, top_p, min_p, uniform) -> list[int]:
    columns = [torch.as_tensor(c) for c in (temperature, top_k, top_p, min_p, uniform)]
    return backend.ops.get("sample").run(logits.clone(), *columns).tolist()


SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 50, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (0.8, 40, 0.95, 0.05),
    (1.3, 0, 1.0, 0.1),
    (1.0, 1, 1.0, 0.0),
    (2.0, 1000, 0.5, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (0.3, 5, 0.3, 0.9),
    (5.0, 0, 0.999, 0.0),
    (0.0, 7, 0.5, 0.5),
]


@pytest.mark.parametrize("vocab", [1, 17, 1000, 49152])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_against_numpy(native_backend, vocab, spread):
    gen = torch.Generator().manual_seed(vocab)
    logits = torch.randn(len(SETTINGS), vocab, generator=gen) * spread
    uniform = torch.rand(len(SETTINGS), generator=gen, dtype=torch.float64)
    settings = [list(column) for column in zip(*SETTINGS, strict=True)]
    got = run(native_backend, logits, *settings, uniform)
    for row, token in enumerate(got):
        args = (SETTINGS[row], float(uniform[row]))
        expected = [reference(logits[row].numpy(), *args[0], args[1] + shift) for shift in (-1e-6, 0, 1e-6)]
        assert token in expected, (row, token, expected)


def test_edges_of_the_draw(native_backend):
    logits = torch.tensor([[0.0, float("-inf"), 1.0, 1.0]])
    one = [1.0], [0], [1.0], [0.0]
    assert run(native_backend, logits, *one, [0.0]) == [0]
    assert run(native_backend, logits, *one, [0.99999999]) == [3]
    assert run(native_backend, logits, [0.0], [0], [1.0], [0.0], [0.9]) == [2]
    assert run(native_backend, logits, [1.0], [1], [1.0], [0.0], [0.9]) == [2]
    assert run(native_backend, logits, [1.0], [2], [1.0], [0.0], [0.9]) == [3]
    assert run(native_backend, logits, [1.0], [3], [1.0], [0.0], [0.0]) == [0]
    assert run(native_backend, logits, [1.0], [4], [1.0], [0.0], [0.3]) == [2]


def test_forbidden_tokens_are_never_drawn(native_backend):
    logits = torch.full((64, 300), float("-inf"))
    logits[:, 123] = -5.0
    uniform = torch.linspace(0, 0.999999, 64, dtype=torch.float64)
    for settings in SETTINGS:
        columns = [[value] * 64 for value in settings]
        assert set(run(native_backend, logits, *columns, uniform)) == {123}


def test_a_row_does_not_depend_on_its_batch(native_backend):
    logits = torch.randn(20, 5000)
    uniform = torch.rand(20, dtype=torch.float64)
    columns = [[0.9] * 20, [30] * 20, [0.9] * 20, [0.01] * 20]
    together = run(native_backend, logits, *columns, uniform)
    alone = [
        run(native_backend, logits[i : i + 1], *[c[:1] for c in columns], uniform[i : i + 1])[0] for i in range(20)
    ]
    assert together == alone


def test_frequencies(native_backend):
    probs = torch.tensor([0.5, 0.2, 0.2, 0.1])
    rows = 4000
    uniform = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows
    ids = run(
        native_backend,
        probs.log().expand(rows, 4).contiguous(),
        [1.0] * rows,
        [0] * rows,
        [1.0] * rows,
        [0.0] * rows,
        uniform,
    )
    counts = np.bincount(ids, minlength=4) / rows
    np.testing.assert_allclose(counts, probs.numpy(), atol=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
@pytest.mark.parametrize("size", [5, 64, 1000])
def test_a_row_with_nothing_to_choose_from_gives_minus_one(native_backend, temperature, bad, size):
    torch.manual_seed(0)
    logits = torch.randn(3, size)
    if bad is None:
        logits[1] = float("-inf")
    else:
        logits[1, size - 2] = bad
    ids = run(native_backend, logits, [temperature] * 3, [0] * 3, [1.0] * 3, [0.0] * 3, torch.full((3,), 0.5).double())
    assert ids[1] == -1 and ids[0] >= 0 and ids[2] >= 0
