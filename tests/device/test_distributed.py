"""The adapter over torch.distributed in a group of one; groups of two are level 4 of the kit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from enginecore.device import CollectiveError, GroupSpec
from enginecore.device.distributed import TorchCommunicator
from enginecore.ops.torch_backend import TorchBackend

from tests.testing.recording import create


def spec(folder: Path, **values: float) -> GroupSpec:
    return GroupSpec(**{"rank": 0, "world_size": 1, "init_method": (folder / "meet").as_uri(), **values})  # type: ignore


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[TorchCommunicator]:
    group = TorchCommunicator(spec(tmp_path), "gloo")
    yield group
    group.destroy()


def test_a_group_of_one_returns_what_it_is_given(alone: TorchCommunicator) -> None:
    x = torch.arange(12.0).view(3, 4)
    for out in (
        alone.all_reduce(x.clone()), alone.all_gather(x.t(), 1).t(), alone.reduce_scatter(x.clone(), 1),
        alone.broadcast(x.clone(), 0), alone.all_to_all(x.clone()),
    ):  # fmt: skip
        assert torch.equal(out, x)
    alone.barrier()


def test_a_process_is_in_one_group_at_a_time(alone: TorchCommunicator, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="joined a group already"):
        TorchCommunicator(spec(tmp_path), "gloo")


def test_names_that_torch_lacks_and_ranks_that_do_not_come(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no backend 'warp' here; it has .*gloo"):
        TorchCommunicator(spec(tmp_path), "warp")
    with pytest.raises(CollectiveError, match=r"rank 0 of 2 could not join the group within 0\.5 s"):
        TorchCommunicator(spec(tmp_path, world_size=2, timeout_s=0.5), "gloo")
    for wrong in ({"rank": 1}, {"timeout_s": 0}):
        with pytest.raises(ValueError, match=r"rank 1|timeout_s"):
            spec(tmp_path, **wrong)


def test_a_backend_joins_under_the_name_that_it_gives(tmp_path: Path) -> None:
    backend = create()
    with pytest.raises(NotImplementedError, match="has no collectives"):
        backend.communicator(spec(tmp_path))

    class Gloo(type(backend)):  # type: ignore[misc]
        collective_backend = "gloo"

    assert issubclass(Gloo, TorchBackend)
    group = Gloo(create_context(), "").communicator(spec(tmp_path))
    assert isinstance(group, TorchCommunicator) and group.name == "gloo"
    group.destroy()


def create_context() -> object:
    from enginecore.device import BackendContext

    return BackendContext(device="gloo")
