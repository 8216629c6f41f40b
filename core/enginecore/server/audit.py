"""The audit log: one JSON line for each request, without the text of prompts and answers unless that is asked for."""

from __future__ import annotations

import logging
import time
from typing import Any

import msgspec

from enginecore.errors import ParameterError

logger = logging.getLogger("enginecore.server")

#: Of a body that is logged, no more than this.
MAX_BODY_BYTES = 64 * 2**10


class AuditLog:
    """Appends to a file. `with_bodies` adds the bodies of requests, up to MAX_BODY_BYTES of each."""

    def __init__(self, path: str, *, with_bodies: bool = False) -> None:
        self.with_bodies = with_bodies
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - open as long as the server runs
        except OSError as error:
            raise ParameterError(f"the audit log cannot be written: {error}", param="audit_log") from error

    def write(self, record: dict[str, Any], body: bytes = b"") -> None:
        """One write, so that lines of several processes do not mix."""
        record = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **record}
        if self.with_bodies:
            record["body"] = body[:MAX_BODY_BYTES].decode("utf-8", "replace")
        try:
            self._file.write(msgspec.json.encode(record) + b"\n")
        except OSError as error:  # a full disk, for instance: requests go on
            logger.error("the audit log cannot be written: %s; lost: %s", error, record["request_id"])

    def close(self) -> None:
        self._file.close()
