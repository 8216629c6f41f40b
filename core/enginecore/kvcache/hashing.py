"""The identity of a block: a sha256 chain over what its keys and values depend on.

    root  = sha256("enginecore kv 1" + framed extra keys)
    block = sha256(parent + number of tokens (u32) + token ids (u32 each))

Two blocks share an identity only when every token before and in them agrees and the request's extra keys agree. Extra
keys are typed and framed (kind, length, value), so no cache salt can equal an adapter's key and nothing unsalted ever
meets anything salted. sha256 because a collision would show one user another's text.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array

_MAGIC = b"enginecore kv 1"
_U32 = "I" if array("I").itemsize == 4 else "L"


def root_hash(cache_salt: str | None = None, adapter: tuple[str, int] | None = None) -> bytes:
    """The parent of a request's first block. `adapter` is (name, load generation)."""
    digest = hashlib.sha256(_MAGIC)
    if cache_salt is not None:
        value = cache_salt.encode("utf-8", "surrogatepass")
        digest.update(b"salt" + struct.pack("<Q", len(value)) + value)
    if adapter is not None:
        value = adapter[0].encode("utf-8", "surrogatepass")
        digest.update(b"lora" + struct.pack("<Qq", len(value), adapter[1]) + value)
    return digest.digest()


def token_bytes(token_ids: list[int]) -> bytes:
    """Token ids as 32-bit numbers in a row, the least significant byte first."""
    ids = array(_U32, token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def block_hashes(parent: bytes, token_ids: list[int], block_size: int) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, the first of which follows the block (or root) `parent`.

    Raises OverflowError for an id that is not an unsigned 32-bit number.
    """
    full = len(token_ids) // block_size
    if not full:
        return []
    data = token_bytes(token_ids[: full * block_size])
    frame = struct.pack("<I", block_size)
    step = 4 * block_size
    hashes = []
    for start in range(0, full * step, step):
        parent = hashlib.sha256(parent + frame + data[start : start + step]).digest()
        hashes.append(parent)
    return hashes
