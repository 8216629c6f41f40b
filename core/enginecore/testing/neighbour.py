"""A second process on the same device: `python -m enginecore.testing.neighbour`, for cases about sharing one.

It makes a backend of its own, allocates and writes a cache, says what its books show, and holds it until its standard
input ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

SECONDS = 60


class Neighbour:
    """`size`: bytes of its cache; `grown`: by how much its own books grew; `usable`: its usable_bytes. Once entered."""

    def __init__(self, source: dict[str, Any], size: int) -> None:
        self._task = {"source": source, "size": size}
        self.size = self.grown = self.usable = 0

    def __enter__(self) -> Neighbour:
        # In the group of this process, so that it ends with it; what the plugin prints there goes to stderr.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "enginecore.testing.neighbour"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(self._task).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self.__exit__()
            raise AssertionError(f"a second process could not use the device: exit code {self._process.returncode}")
        told = json.loads(line)
        self.size, self.grown, self.usable = told["size"], told["grown"], told["usable"]
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def main() -> None:
    from enginecore.testing.cases.paged import Setting
    from enginecore.testing.source import BackendSource
    from enginecore.testing.support import baseline_query

    answer_fd = os.dup(1)
    os.dup2(2, 1)
    task = json.loads(sys.stdin.readline())
    backend, _, _ = BackendSource(**task["source"]).create()
    assert backend.attention is not None
    layout = backend.attention.kv_cache_layout(Setting.from_query(baseline_query(backend.capabilities)).spec())

    def hold(size: int) -> list[Any]:
        caches = backend.memory.allocate_kv(layout, max(1, size // layout.page_bytes), 1)
        for cache in caches:
            cache.zero_()
        backend.synchronize()
        return caches

    hold(1)  # whatever the first use of an allocator costs is paid before the books are read
    before = backend.memory.process_used_bytes()
    caches = hold(task["size"])
    told = {
        "size": sum(cache.nbytes for cache in caches),
        "grown": backend.memory.process_used_bytes() - before,
        "usable": backend.memory.memory_info().usable_bytes,
    }
    os.write(answer_fd, json.dumps(told).encode() + b"\n")
    sys.stdin.read()
    backend.memory.release_kv(caches)
    backend.shutdown()


if __name__ == "__main__":
    main()
