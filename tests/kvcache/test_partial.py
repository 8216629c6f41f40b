from __future__ import annotations

from enginecore.kvcache import BlockPool
from enginecore.kvcache.hashing import token_bytes
from enginecore.kvcache.partial import MAX_LOOKED_AT, PartialIndex

ROOT, OTHER = b"root", b"other"


def indexed(pool: BlockPool, index: PartialIndex, parent: bytes, tokens: list[int]) -> int:
    """A cached block with these tokens after `parent`."""
    (block,) = pool.allocate(1) or [-1]
    block_hash = parent + token_bytes(tokens)
    assert pool.set_hash(block, block_hash)
    index.note(block, parent, block_hash, token_bytes(tokens))
    return block


def test_the_follower_that_agrees_furthest_is_found() -> None:
    pool = BlockPool(8)
    index = PartialIndex(pool)
    near = indexed(pool, index, ROOT, [1, 2, 9, 9])
    far = indexed(pool, index, ROOT, [1, 2, 3, 9])
    indexed(pool, index, ROOT, [7, 2, 3, 4])
    assert index.find(ROOT, token_bytes([1, 2, 3, 4])) == (far, 3)
    assert index.find(ROOT, token_bytes([1, 2, 9])) == (near, 3)
    assert index.find(ROOT, token_bytes([5, 5, 5])) == (-1, 0)
    assert index.find(ROOT, b"") == (-1, 0)
    assert index.find(OTHER, token_bytes([1, 2, 3])) == (-1, 0)


def test_large_ids_are_compared_whole() -> None:
    pool = BlockPool(2)
    index = PartialIndex(pool)
    block = indexed(pool, index, ROOT, [2**31, 258, 1, 1])
    assert index.find(ROOT, token_bytes([2**31, 2, 1])) == (block, 1)


def test_an_evicted_block_is_not_found_and_its_entry_goes() -> None:
    pool = BlockPool(1)
    index = PartialIndex(pool)
    pool.release([indexed(pool, index, ROOT, [1, 2, 3, 4])])
    assert index.find(ROOT, token_bytes([1, 2])) == (0, 2)
    pool.allocate(1)
    assert index.find(ROOT, token_bytes([1, 2])) == (-1, 0) and len(index) == 0


def test_a_block_that_holds_something_else_now_has_one_entry() -> None:
    pool = BlockPool(1)
    index = PartialIndex(pool)
    pool.release([indexed(pool, index, ROOT, [1, 2, 3, 4])])
    indexed(pool, index, OTHER, [5, 6, 7, 8])
    assert len(index) == 1 and index.find(ROOT, token_bytes([1])) == (-1, 0)
    assert index.find(OTHER, token_bytes([5, 6])) == (0, 2)


def test_a_lookup_compares_a_bounded_number_of_followers() -> None:
    pool = BlockPool(1000)
    index = PartialIndex(pool)
    for i in range(1000):
        indexed(pool, index, ROOT, [i, 0, 0, 0])
    looked_at: list[int] = []
    ask = pool.hash_of
    pool.hash_of = lambda block: looked_at.append(block) or ask(block)  # type: ignore[method-assign,func-returns-value]
    assert index.find(ROOT, token_bytes([999, 1])) == (999, 1)
    assert index.find(ROOT, token_bytes([0, 1])) == (-1, 0), "the oldest is not looked at any more"
    assert len(looked_at) <= 2 * MAX_LOOKED_AT
