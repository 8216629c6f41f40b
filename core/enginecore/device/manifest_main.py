"""The child process that reads manifests: `python -m enginecore.device.manifest_main`, the task as JSON on stdin.

One line of JSON for each plugin, in order, on what was stdout when the process began. File descriptor 1 then points to
stderr, so that a plugin may print what it likes. Whatever kills this process is told by `discovery.py`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from dataclasses import asdict
from enum import Enum

from enginecore.device.discovery import InstalledPlugin
from enginecore.device.loading import inspect


def main() -> None:
    answer_fd = os.dup(1)
    os.dup2(2, 1)
    task = json.load(sys.stdin)
    faulthandler.enable()
    # Shows where a hanging plugin hangs: the traceback is in stderr by the time the parent gives up.
    faulthandler.dump_traceback_later(task["timeout_s"] * 0.9, exit=False)
    for identity in task["plugins"]:
        plugin = inspect(InstalledPlugin(**identity))
        answer = {
            "manifest": asdict(plugin.manifest) if plugin.manifest else None,
            "fault": asdict(plugin.fault) if plugin.fault else None,
        }
        data = json.dumps(answer, default=_plain).encode() + b"\n"
        while data:
            data = data[os.write(answer_fd, data) :]
    os.close(answer_fd)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else repr(value)


if __name__ == "__main__":
    main()
