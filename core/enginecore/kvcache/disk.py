"""The disk tier: one file a block, named by the block's identity.

    DIR/<model identity>/<first two digits>/<block hash>.kv

    magic (8) | block hash (32) | payload bytes (8, little endian) | sha256 of hash and payload (32) | payload

A file is written beside its place and renamed into it, so that what has its final name was complete when it was named.
Nothing is flushed to the medium on purpose: what a power cut leaves half written fails its checksum, and a file that
fails it, is too short or is gone is a warning and a miss. Several processes may share a folder: names are contents, so
two that write the same block write the same bytes, and whoever finds a file deleted by another has a miss. Each of them
keeps the whole folder below the size limit, deleting what was used least recently by the files' times.

The engine's thread asks `has` only, which looks into memory; everything else is called from one thread of its own.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

logger = logging.getLogger("enginecore.kvcache")

_MAGIC = b"ECKV0001"
_HEADER = struct.Struct("<8s32sQ32s")
#: After a failed write the tier takes no blocks for so long.
RETRY_SECONDS = 60.0
#: What other processes have added is looked for this often.
REFRESH_SECONDS = 5.0
#: The size of the whole folder is counted anew this often.
COUNT_SECONDS = 60.0
#: Unfinished files of processes that have ended are removed after this time.
STALE_SECONDS = 3600.0
#: Share of the size limit that is left after old files were deleted, so that it is not done for every file.
LOW_WATER = 0.9

#: Buffers of one call to the system (Linux takes 1024).
_MAX_PARTS = 512

Buffer = memoryview


class DiskTier:
    """`folder` is made if need be; `model` keeps apart what must not meet; `limit` is in bytes of the whole folder.

    Raises OSError when the folder cannot be made, read or written.
    """

    def __init__(self, folder: str | Path, model: str, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.root = Path(folder)
        self.folder = self.root / model
        self.limit = limit
        self.num_bytes = 0
        self.written = self.read = self.deleted = self.damaged = self.failed_writes = 0
        self._clock = clock
        #: Bytes of each file, by the first byte of its block's hash, as the folders are.
        self._known: list[dict[bytes, int]] = [{} for _ in range(256)]
        self._seen: dict[str, int] = {}
        self._closed_until = float("-inf")
        self._warned = False
        self._refreshed = self._counted = float("-inf")
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".probe-"):
            pass  # a folder that cannot be written is found out now
        self._remove_stale()
        self.scan()

    # ---- what is there -------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self._known))

    @property
    def writable(self) -> bool:
        """False for a while after a write has failed."""
        return self._clock() >= self._closed_until

    def has(self, block_hash: bytes) -> bool:
        """Whether a file of the block was there when last looked."""
        return block_hash in self._known[block_hash[0]]

    def path(self, block_hash: bytes) -> Path:
        name = block_hash.hex()
        return self.folder / name[:2] / f"{name}.kv"

    def scan(self) -> None:
        """Take in the files that are there: all of this model's, and now and then the size of the whole folder. Folders
        whose time has not changed are not read again."""
        self._refreshed = self._clock()
        with contextlib.suppress(OSError, ValueError):
            for entry in os.scandir(self.folder):
                if entry.is_dir() and self._seen.get(entry.name) != (stamp := entry.stat().st_mtime_ns):
                    self._seen[entry.name] = stamp
                    self._scan_part(entry.path, int(entry.name, 16))
        if self._refreshed - self._counted >= COUNT_SECONDS:
            self._counted = self._refreshed
            self.num_bytes = sum(size for _, size, _ in self._files())

    def _scan_part(self, path: str, first: int) -> None:
        found = {}
        for entry in os.scandir(path):
            if entry.name.endswith(".kv"):
                with contextlib.suppress(ValueError, OSError):
                    found[bytes.fromhex(entry.name[:-3])] = entry.stat().st_size
        self._known[first] = found

    def refresh(self) -> None:
        """`scan`, when the last one was long enough ago."""
        if self._clock() - self._refreshed >= REFRESH_SECONDS:
            self.scan()

    def _files(self) -> list[tuple[float, int, str]]:
        """(time of last use, bytes, path) of every block's file of every model."""
        found = []
        for path in self.root.glob("*/*/*.kv"):
            with contextlib.suppress(OSError):
                stat = path.stat()
                found.append((stat.st_mtime, stat.st_size, str(path)))
        return found

    def _remove_stale(self) -> None:
        for path in self.root.glob("*/*/.tmp-*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()

    # ---- reading and writing -------------------------------------------------------------------------------------

    def write(self, block_hash: bytes, payload: Sequence[Buffer]) -> bool:
        """Store a block; False when it could not be. A full disk or a folder that has become read-only is warned about
        once, and nothing is written for a minute."""
        if not self.writable:
            return False
        path = self.path(block_hash)
        size = _HEADER.size + sum(part.nbytes for part in payload)
        if size > self.limit:
            return False
        try:
            if self.num_bytes + size > self.limit:
                self._make_room(size)
            path.parent.mkdir(exist_ok=True, mode=0o700)
            self._write_file(path, block_hash, payload)
        except OSError as error:
            self._write_failed(error)
            return False
        if not self.has(block_hash):
            self.num_bytes += size
        self._known[block_hash[0]][block_hash] = size
        self._warned = False
        self.written += 1
        return True

    def _write_file(self, path: Path, block_hash: bytes, payload: Sequence[Buffer]) -> None:
        digest = hashlib.sha256(block_hash)
        for part in payload:
            digest.update(part)
        length = sum(part.nbytes for part in payload)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".tmp-")
        try:
            with os.fdopen(handle, "wb", buffering=0) as file:
                _write_all(file.fileno(), [memoryview(_HEADER.pack(_MAGIC, block_hash, length, digest.digest()))])
                _write_all(file.fileno(), payload)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    def _write_failed(self, error: OSError) -> None:
        self.failed_writes += 1
        self._closed_until = self._clock() + RETRY_SECONDS
        if not self._warned:
            self._warned = True
            why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
            logger.warning("KV blocks cannot be written to %s: %s; the disk tier takes none for now", self.root, why)

    def read_into(self, block_hash: bytes, payload: Sequence[Buffer]) -> bool:
        """Fill the buffers with a block's bytes; False, whatever is in them then, when there is no whole file of it."""
        path, length = self.path(block_hash), sum(part.nbytes for part in payload)
        try:
            with open(path, "rb", buffering=0) as file:
                header = file.read(_HEADER.size)
                parts = list(payload)
                whole = len(header) == _HEADER.size and _read_all(file.fileno(), parts) == length and not file.read(1)
        except FileNotFoundError:
            self._forget(block_hash)
            return False
        except OSError as error:
            return self._is_damaged(block_hash, str(error))
        if not whole:
            return self._is_damaged(block_hash, "it has another size than it should")
        magic, name, stated, digest = _HEADER.unpack(header)
        if (magic, name, stated) != (_MAGIC, block_hash, length):
            return self._is_damaged(block_hash, "its header is not that of this block")
        told = hashlib.sha256(block_hash)
        for part in payload:
            told.update(part)
        if told.digest() != digest:
            return self._is_damaged(block_hash, "its checksum does not fit")
        with contextlib.suppress(OSError):
            os.utime(path)  # used now: whoever deletes old files sees it
        self.read += 1
        return True

    def _is_damaged(self, block_hash: bytes, why: str) -> bool:
        self.damaged += 1
        logger.warning("the KV block in %s cannot be used and is computed again: %s", self.path(block_hash), why)
        with contextlib.suppress(OSError):
            self.path(block_hash).unlink()
        self._forget(block_hash)
        return False

    def _forget(self, block_hash: bytes) -> None:
        self.num_bytes = max(0, self.num_bytes - self._known[block_hash[0]].pop(block_hash, 0))

    def _make_room(self, size: int) -> None:
        """Delete the least recently used files, of every model and process, until `size` more bytes fit well."""
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        target = max(0, int(self.limit * LOW_WATER) - size)
        for _, length, name in files:
            if total <= target:
                break
            with contextlib.suppress(OSError):
                os.unlink(name)
                self.deleted += 1
            total -= length
            path = Path(name)
            if path.parent.parent == self.folder:
                with contextlib.suppress(ValueError, IndexError):
                    block_hash = bytes.fromhex(path.stem)
                    self._known[block_hash[0]].pop(block_hash, None)
        self.num_bytes = total

    def clear(self) -> int:
        """Delete every block of this model; returns how many were known."""
        count = self.num_blocks
        self._known = [{} for _ in range(256)]
        self._seen.clear()
        for path in self.folder.glob("*/*.kv"):
            with contextlib.suppress(OSError):
                path.unlink()
        self.num_bytes = sum(size for _, size, _ in self._files())
        return count


def _write_all(file: int, parts: Sequence[Buffer]) -> None:
    rest = [part.cast("B") for part in parts]
    while rest:
        rest = _after(rest, os.writev(file, rest[:_MAX_PARTS]))


def _read_all(file: int, parts: Sequence[Buffer]) -> int:
    """Fill the buffers; bytes read, fewer than they hold where the file ends."""
    rest, total = [part.cast("B") for part in parts], 0
    while rest:
        count = os.readv(file, rest[:_MAX_PARTS])
        if not count:
            break
        total += count
        rest = _after(rest, count)
    return total


def _after(parts: list[Buffer], count: int) -> list[Buffer]:
    """What is left of the buffers after the first `count` bytes."""
    at = 0
    while at < len(parts) and count >= parts[at].nbytes:
        count -= parts[at].nbytes
        at += 1
    return [parts[at][count:], *parts[at + 1 :]] if at < len(parts) else []
