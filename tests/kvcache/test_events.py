"""A listener that believes every event knows exactly what the prefix index holds."""

from __future__ import annotations

import os
import random
import subprocess
import sys

from enginecore.kvcache import block_hashes, root_hash
from enginecore.kvcache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventRecorder,
    KVCacheEvent,
    short_hash,
)
from enginecore.scheduler import Scheduler

from tests.scheduler.fake_executor import Harness, request
from tests.scheduler.tier_harness import TierHarness


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
    extra = [[root_hash("s").hex()[:32]], None, None]
    assert harness.scheduler.events.take() == [BlockStored(hashes, None, prompt[:12], 4, extra_keys=extra)]
    harness.add(request("b", [*prompt[:12], 1, 2, 3, 4, 5], 1, cache_salt="s"))
    harness.run()
    (event,) = harness.scheduler.events.take()
    assert isinstance(event, BlockStored)
    assert (event.parent_block_hash, event.token_ids, event.extra_keys) == (hashes[2], [1, 2, 3, 4], None)
    harness.add(request("c", prompt, 1, adapter=("x", 3)))
    harness.run()
    (event,) = harness.scheduler.events.take()
    assert isinstance(event, BlockStored)
    assert (event.lora_name, event.medium, event.extra_keys) == ("x", "GPU", None)


def test_another_process_computes_the_same_numbers() -> None:
    program = (
        "from enginecore.kvcache import block_hashes, root_hash\n"
        "from enginecore.kvcache.events import short_hash\n"
        "print([short_hash(h) for h in block_hashes(root_hash('s', ('x', 1)), list(range(64)), 16)])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1234"}
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    ours = [short_hash(each) for each in block_hashes(root_hash("s", ("x", 1)), list(range(64)), 16)]
    assert told.stdout.strip() == str(ours)


def test_a_listener_knows_what_is_in_host_memory() -> None:
    harness = TierHarness(6, num_blocks=16)
    harness.scheduler.events = recorder = EventRecorder(4, harness.scheduler.journal)
    harness.tiers.host.on_change = recorder.host_changed
    known: set[int] = set()
    evicted = 0
    for i in range(6):
        harness.add(request(f"r{i}", [i] * 17, 3))
        harness.run()
        harness.settle()
        for event in recorder.take():
            if isinstance(event, BlockStored) and event.medium == "CPU":
                assert event.token_ids == [] and event.parent_block_hash is None
                known |= set(event.block_hashes)
            elif isinstance(event, BlockRemoved) and event.medium == "CPU":
                known -= set(event.block_hashes)
                evicted += len(event.block_hashes)
        assert known == {short_hash(block_hash) for block_hash in harness.tiers.host._ready}
    assert evicted > 6
