"""Steps on a tape: the same bits as eager ones, on inputs that change; what cannot be captured says why."""

from __future__ import annotations

import pytest
import torch
from enginecore.device import AttentionMetadata, BackendContext, GraphKey
from enginecore_cpu import native
from enginecore_cpu.backend import CpuBackend
from enginecore_cpu.graphs import MOST_TORCH_CALLS, Arena

pytestmark = pytest.mark.skipif(native.load() is None, reason="the kernels are not compiled here")


def backend() -> CpuBackend:
    return CpuBackend(BackendContext(device="cpu", num_threads=2))


def test_memory_is_used_again_once_nothing_holds_it():
    arena = Arena()
    first = arena.empty((4, 8), torch.float32)
    second = arena.empty((4, 8), torch.float32)
    assert first.data_ptr() != second.data_ptr() and first.data_ptr() % 64 == 0
    place, view = second.data_ptr(), second.view(32)
    del second
    assert arena.empty((32,), torch.float32).data_ptr() != place  # a view still lies there
    del view
    assert arena.empty((2, 16), torch.float32).data_ptr() == place
    assert arena.empty((0, 16), torch.float32).shape == (0, 16)


def capture(made: CpuBackend, fn, **inputs):
    with torch.inference_mode():
        return made.graphs.capture(GraphKey(2, 2, 1), fn, inputs)


def test_a_replay_follows_its_inputs_through_kernels_and_torch():
    made = backend()
    linear = made.ops.get("pack_linear").run(torch.randn(32, 64), None)
    norm, weight = made.ops.get("rms_norm").run, torch.rand(64)
    rows = torch.tensor([1, 0])

    def step(x):
        return linear(norm(x, weight, 1e-6))[rows]

    x = torch.randn(2, 64)
    program = capture(made, step, x=x)
    assert len(program.tape) == 2 and len(program.torch_calls) == 1  # the choice of rows is torch's
    for _ in range(3):
        x.copy_(torch.randn(2, 64))
        assert torch.equal(made.graphs.replay(program), step(x))


def test_nothing_runs_while_a_step_is_captured():
    made = backend()
    cache = torch.full((4, 2, 1, 16, 16), 7.0)
    keys, slots = torch.ones(1, 1, 16), torch.tensor([3])

    def step(keys, slots):
        made.attention.reshape_and_cache(keys, keys, cache, slots)

    program = capture(made, step, keys=keys, slots=slots)
    assert bool((cache == 7).all())
    made.graphs.replay(program)
    assert not bool((cache == 7).all())


def test_what_cannot_be_captured_says_why_and_leaves_the_kernels_usable():
    made, x = backend(), torch.randn(2, 64)

    def many(x):
        for _ in range(MOST_TORCH_CALLS + 1):
            x = x + 1
        return x

    with pytest.raises(RuntimeError, match="not fused"):
        capture(made, many, x=x)
    with pytest.raises(RuntimeError, match="hands a value"):
        capture(made, lambda x: x * float(x.sum()), x=x)
    with pytest.raises(RuntimeError, match="cannot be part of a captured step"):
        capture(made, lambda x: made.attention.copy_blocks([x], [(0, 1)]), x=x)
    linear = made.ops.get("pack_linear").run(torch.eye(64), None)
    torch.testing.assert_close(linear(x), x)


def test_a_replay_checks_what_it_is_given():
    """A slot outside the cache is refused in a replay as in a step."""
    made, cache = backend(), torch.zeros(4, 2, 1, 16, 16)
    keys, slots = torch.ones(1, 1, 16), torch.tensor([3])
    program = capture(
        made, lambda keys, slots: made.attention.reshape_and_cache(keys, keys, cache, slots), keys=keys, slots=slots
    )
    slots[0] = 64
    with pytest.raises(IndexError, match="64"):
        made.graphs.replay(program)


def test_metadata_is_the_static_tensors_themselves():
    made = backend()
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    tensors = {name: torch.zeros(2, dtype=torch.int32) for name in names}
    common = AttentionMetadata(**tensors, max_query_len=1, max_seq_len=1)
    assert made.attention.build_metadata(common) is common


def test_smaller_batches_are_captured_when_they_come_up():
    made, x = backend(), torch.randn(4, 64)
    norm, weight = made.ops.get("rms_norm").run, torch.rand(64)
    calls = []

    def step(x):
        calls.append(len(x))
        return norm(x, weight, 1e-6)

    with torch.inference_mode():
        largest, three, one = (made.graphs.capture(GraphKey(n, n, 1), step, {"x": x[:n]}) for n in (4, 3, 1))
    assert calls == [4, 1] and three.tape is None
    size = made.graphs.memory_bytes()
    for _ in range(2):
        x.copy_(torch.randn(4, 64))
        for program, n in ((largest, 4), (three, 3), (one, 1)):
            assert torch.equal(made.graphs.replay(program), norm(x[:n], weight, 1e-6))
    assert calls == [4, 1, 3] and made.graphs.memory_bytes() == size


def test_a_batch_that_cannot_be_captured_later_runs_eagerly(caplog):
    made, x = backend(), torch.randn(3, 64)
    steps = {3: lambda x: x + 1, 2: lambda x: x * float(x.sum())}
    with torch.inference_mode():
        _, two = (made.graphs.capture(GraphKey(n, n, 1), steps[n], {"x": x[:n]}) for n in (3, 2))
    for _ in range(2):
        x.copy_(torch.randn(3, 64))
        assert torch.equal(made.graphs.replay(two), steps[2](x[:2]))
    assert caplog.text.count("runs eagerly") == 1
