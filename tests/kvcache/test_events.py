"""A listener that believes every event knows exactly what the prefix index holds."""

from __future__ import annotations

import random

from enginecore.kvcache import block_hashes, root_hash
from enginecore.kvcache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent, short_hash
from enginecore.scheduler import Scheduler

from tests.scheduler.fake_executor import Harness, request


def follow(known: dict[int, tuple[int | None, tuple[int, ...]]], events: list[KVCacheEvent]) -> None:
    for event in events:
        if isinstance(event, BlockStored):
            parent, size = event.parent_block_hash, event.block_size
            assert len(event.token_ids) == size * len(event.block_hashes)
            for i, block_hash in enumerate(event.block_hashes):
                assert block_hash not in known, "stored twice"
                known[block_hash] = (parent, tuple(event.token_ids[i * size : (i + 1) * size]))
                parent = block_hash
        elif isinstance(event, BlockRemoved):
            for block_hash in event.block_hashes:
                del known[block_hash]
        else:
            assert isinstance(event, AllBlocksCleared)
            known.clear()


def recording(**config: int) -> Harness:
    harness = Harness(**config)
    harness.scheduler = Scheduler(harness.config, record_events=True)
    return harness


def test_a_listener_knows_the_index() -> None:
    harness, rng = recording(num_blocks=12, max_model_len=40), random.Random(3)
    known: dict[int, tuple[int | None, tuple[int, ...]]] = {}
    events = harness.scheduler.events
    assert events is not None
    removed = 0
    for number in range(400):
        if rng.random() < 0.3:
            prompt = [rng.randrange(2) for _ in range(rng.choice([3, 9, 17]))]
            harness.add(request(f"r{number}", prompt, rng.randint(1, 12)))
            harness.add(request(f"s{number}", prompt, rng.randint(1, 12), fork_of=f"r{number}"))
        if rng.random() < 0.01:
            harness.scheduler.reset_prefix_cache()
        if harness.scheduler.has_work():
            harness.step()
        taken = events.take()
        removed += sum(isinstance(event, BlockRemoved) for event in taken)
        follow(known, taken)
        assert known.keys() == {short_hash(block_hash) for block_hash in harness.scheduler.pool._index}
    assert removed > 20 and events.take() == []


def test_tokens_parents_and_hashes_that_any_process_can_compute() -> None:
    harness = recording()
    prompt = list(range(10, 23))
    harness.add(request("a", prompt, 1, cache_salt="s"))
    harness.run()
    assert harness.scheduler.events is not None
    hashes = [short_hash(each) for each in block_hashes(root_hash("s"), prompt, 4)]
    assert harness.scheduler.events.take() == [BlockStored(hashes, None, prompt[:12], 4)]
    harness.add(request("b", [*prompt[:12], 1, 2, 3, 4, 5], 1, cache_salt="s"))
    harness.run()
    (event,) = harness.scheduler.events.take()
    assert isinstance(event, BlockStored)
    assert (event.parent_block_hash, event.token_ids) == (hashes[2], [1, 2, 3, 4])
