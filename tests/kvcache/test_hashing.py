"""Block identities: what must differ differs, what must agree agrees, in every process."""

from __future__ import annotations

import hashlib
import itertools
import struct
import subprocess
import sys
from typing import Any

import pytest
from enginecore.kvcache import block_hashes, root_hash
from hypothesis import given, settings
from hypothesis import strategies as st

SIZE = 16
ROOT = root_hash()


def chain(tokens: list[int], size: int = SIZE, root: bytes = ROOT) -> list[bytes]:
    return block_hashes(root, tokens, size)


def test_definition_by_hand() -> None:
    """The documented formula, written out a second time."""
    root = hashlib.sha256(b"enginecore kv 1").digest()
    assert root_hash() == root
    tokens = list(range(100, 140))
    first = hashlib.sha256(root + struct.pack("<17I", 16, *tokens[:16])).digest()
    second = hashlib.sha256(first + struct.pack("<17I", 16, *tokens[16:32])).digest()
    assert chain(tokens) == [first, second]


def test_the_same_in_every_process() -> None:
    """Fixed values: an index shared between processes or kept on disk depends on them."""
    assert chain(list(range(32)))[1].hex() == "73be05aae0e08b60ae294f87ff847f2e08162bcf4c3c675addea5bbbaaaa09f9"
    assert root_hash("s", ("a", 3)).hex() == "31f497af1f6a8bc9b9ba0e918ec388331bd2205bdf8c339aabda17923cff5ffa"
    code = "from enginecore.kvcache import *; print(block_hashes(root_hash('s'), list(range(32)), 16)[1].hex())"
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        )
        assert done.stdout.strip() == chain(list(range(32)), root=root_hash("s"))[1].hex()


def test_only_full_blocks_have_an_identity() -> None:
    tokens = list(range(50))
    assert [len(chain(tokens[:n])) for n in (0, 1, 15, 16, 17, 47, 48)] == [0, 0, 0, 1, 1, 2, 3]


def test_a_chain_can_be_continued() -> None:
    tokens = list(range(64))
    head = chain(tokens[:32])
    assert head + block_hashes(head[-1], tokens[32:], SIZE) == chain(tokens)


BASE = [7, 9, 40, 3, 12, 1, 23, 5, 6, 8, 2, 11, 13, 14, 15, 16]


def crafted() -> dict[str, tuple[list[int], list[int]]]:
    """Pairs that weak hashes (polynomials, decimal strings, Python's own hash) take for equal."""
    shifted = [BASE[0] + 31, BASE[1] - 1, *BASE[2:]]
    joined_a, joined_b = [1, 23, *BASE[2:]], [12, 3, *BASE[2:]]
    return {
        "polynomial of base 31": (BASE, shifted),
        "swapped neighbours": (BASE, [BASE[1], BASE[0], *BASE[2:]]),
        "swapped ends": (BASE, [BASE[-1], *BASE[1:-1], BASE[0]]),
        "1,23 and 12,3": (joined_a, joined_b),
        "byte order": ([1, *BASE[1:]], [1 << 24, *BASE[1:]]),
        "two bytes apart": ([256, 0, *BASE[2:]], [0, 1, *BASE[2:]]),
        "zeros": ([0] * 16, [0] * 15 + [1]),
    }


@pytest.mark.parametrize("pair", crafted())
def test_crafted_pairs_share_nothing(pair: str) -> None:
    a, b = crafted()[pair]
    tail = list(range(16))
    assert not set(chain(a + tail)) & set(chain(b + tail))


def test_ids_that_are_not_unsigned_32_bit_are_refused() -> None:
    """hash(-1) == hash(-2) in Python; here neither has an identity."""
    for bad in (-1, -2, 1 << 32):
        with pytest.raises(OverflowError):
            chain([bad, *BASE[1:]])
    assert chain([(1 << 32) - 1, *BASE[1:]]) != chain([0, *BASE[1:]])


def test_the_block_size_is_part_of_the_identity() -> None:
    tokens = list(range(32))
    assert not set(chain(tokens, 8)) & set(chain(tokens, 16))


def test_equal_blocks_after_different_prefixes_differ() -> None:
    same = list(range(16))
    assert chain(BASE + same)[1] != chain(BASE[::-1] + same)[1]
    assert chain(same + same)[0] != chain(same + same)[1]


EXTRAS: list[dict[str, Any]] = [
    {},
    {"cache_salt": ""},
    {"cache_salt": "a"},
    {"cache_salt": "b"},
    {"cache_salt": "s1"},
    {"cache_salt": "é"},
    {"cache_salt": "e\u0301"},
    {"cache_salt": "\ud800"},
    {"adapter": ("s1", 0)},
    {"adapter": ("s1", 1)},
    {"adapter": ("s1", -1)},
    {"adapter": ("", 0)},
    {"cache_salt": "a", "adapter": ("s1", 0)},
    {"cache_salt": "s1", "adapter": ("a", 0)},
    {"cache_salt": "alora" + struct.pack("<Qq", 2, 0).decode("latin-1") + "s1"},
    {"cache_salt": "lora"},
    {"adapter": ("salt", 0)},
]


def test_salts_and_adapters_never_meet() -> None:
    roots = [root_hash(**extra) for extra in EXTRAS]
    for (i, a), (j, b) in itertools.combinations(enumerate(roots), 2):
        assert a != b, (EXTRAS[i], EXTRAS[j])
        assert not set(chain(BASE * 4, root=a)) & set(chain(BASE * 4, root=b)), "every block is isolated, not the first"


@settings(max_examples=200, deadline=None)
@given(
    a=st.lists(st.integers(0, 3), max_size=40),
    b=st.lists(st.integers(0, 3), max_size=40),
    size=st.sampled_from([1, 2, 8]),
)
def test_equal_exactly_where_the_tokens_are(a: list[int], b: list[int], size: int) -> None:
    for i, (x, y) in enumerate(zip(chain(a, size), chain(b, size), strict=False)):
        assert (x == y) == (a[: (i + 1) * size] == b[: (i + 1) * size])


salt = st.none() | st.text(max_size=6)
adapter = st.none() | st.tuples(st.text(max_size=6), st.integers(-(2**63), 2**63 - 1))


@settings(max_examples=300, deadline=None)
@given(a=st.tuples(salt, adapter), b=st.tuples(salt, adapter))
def test_roots_are_equal_exactly_where_the_extra_keys_are(a: tuple[Any, ...], b: tuple[Any, ...]) -> None:
    assert (root_hash(*a) == root_hash(*b)) == (a == b)
