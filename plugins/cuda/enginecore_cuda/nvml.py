"""What this process holds of a GPU, as the driver's management library counts it; it comes with the driver."""

from __future__ import annotations

import ctypes
import os
from typing import Any

LIBRARY = "libnvidia-ml.so.1"

#: nvmlReturn_t and the value of a figure that the driver does not have (nvml.h).
_SUCCESS, _TOO_SMALL, _NOT_AVAILABLE = 0, 7, 2**64 - 1


class _ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_v2_t."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class ProcessBooks:
    """Opens the library once. `uuid` is the device's, with or without "GPU-" or "MIG-" before it."""

    def __init__(self, uuid: str, library: Any = None) -> None:
        self._library, self._handle = library, ctypes.c_void_p()
        try:
            if self._library is None:
                self._library = ctypes.CDLL(LIBRARY)
            opened = self._library.nvmlInit_v2() == _SUCCESS and self._find(uuid)
        except (OSError, AttributeError):
            opened = False
        if not opened:
            self._library = None

    def _find(self, uuid: str) -> bool:
        bare = uuid.removeprefix("GPU-").removeprefix("MIG-")
        return any(
            self._library.nvmlDeviceGetHandleByUUID(f"{kind}-{bare}".encode(), ctypes.byref(self._handle)) == _SUCCESS
            for kind in ("GPU", "MIG")
        )

    def bytes_of(self, pid: int | None = None) -> int | None:
        """Bytes that a process (this one) holds; None when the driver does not say, as in a container that has process
        numbers of its own."""
        if self._library is None:
            return None
        pid = os.getpid() if pid is None else pid
        count = ctypes.c_uint(64)
        infos = (_ProcessInfo * count.value)()
        ask = self._library.nvmlDeviceGetComputeRunningProcesses_v3
        status = ask(self._handle, ctypes.byref(count), infos)
        if status == _TOO_SMALL:
            infos = (_ProcessInfo * count.value)()
            status = ask(self._handle, ctypes.byref(count), infos)
        if status != _SUCCESS:
            return None
        mine = [info.used_bytes for info in infos[: count.value] if info.pid == pid]
        return sum(mine) if mine and _NOT_AVAILABLE not in mine else None
