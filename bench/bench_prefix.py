"""What looking up a cached prefix costs: hashing and lookup, microseconds of processor time a block.

    python bench/bench_prefix.py [--blocks 20000] [--block-size 16]
"""

from __future__ import annotations

import argparse
import random
import time

from enginecore.kvcache import BlockPool, BlockTable, KVCacheManager, root_hash


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20_000)
    parser.add_argument("--block-size", type=int, default=16)
    args = parser.parse_args()
    rng, size, count = random.Random(0), args.block_size, args.blocks
    tokens = [rng.randrange(50_000) for _ in range(count * size + 1)]
    kv = KVCacheManager(BlockPool(count + 1), size, prefix_caching=True)
    table = BlockTable(root_hash())
    kv.match(table, tokens)
    assert kv.attach(table, 0, count + 1)
    kv.publish(table, [], count * size)
    rounds = []
    for _ in range(7):
        asked = BlockTable(root_hash())
        begun = time.process_time()
        assert kv.match(asked, tokens) == count * size
        rounds.append((time.process_time() - begun) / count * 1e6)
    print(f"{count} blocks of {size} tokens, all cached: best {min(rounds):.2f}, worst {max(rounds):.2f} us a block")


if __name__ == "__main__":
    main()
