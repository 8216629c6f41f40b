"""The disk tier against everything that happens to files: half written, damaged, deleted, shared, too many, no room."""

from __future__ import annotations

import errno
import hashlib
import logging
import multiprocessing
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from enginecore.kvcache.disk import REFRESH_SECONDS, RETRY_SECONDS, DiskTier

SIZE = 1000
OVERHEAD = 80


def name(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def payload(number: int, size: int = SIZE) -> list[memoryview]:
    """Two buffers, as of two layers."""
    data = hashlib.shake_128(str(number).encode()).digest(size)
    return [memoryview(bytearray(data[: size // 3])), memoryview(bytearray(data[size // 3 :]))]


def empty(size: int = SIZE) -> list[memoryview]:
    return [memoryview(bytearray(size // 3)), memoryview(bytearray(size - size // 3))]


class Now:
    """A clock to be moved by hand."""

    value = 0.0

    def __call__(self) -> float:
        return self.value


def opened(folder: Path, limit: int = 10**6, model: str = "m", clock: Any = None) -> DiskTier:
    return DiskTier(folder, model, limit, clock or Now())


def holds(tier: DiskTier, number: int) -> bool:
    """Whether the tier gives the block's own bytes."""
    buffers = empty()
    if not tier.read_into(name(number), buffers):
        return False
    assert [bytes(part) for part in buffers] == [bytes(part) for part in payload(number)], "a wrong block"
    return True


def test_a_block_comes_back_also_after_a_restart(tmp_path: Path) -> None:
    tier = opened(tmp_path / "deep" / "folder")
    assert tier.write(name(1), payload(1)) and tier.has(name(1)) and holds(tier, 1)
    assert not tier.has(name(2)) and not holds(tier, 2)
    again = opened(tmp_path / "deep" / "folder")
    assert again.has(name(1)) and holds(again, 1) and again.num_blocks == 1
    assert again.num_bytes == tier.num_bytes == SIZE + OVERHEAD
    assert not opened(tmp_path / "deep" / "folder", model="other").has(name(1))


def test_files_are_their_owners_alone_and_nothing_unfinished_is_left(tmp_path: Path) -> None:
    tier = opened(tmp_path / "cache")
    tier.write(name(1), payload(1))
    assert stat.S_IMODE(tier.path(name(1)).stat().st_mode) == 0o600
    assert stat.S_IMODE(tier.path(name(1)).parent.stat().st_mode) == 0o700
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [tier.path(name(1)).name]


@pytest.mark.parametrize("at", [0, 7, 8, 39, 40, 47, 48, 79, 80, 500, SIZE + OVERHEAD - 1])
def test_every_damaged_byte_is_a_warning_and_a_miss(tmp_path: Path, at: int, caplog: pytest.LogCaptureFixture) -> None:
    tier = opened(tmp_path)
    tier.write(name(1), payload(1))
    data = bytearray(tier.path(name(1)).read_bytes())
    data[at] ^= 1
    tier.path(name(1)).write_bytes(data)
    with caplog.at_level(logging.WARNING, "enginecore"):
        assert not holds(tier, 1)
    assert "computed again" in caplog.text and tier.damaged == 1
    assert not tier.has(name(1)) and not tier.path(name(1)).exists(), "it is not tried twice"
    assert tier.write(name(1), payload(1)) and holds(tier, 1)


@pytest.mark.parametrize("length", [0, 1, 79, 80, 81, SIZE + OVERHEAD - 1, SIZE + OVERHEAD + 1])
def test_every_wrong_length_is_a_miss(tmp_path: Path, length: int) -> None:
    tier = opened(tmp_path)
    tier.write(name(1), payload(1))
    whole = tier.path(name(1)).read_bytes()
    tier.path(name(1)).write_bytes((whole + b"x")[:length])
    assert not holds(tier, 1) and tier.damaged == 1


def test_another_blocks_whole_file_under_this_name_is_a_miss(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    tier.write(name(1), payload(1))
    tier.write(name(2), payload(2))
    os.replace(tier.path(name(2)), tier.path(name(1)))
    assert not holds(tier, 1) and not holds(tier, 2)


def test_deleted_files_and_folders_are_misses(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    for number in (1, 2):
        tier.write(name(number), payload(number))
    tier.path(name(1)).unlink()
    assert not holds(tier, 1) and tier.damaged == 0 and not tier.has(name(1))
    for path in sorted(tmp_path.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    assert not holds(tier, 2)
    assert not tier.write(name(3), payload(3)), "the folder is gone: the tier is off for now"
    assert not tier.writable


def test_a_folder_in_the_place_of_a_file_is_a_miss(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    tier.path(name(1)).mkdir(parents=True)
    assert not holds(tier, 1) and not tier.write(name(1), payload(1))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_no_room_is_one_warning_and_the_tier_off_for_a_while(
    tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = Now()
    tier = opened(tmp_path, clock=now)
    tier.write(name(0), payload(0))

    def fail(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "enginecore"):
        patch.setattr(os, "writev", fail)
        for number in range(1, 4):
            now.value += RETRY_SECONDS
            assert tier.writable and not tier.write(name(number), payload(number)) and not tier.writable
    assert len(caplog.records) == 1 and str(tmp_path) in caplog.text
    assert holds(tier, 0), "what is there can be read"
    assert not tier.write(name(1), payload(1)), "still off"
    now.value += RETRY_SECONDS
    assert tier.write(name(1), payload(1)) and holds(tier, 1)
    assert not list(tmp_path.rglob(".tmp-*"))


def test_writes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may take and give fewer bytes than it is asked to."""
    writev, readv = os.writev, os.readv
    monkeypatch.setattr(os, "writev", lambda file, parts: writev(file, [parts[0][:7]]))
    monkeypatch.setattr(os, "readv", lambda file, parts: readv(file, [parts[0][:11]]))
    tier = opened(tmp_path)
    assert tier.write(name(1), payload(1)) and holds(tier, 1)


@pytest.mark.parametrize("place", ["a file", "below a file"])
def test_a_folder_that_cannot_be(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError):
        opened(tmp_path / "file" if place == "a file" else tmp_path / "file" / "sub")


def test_the_limit_deletes_what_was_used_least_recently(tmp_path: Path) -> None:
    tier = opened(tmp_path, limit=10 * (SIZE + OVERHEAD))
    other = opened(tmp_path, limit=10 * (SIZE + OVERHEAD), model="other")
    other.write(name(99), payload(99))
    os.utime(other.path(name(99)), (50, 50))
    for number in range(9):
        tier.write(name(number), payload(number))
        os.utime(tier.path(name(number)), (100 + number, 100 + number))
    assert holds(tier, 0), "now the newest"
    assert tier.write(name(9), payload(9)) and tier.write(name(10), payload(10))
    assert not holds(other, 99), "the limit is of the whole folder"
    assert not tier.has(name(1)) and holds(tier, 0) and holds(tier, 10)
    assert tier.num_bytes <= tier.limit and tier.deleted == 3
    assert tier.num_bytes == sum(path.stat().st_size for path in tmp_path.rglob("*.kv"))
    assert not opened(tmp_path / "small", limit=SIZE).write(name(1), payload(1)), "larger than the limit"


def test_two_processes_see_each_other(tmp_path: Path) -> None:
    now = Now()
    first, second = opened(tmp_path, clock=now), opened(tmp_path)
    second.write(name(1), payload(1))
    first.refresh()
    assert not first.has(name(1)), "not looked for yet"
    now.value += REFRESH_SECONDS
    first.refresh()
    assert first.has(name(1)) and holds(first, 1)
    second.path(name(1)).unlink()
    now.value += REFRESH_SECONDS
    first.refresh()
    assert not first.has(name(1))


def _hammer(folder: str, seed: int) -> None:
    tier = DiskTier(folder, "m", 12 * (SIZE + OVERHEAD))
    for step in range(150):
        number = (step * 7 + seed) % 20
        if not holds(tier, number):
            tier.write(name(number), payload(number))
        if step % 40 == 39:
            tier.scan()
    os._exit(tier.damaged)


def test_processes_that_write_delete_and_read_the_same_blocks(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_hammer, args=(str(tmp_path), seed)) for seed in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    last = opened(tmp_path)
    assert last.num_blocks > 0 and not list(tmp_path.rglob(".tmp-*"))
    assert all(holds(last, number) for number in range(20) if last.has(name(number)))


def test_unfinished_files_of_the_dead_are_removed_when_they_are_old(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    tier.write(name(1), payload(1))
    old, young = (tier.path(name(1)).parent / f".tmp-{kind}" for kind in ("old", "young"))
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    opened(tmp_path)
    assert not old.exists() and young.exists()


def test_strange_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "m" / "zz").mkdir(parents=True)
    (tmp_path / "m" / "00").mkdir()
    for strange in ("zz/abc.kv", "00/notes.txt", "00/xyz.kv", "notes"):
        (tmp_path / "m" / strange).write_text("mine")
    tier = opened(tmp_path)
    assert tier.num_blocks == 0 and tier.write(name(1), payload(1))
    assert (tmp_path / "m" / "00/notes.txt").exists()


def test_clearing_forgets_this_model_only(tmp_path: Path) -> None:
    tier, other = opened(tmp_path), opened(tmp_path, model="other")
    for each in (tier, other):
        each.write(name(1), payload(1))
    assert tier.clear() == 1 and not tier.has(name(1)) and not holds(tier, 1)
    assert holds(other, 1) and tier.write(name(1), payload(1)) and holds(tier, 1)
