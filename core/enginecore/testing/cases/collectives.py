"""L4: collectives, over one rank and over two: right sums in every dtype, results in the order of ranks, and an error
where a peer is lost. Two ranks are two processes (`enginecore.testing.ranks`); a case ends when one dies or hangs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from enginecore.device import CollectiveError, Communicator, GroupSpec
from enginecore.testing.case import Case, CaseContext, DeclaredUnsupported, ProcessDied, ProcessHung
from enginecore.testing.ranks import GRACE_SECONDS, GROUP_SECONDS, Ranks
from enginecore.testing.support import has_groups

if TYPE_CHECKING:
    from enginecore.testing.ranks import Group

#: One number, sizes that no group divides, a matrix, and more than a small message.
SHAPES = ((1,), (7,), (33,), (4, 6), (3, 5, 2), (5000,))


@contextmanager
def one_rank(ctx: CaseContext) -> Iterator[Communicator]:
    """The backend's own group of one, or one that it joins."""
    backend = ctx.backend
    if backend.collectives is not None:
        yield backend.collectives
    elif has_groups(backend):
        place = Path(ctx.options["scratch"]) / f"one-rank-{os.getpid()}-{ctx.case.name}"
        group = backend.communicator(GroupSpec(rank=0, world_size=1, init_method=place.as_uri(), timeout_s=30.0))
        yield group
        group.destroy()
    else:
        ctx.unsupported("no collectives: backend.collectives and backend.collective_backend are None")


def one_rank_identities(ctx: CaseContext) -> None:
    with one_rank(ctx) as group:
        for shape in ((7,), (4, 6)):
            x = ctx.normal(*shape)
            results = {
                "all_reduce": group.all_reduce(x.clone()),
                "all_gather": group.all_gather(x.clone(), 0),
                "reduce_scatter": group.reduce_scatter(x.clone(), 0),
                "broadcast": group.broadcast(x.clone(), 0),
            }
            ctx.backend.synchronize()
            for name, result in results.items():
                ctx.check(torch.equal(result, x), f"{name} over one rank must return its input, for shape {shape}")
        group.barrier()


def dtypes_survive(ctx: CaseContext) -> None:
    with one_rank(ctx) as group:
        for dtype in sorted(ctx.backend.capabilities.dtypes):
            x = ctx.normal(33, dtype=dtype)
            out = group.all_reduce(x.clone())
            ctx.check(out.dtype == x.dtype and torch.equal(out, x), f"all_reduce changed {dtype} values over one rank")


# What each of two ranks does --------------------------------------------------------------------------------------


def _dtypes(group: Group) -> list[str]:
    return [*sorted(group.backend.capabilities.dtypes), "int64"]


def all_reduce_sums(group: Group) -> None:
    for dtype in _dtypes(group):
        for shape in SHAPES:
            everyone = group.all_numbers(shape, dtype)
            out = group.communicator.all_reduce(everyone[group.rank].clone())
            group.equal(out, sum(everyone[1:], everyone[0]), f"all_reduce of {dtype} {shape}")


def all_gather_in_order(group: Group) -> None:
    for dtype in _dtypes(group):
        for shape in SHAPES:
            everyone = group.all_numbers(shape, dtype)
            for dim in range(len(shape)):
                out = group.communicator.all_gather(everyone[group.rank], dim)
                group.equal(out, torch.cat(everyone, dim), f"all_gather of {dtype} {shape} along {dim}")


def reduce_scatter_parts(group: Group) -> None:
    for dtype in _dtypes(group):
        for shape in ((2,), (6,), (4, 6), (8, 3, 2), (5000,)):
            everyone = group.all_numbers(shape, dtype)
            total = sum(everyone[1:], everyone[0])
            for dim in (dim for dim, size in enumerate(shape) if size % group.count == 0):
                out = group.communicator.reduce_scatter(everyone[group.rank].clone(), dim)
                expected = total.chunk(group.count, dim)[group.rank]
                group.equal(out, expected, f"reduce_scatter of {dtype} {shape} along {dim}")


def indivisible_is_refused(group: Group) -> None:
    """The refusal comes before anything is sent: the group still works."""
    for shape in ((1,), (7,)):
        try:
            group.communicator.reduce_scatter(group.numbers(group.rank, shape, "float32"), 0)
        except ValueError:
            continue
        raise AssertionError(f"reduce_scatter cut {shape[0]} into {group.count} equal parts: ValueError is due")
    everyone = group.all_numbers((3,), "float32")
    out = group.communicator.all_reduce(everyone[group.rank].clone())
    group.equal(out, sum(everyone[1:], everyone[0]), "all_reduce after a refusal")


def broadcast_from_each(group: Group) -> None:
    for dtype in _dtypes(group):
        for src in range(group.count):
            everyone = group.all_numbers((5, 3), dtype)
            out = group.communicator.broadcast(everyone[group.rank].clone(), src)
            group.equal(out, everyone[src], f"broadcast of {dtype} from rank {src}")


def send_and_receive(group: Group) -> None:
    for dtype in _dtypes(group):
        for src, dst in ((0, 1), (1, 0)):
            everyone = group.all_numbers((4, 5), dtype)
            if group.rank == src:
                group.communicator.send(everyone[src], dst)
            elif group.rank == dst:
                out = group.communicator.recv(torch.zeros_like(everyone[dst]), src)
                group.equal(out, everyone[src], f"{dtype} from rank {src} to {dst}")


def strided_inputs(group: Group) -> None:
    """A transposed matrix and a slice: what matters is what stands in them, not how."""
    everyone = [x.t() for x in group.all_numbers((6, 4), "float32")]
    out = group.communicator.all_gather(everyone[group.rank], 0)
    group.equal(out, torch.cat(everyone, 0), "all_gather, transposed")
    everyone = [x[:, 1:3] for x in group.all_numbers((6, 4), "float32")]
    total = sum(everyone[1:], everyone[0])
    group.equal(group.communicator.all_reduce(everyone[group.rank]), total, "all_reduce of a slice")


def calls_keep_their_order(group: Group) -> None:
    """Many calls without waiting in between, each on the result of the last."""
    x = group.numbers(group.rank, (257,), "float32")
    expected = group.all_numbers((257,), "float32")
    value, right = x, expected
    for _ in range(6):
        value = group.communicator.all_reduce(value.clone())
        value = group.communicator.broadcast(value * (group.rank + 1), 1)
        total = sum(right[1:], right[0])
        right = [total * group.count] * group.count
    group.equal(value, right[group.rank], "six rounds of all_reduce and broadcast")


def barrier_waits(group: Group) -> None:
    group.communicator.barrier()
    if group.rank == 1:
        time.sleep(0.3)
    began = time.monotonic()
    group.communicator.barrier()
    waited = time.monotonic() - began
    if group.rank == 0 and waited < 0.1:
        raise AssertionError(f"rank 0 left the barrier after {waited:.3f} s, and rank 1 came 0.3 s late")


def all_to_all_transposes(group: Group) -> None:
    if type(group.communicator).all_to_all is Communicator.all_to_all:
        raise DeclaredUnsupported("all_to_all is optional and not there")
    for dtype in _dtypes(group):
        everyone = group.all_numbers((6, 3), dtype)
        out = group.communicator.all_to_all(everyone[group.rank].clone())
        expected = torch.cat([x.chunk(group.count, 0)[group.rank] for x in everyone])
        group.equal(out, expected, f"all_to_all of {dtype}")


def silent_peer_is_an_error(group: Group) -> None:
    """Rank 1 does not join a call; the others learn it within the group's timeout."""
    if group.rank == 1:
        time.sleep(group.timeout_s + 2)
        return
    began = time.monotonic()
    try:
        group.communicator.all_reduce(group.numbers(0, (7,), "float32"))
        group.backend.synchronize()
    except CollectiveError:
        return
    waited = time.monotonic() - began
    raise AssertionError(f"all_reduce without rank 1 returned after {waited:.1f} s: CollectiveError is due")


def lost_peer_is_an_error(group: Group) -> None:
    """Rank 1 ends; the others learn it within the group's timeout."""
    if group.rank == 1:
        os._exit(0)
    try:
        group.communicator.all_reduce(group.numbers(0, (7,), "float32"))
        group.backend.synchronize()
    except CollectiveError:
        return
    raise AssertionError("all_reduce after the end of rank 1 returned: CollectiveError is due")


CHECKS: dict[str, Callable[[Group], None]] = {
    check.__name__: check
    for check in (
        all_reduce_sums, all_gather_in_order, reduce_scatter_parts, indivisible_is_refused, broadcast_from_each,
        send_and_receive, strided_inputs, calls_keep_their_order, barrier_waits, all_to_all_transposes,
        silent_peer_is_an_error, lost_peer_is_an_error,
    )
}  # fmt: skip

#: Checks in which rank 1 is lost on purpose, and how many seconds the group waits for it.
LOSING = {"silent_peer_is_an_error": 2.0, "lost_peer_is_an_error": 5.0}


def together(name: str) -> Case:
    """A case that two ranks play."""

    def run(ctx: CaseContext) -> None:
        if not has_groups(ctx.backend):
            ctx.unsupported("no groups of several ranks: backend.collective_backend is None")
        if ctx.backend.capabilities.max_world_size < 2:
            ctx.unsupported("max_world_size is 1")
        ranks: Ranks | None = ctx.options.get("ranks")  # of the cases before this one, in this process
        if ranks is None:
            folder, scale = Path(ctx.options["scratch"]), ctx.profile.timeout_scale
            ranks = ctx.options["ranks"] = Ranks(ctx.options["source"], folder, scale=scale)
        if name in LOSING:
            left = ranks.check(name, LOSING[name], LOSING[name] + GRACE_SECONDS)[0]
            ranks.close()
            if left.silent:
                raise ProcessHung(f"rank 0 waits for rank 1, which is lost, for more than {LOSING[name]} s")
            left.judge()  # it may have ended too: some libraries know no other way
            return
        told = ranks.check(name, GROUP_SECONDS)
        for rank in told:
            if rank.ended:
                ranks.close()
                raise ProcessDied(f"rank {rank.index} {rank.ended}")
        for rank in sorted(told, key=lambda rank: rank.lost):  # who waited in vain says least
            rank.judge()

    return Case(4, "collectives", f"two_ranks_{name}", run, seconds=240)


def cases() -> list[Case]:
    alone = [Case(4, "collectives", check.__name__, check) for check in (one_rank_identities, dtypes_survive)]
    return [*alone, *(together(name) for name in CHECKS)]
