"""F03: no prompt may be answered from blocks of another one, however the two were crafted."""

from __future__ import annotations

import itertools

import pytest
from enginecore.kvcache.hashing import block_hashes, root_hash

from tests.field.support import baseline, scripted
from tests.serving import ServerProcess

BLOCK = 16


def _block(*start: int) -> list[int]:
    return [*start, *range(100, 100 + BLOCK - len(start))]


#: Pairs that weak hashes, or hashes of text without lengths, take for the same.
PAIRS = {
    "polynomial hash with factor 31": (_block(500, 600), _block(500 + 1, 600 - 31)),
    "swapped tokens": (_block(7, 8), _block(8, 7)),
    "digits run together": (_block(1, 23, 4), _block(12, 3, 4)),
    "bytes run together": (_block(0x0101, 0x01), _block(0x01, 0x0101)),
    "differ in the high bytes": (_block(5), _block(5 + 2**15)),
    "zeros in front": (_block(0, 0, 9), _block(0, 9, 0)),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS.keys())
def test_crafted_pairs_have_different_hashes(pair: tuple[list[int], list[int]]) -> None:
    first, second = pair
    assert block_hashes(root_hash(), first, BLOCK) != block_hashes(root_hash(), second, BLOCK)


def test_a_hash_covers_parent_size_and_extra_keys() -> None:
    tokens = list(range(32))
    roots = [
        root_hash(), root_hash("a"), root_hash("b"), root_hash(adapter=("a", 0)), root_hash(adapter=("a", 1)),
        root_hash("a", ("a", 0)), root_hash("lora"), root_hash("a" + "\x00" * 8),
    ]  # fmt: skip
    assert len({block_hashes(root, tokens, BLOCK)[0] for root in roots}) == len(roots)
    long, short = block_hashes(root_hash(), tokens, 32), block_hashes(root_hash(), tokens, 16)
    assert len(set(long + short)) == 3
    assert block_hashes(short[0], tokens[16:], BLOCK) == short[1:]
    assert all(len(each) == 32 for each in long + short), "sha256"


def test_negative_ids_never_reach_the_hash() -> None:
    """hash(-1) == hash(-2) in Python; here neither is a token id."""
    for token in (-1, -2, 2**32):
        with pytest.raises(OverflowError):
            block_hashes(root_hash(), _block(token), BLOCK)


def test_crafted_pairs_share_nothing_over_http(sim_server: ServerProcess) -> None:
    """Each prompt's own repeat is a hit, so the cache is at work; its twin's is a miss, and the answers are right."""
    for first, second in PAIRS.values():
        for prompt, cached in ((first, 0), (second, 0), (first, BLOCK), (second, BLOCK)):
            prompt = [*prompt, 77]
            answer = sim_server.complete(prompt=prompt, return_token_ids=True, cache_salt="F03", ignore_eos=True)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
            assert answer["choices"][0]["token_ids"] == scripted(prompt, 5)
    baseline(sim_server)


def test_no_two_prompts_of_a_small_alphabet_meet() -> None:
    prompts = [list(each) for each in itertools.product((0, 1, 256), repeat=8)]
    assert len({block_hashes(root_hash(), prompt, 8)[0] for prompt in prompts}) == len(prompts)
