"""Layers that remember in different ways, in one pool of pages.

A model may have groups of layers: some attend to everything, some to a window, some keep one state for the whole past.
What one page of a group holds is its own (`GroupSpec`), but pages of all groups have the same bytes and the same pool,
so that what one group does not need another may take:

    group           a page holds                 a sequence keeps            a prefix of L tokens is a hit with
    full, mla       `block_size` tokens          all pages                   all pages before L
    sliding window  `block_size` tokens          pages within the window     the pages of the window that ends at L
    chunked local   `block_size` tokens          pages of the current chunk  the pages of the chunk that L is in
    recurrent       the state after some token   one page                    the state after L tokens, exactly
    cross           `block_size` encoder tokens  all pages                   (not a matter of prefixes)

A page that leaves a window is released while the sequence runs; it stays findable until it is evicted, as the pages of
sequences that have ended do. A recurrent state is kept at every multiple of `block_size`: there the sequence goes on in
a copy, and the page with the old state becomes findable.

The scheduler runs on `manager.py`, which knows one group of full attention; this is the allocator for models with more.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Literal

from enginecore.kvcache.block_pool import BlockPool
from enginecore.kvcache.hashing import block_hashes

Kind = Literal["full", "mla", "sliding_window", "chunked_local", "recurrent", "cross"]


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """One group of layers. `token_bytes` is what one token takes over all of them, `state_bytes` what a recurrent state
    does. `window` counts tokens, the current one included; of chunked local attention it is the chunk. `block_size` is
    in tokens; of a recurrent group, how far apart states are kept."""

    name: str
    kind: Kind
    block_size: int
    token_bytes: int = 0
    state_bytes: int = 0
    window: int = 0

    @property
    def page_bytes(self) -> int:
        return self.state_bytes if self.kind == "recurrent" else self.block_size * self.token_bytes

    def first_needed(self, position: int) -> int:
        """The first position that the token at `position` attends to."""
        if self.kind == "sliding_window":
            return max(0, position - self.window + 1)
        if self.kind == "chunked_local":
            return position // self.window * self.window
        return 0


def same_pages(specs: list[GroupSpec]) -> tuple[list[GroupSpec], int]:
    """The specs with larger blocks where that fits, and the bytes of a page, which is the largest of any group.

    Blocks grow by doubling, so that those of all groups end at the same tokens again and again.
    """
    page_bytes = max(spec.page_bytes for spec in specs)
    grown = []
    for spec in specs:
        size = spec.block_size
        while spec.kind != "recurrent" and 2 * size * spec.token_bytes <= page_bytes:
            size *= 2
        grown.append(GroupSpec(**{**vars(spec), "block_size": size}))
    return grown, page_bytes


@dataclass
class GroupTable:
    """Pages of one sequence in one group: None where a page is not needed any more. A recurrent group has one."""

    root: bytes
    pages: list[int | None] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0


@dataclass
class GroupedSequence:
    """A sequence's tables by group. `num_computed` is as of the last `advance`."""

    tables: dict[str, GroupTable]
    num_computed: int = 0


class GroupedCache:
    """Pages of one pool for sequences of a model with several groups. The scheduler's interface is a match, a growth
    before a step, an advance after it, a release."""

    def __init__(self, pool: BlockPool, specs: list[GroupSpec]) -> None:
        self.pool = pool
        self.specs = {spec.name: spec for spec in specs}
        #: A prefix can end where blocks of every group do.
        self.granule = max(spec.block_size for spec in specs if spec.kind != "cross")
        assert all(self.granule % spec.block_size == 0 for spec in specs if spec.kind != "cross")

    def open(self, root: bytes) -> GroupedSequence:
        """A sequence without pages. Groups have identities of their own: the same tokens mean other bytes in each."""
        return GroupedSequence(
            {name: GroupTable(hashlib.sha256(root + b"group" + name.encode()).digest()) for name in self.specs}
        )

    # ---- prefixes ------------------------------------------------------------------------------------------------

    def match(self, sequence: GroupedSequence, token_ids: list[int]) -> int:
        """Tokens at the start whose pages are there in every group; the last token never counts. Takes nothing."""
        for name, table in sequence.tables.items():
            if self.specs[name].kind != "cross":
                table.hashes = block_hashes(table.root, token_ids, self.specs[name].block_size)
        length = (len(token_ids) - 1) // self.granule * self.granule
        groups = [(spec, sequence.tables[name]) for name, spec in self.specs.items() if spec.kind != "cross"]
        while length and not all(self._is_hit(spec, table, length) for spec, table in groups):
            length -= self.granule
        return length

    def _is_hit(self, spec: GroupSpec, table: GroupTable, length: int) -> bool:
        return all(self.pool.lookup(table.hashes[i]) is not None for i in self._needed(spec, length))

    def _needed(self, spec: GroupSpec, length: int) -> range:
        """Pages, by their place, that a sequence of `length` computed tokens needs to go on."""
        end = -(-length // spec.block_size)
        if spec.kind == "recurrent":
            return range(max(0, end - 1), end)
        return range(min(spec.first_needed(length) // spec.block_size, end), end)

    def attach(self, sequence: GroupedSequence, length: int) -> list[tuple[int, int]] | None:
        """Take the pages of a matched prefix. Returns (source, new) pages that the device must copy, which are states
        that others may still ask for; None, and nothing taken, when the pool has no room for them."""
        states = [name for name, spec in self.specs.items() if spec.kind == "recurrent"] if length else []
        taken: dict[str, dict[int, int]] = {}
        for name, spec in self.specs.items():
            table = sequence.tables[name]
            if spec.kind != "cross":
                found = ((i, self.pool.lookup(table.hashes[i])) for i in self._needed(spec, length))
                taken[name] = {i: page for i, page in found if page is not None}
                self.pool.share(taken[name].values())
        fresh = self.pool.allocate(len(states))
        if fresh is None:
            for pages in taken.values():
                self.pool.release(reversed(pages.values()))
            return None
        copies = []
        for name, pages in taken.items():
            table, spec = sequence.tables[name], self.specs[name]
            table.num_published = length // spec.block_size
            if name in states:
                (source,) = pages.values()
                copies.append((source, fresh.pop()))
                table.pages = [copies[-1][1]]
                self.pool.release([source])
            else:
                table.pages = [pages.get(i) for i in range(length // spec.block_size)]
        sequence.num_computed = length
        return copies

    # ---- growth --------------------------------------------------------------------------------------------------

    def pages_for(self, num_tokens: int, chunk: int) -> int:
        """The most pages that a sequence of so many tokens holds at a time, when a step computes at most `chunk`."""
        return sum(self._most(spec, num_tokens, chunk) for spec in self.specs.values())

    @staticmethod
    def _most(spec: GroupSpec, num_tokens: int, chunk: int) -> int:
        whole = -(-num_tokens // spec.block_size)
        if spec.kind == "recurrent":
            return 2  # a state, and the copy it goes on in
        if spec.kind in ("sliding_window", "chunked_local"):
            return min(whole, -(-(spec.window - 1 + chunk) // spec.block_size) + 1)
        return whole

    def grow(self, sequence: GroupedSequence, num_tokens: int, num_encoder_tokens: int = 0) -> bool:
        """Pages for the tokens up to `num_tokens`, which the next step computes; False, and nothing taken, when the
        pool has too few."""
        missing = {}
        for name, spec in self.specs.items():
            table = sequence.tables[name]
            tokens = num_encoder_tokens if spec.kind == "cross" else num_tokens
            whole = 1 if spec.kind == "recurrent" else -(-tokens // spec.block_size)
            missing[name] = max(0, whole - len(table.pages))
        fresh = self.pool.allocate(sum(missing.values()))
        if fresh is None:
            return False
        for name, count in missing.items():
            sequence.tables[name].pages += fresh[:count]
            del fresh[:count]
        return True

    def advance(self, sequence: GroupedSequence, token_ids: list[int], num_computed: int) -> list[tuple[int, int]]:
        """A step has computed up to `num_computed` of the tokens: publish what is full, release what has left its
        window. Returns (source, new) pages that the device must copy before the next step: states that are kept."""
        copies: list[tuple[int, int]] = []
        for name, spec in self.specs.items():
            table = sequence.tables[name]
            if spec.kind == "cross":
                continue
            full = num_computed // spec.block_size
            if full > len(table.hashes):
                begin = len(table.hashes) * spec.block_size
                parent = table.hashes[-1] if table.hashes else table.root
                tokens = token_ids[begin : full * spec.block_size]
                table.hashes += block_hashes(parent, tokens, spec.block_size)
            if spec.kind == "recurrent":
                copies += self._keep_state(spec, table, num_computed)
                continue
            for i in range(table.num_published, full):
                page = table.pages[i]
                if page is not None:
                    self.pool.set_hash(page, table.hashes[i])
            table.num_published = max(table.num_published, full)
            self._trim(table, self._needed(spec, num_computed).start)
        sequence.num_computed = num_computed
        return copies

    def _keep_state(self, spec: GroupSpec, table: GroupTable, num_computed: int) -> list[tuple[int, int]]:
        """At a multiple of the block size the state becomes findable, where there is room for the copy to go on in."""
        if num_computed % spec.block_size or not num_computed or not table.pages:
            return []
        block_hash = table.hashes[num_computed // spec.block_size - 1]
        if self.pool.lookup(block_hash) is not None:
            return []
        fresh = self.pool.allocate(1)
        old = table.pages[0]
        if fresh is None or old is None:
            return []
        self.pool.set_hash(old, block_hash)
        self.pool.release([old])
        table.pages[0] = fresh[0]
        return [(old, fresh[0])]

    def _trim(self, table: GroupTable, first: int) -> None:
        """Release the pages before place `first`, the last one first."""
        gone = [i for i in range(min(first, len(table.pages))) if table.pages[i] is not None]
        self.pool.release(page for i in reversed(gone) if (page := table.pages[i]) is not None)
        for i in gone:
            table.pages[i] = None

    def free(self, sequence: GroupedSequence) -> None:
        """Release all pages of a sequence; those that were published stay findable until they are evicted."""
        for table in sequence.tables.values():
            self.pool.release(page for page in reversed(table.pages) if page is not None)
            table.pages, table.num_published = [], 0
        sequence.num_computed = 0
