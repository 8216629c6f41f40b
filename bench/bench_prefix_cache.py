"""What a block costs the prefix cache: hashing, looking up, registering, and a match that ends inside a block.

    python bench/bench_prefix_cache.py [--json] [--repeats 15]

Microseconds of processor time a block of 16 tokens, over prompts of 2,000 tokens, best of `--repeats` rounds: the noise
of a shared machine only ever adds.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable

from enginecore.kvcache import BlockPool, BlockTable, KVCacheManager, block_hashes, root_hash
from enginecore.kvcache.hashing import token_bytes

TOKENS, SIZE, PROMPTS = 2000, 16, 64


def best(work: Callable[[], None], repeats: int, blocks: int) -> float:
    """Microseconds a block of the fastest round, in processor time."""
    times = []
    for _ in range(repeats):
        begun = time.process_time()
        work()
        times.append(time.process_time() - begun)
    return 1e6 * min(times) / blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rng = random.Random(0)
    prompts = [[rng.randrange(50_000) for _ in range(TOKENS)] for _ in range(PROMPTS)]
    blocks, root = PROMPTS * (TOKENS // SIZE), root_hash("salt")
    kv = KVCacheManager(BlockPool(2 * blocks), SIZE, prefix_caching=True)
    tables = []

    def register() -> None:
        kv.reset()
        tables.clear()
        for prompt in prompts:
            table = BlockTable(root)
            kv.attach(table, 0, kv.blocks_for(TOKENS))
            for i in kv.publish(table, prompt[: TOKENS // SIZE * SIZE], TOKENS):
                kv.note(table, i, token_bytes(prompt[i * SIZE : (i + 1) * SIZE]))
            kv.free(table)
            tables.append(table)

    def hashing() -> None:
        for prompt in prompts:
            block_hashes(root, prompt, SIZE)

    def lookup() -> None:
        for prompt, table in zip(prompts, tables, strict=True):
            assert kv.match(table, prompt) == TOKENS - 1

    def both() -> None:
        for prompt in prompts:
            assert kv.match(BlockTable(root), prompt) == TOKENS - 1

    def inside() -> None:
        for prompt, table in zip(prompts, tables, strict=True):
            assert kv.match_tail(table, prompt[:1992], 1984)[1] == 7

    figures = {
        "register_us": best(register, options.repeats, blocks),
        "hashing_us": best(hashing, options.repeats, blocks),
        "lookup_us": best(lookup, options.repeats, blocks),
        "hashing_and_lookup_us": best(both, options.repeats, blocks),
        "match_inside_a_block_us": best(inside, options.repeats, PROMPTS),
    }
    if options.json:
        print(json.dumps(figures, indent=1))
        return
    for name, value in figures.items():
        print(f"{name:<28} {value:.3f}")


if __name__ == "__main__":
    main()
