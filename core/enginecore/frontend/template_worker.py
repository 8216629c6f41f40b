"""A process that renders one chat template: `python -m enginecore.frontend.template_worker SECONDS BYTES`.

Frames on standard input and output: four bytes of length, then JSON. The first frame is the template's source, each
further one the variables of a render; every answer is [true, text] or [false, message]. A render that takes longer than
the limit ends the process, as does the end of standard input; memory is limited too.
"""

from __future__ import annotations

import contextlib
import json
import signal
import struct
import sys
from typing import Any, BinaryIO

from enginecore.errors import ParameterError
from enginecore.frontend.template import Template


def read_frame(stream: BinaryIO) -> Any:
    """The next value; EOFError at the end."""
    header = stream.read(4)
    if len(header) < 4:
        raise EOFError
    (length,) = struct.unpack(">I", header)
    body = stream.read(length)
    if len(body) < length:
        raise EOFError
    return json.loads(body)


def frame(value: Any) -> bytes:
    """A value with its length in front."""
    body = json.dumps(value).encode()
    return struct.pack(">I", len(body)) + body


def _limit_memory(num_bytes: int) -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def main() -> None:
    seconds, memory = int(sys.argv[1]), int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    _limit_memory(memory)
    incoming, outgoing = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(EOFError, BrokenPipeError):
        template = Template(read_frame(incoming))
        while True:
            variables = read_frame(incoming)
            signal.alarm(seconds + 1)  # should the parent be gone, nobody else ends an endless render
            try:
                answer = frame([True, template.render(variables)])
            except ParameterError as error:
                answer = frame([False, error.message[:2000]])
            except MemoryError:
                answer = frame([False, "the chat template needs too much memory"])
            signal.alarm(0)
            outgoing.write(answer)
            outgoing.flush()


if __name__ == "__main__":
    main()
