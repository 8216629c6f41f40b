"""Which cached block that nobody uses is given away next.

In this order, the least recently used of each:

    1. blocks of tenants above their floor     (the floor is what each tenant keeps while others press)
    2. blocks of tenants at or below it
    3. blocks of pinned prefixes

A tenant above its cap gives one of its own away at once, whoever would want it. Neither floors nor pins ever keep a
sequence from running: what runs comes before what is remembered.
"""

from __future__ import annotations

from collections import OrderedDict


class Evictor:
    """Blocks without an owner, by tenant and by time. `floor` and `cap` are in blocks of each tenant; None: no cap."""

    def __init__(self, floor: int = 0, cap: int | None = None) -> None:
        self.floor = floor
        self.cap = cap
        self._plain: OrderedDict[int, None] = OrderedDict()
        self._pinned: OrderedDict[int, None] = OrderedDict()
        #: Only kept with a floor or a cap: each tenant's plain blocks, with the time of their release.
        self._of_tenant: dict[str, OrderedDict[int, int]] = {}
        self._tenant: dict[int, str] = {}
        self._time = 0

    def __len__(self) -> int:
        return len(self._plain) + len(self._pinned)

    def __contains__(self, block: int) -> bool:
        return block in self._plain or block in self._pinned

    @property
    def by_tenant(self) -> bool:
        return self.floor > 0 or self.cap is not None

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    def add(self, block: int, tenant: str, pinned: bool) -> int | None:
        """A block has lost its last owner. Returns the block that must go because its tenant is above the cap."""
        if pinned:
            self._pinned[block] = None
            if self.by_tenant:
                self._tenant[block] = tenant
            return None
        self._plain[block] = None
        if not self.by_tenant:
            return None
        self._time += 1
        self._tenant[block] = tenant
        own = self._of_tenant.setdefault(tenant, OrderedDict())
        own[block] = self._time
        if self.cap is None or len(own) <= self.cap:
            return None
        oldest = next(iter(own))
        self.discard(oldest)
        return oldest

    def discard(self, block: int) -> None:
        """The block has an owner again, or is gone. KeyError when it is not here: taking it would be a bug."""
        if block in self._pinned:
            del self._pinned[block]
        else:
            del self._plain[block]
        tenant = self._tenant.pop(block, None)
        own = self._of_tenant.get(tenant) if tenant is not None else None
        if own is not None and own.pop(block, None) is not None and not own:
            del self._of_tenant[str(tenant)]

    def pop(self) -> int:
        """Take out the block to be given away."""
        block = self._next()
        self.discard(block)
        return block

    def _next(self) -> int:
        if not self._plain:
            return next(iter(self._pinned))
        if not self.floor:
            return next(iter(self._plain))
        heads = [next(iter(own.items())) for own in self._of_tenant.values() if len(own) > self.floor]
        return min(heads, key=lambda head: head[1])[0] if heads else next(iter(self._plain))

    def repin(self, block: int, pinned: bool) -> int | None:
        """A block that is here has become pinned, or is not any more: it counts as released now. Returns what `add`
        does."""
        tenant = self._tenant.get(block, "")
        self.discard(block)
        return self.add(block, tenant, pinned)

    def clear(self) -> list[int]:
        """Take out all."""
        blocks = [*self._plain, *self._pinned]
        self._plain.clear()
        self._pinned.clear()
        self._of_tenant.clear()
        self._tenant.clear()
        return blocks
