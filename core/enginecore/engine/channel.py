"""What goes over the socket pair between the frontend and the engine process: one type byte, then msgpack.

to the engine     A EngineRequest    X (reason, [request ids])   C (call id, method, [arguments])    Q (stop)
to the frontend   R ReadyInfo        F Failure         O StepOutputs     V (call id, value, error)
"""

from __future__ import annotations

from typing import Any

import msgspec

from enginecore.config import EngineArgs, ReadyInfo
from enginecore.request import EngineRequest, StepOutputs

ADD, ABORT, CALL, QUIT = b"A", b"X", b"C", b"Q"
READY, FAILURE, OUTPUTS, VALUE = b"R", b"F", b"O", b"V"


class Failure(msgspec.Struct):
    """Why the engine process ends: `kind` is the class of enginecore.errors, `fix` what to type."""

    kind: str
    message: str
    fix: str | None = None
    exit_code: int = 1
    traceback: str = ""
    param: str | None = None
    reasons: tuple[str, ...] = ()


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_args = msgspec.json.Decoder(EngineArgs).decode
decode_request = msgspec.msgpack.Decoder(EngineRequest).decode
decode_abort = msgspec.msgpack.Decoder(tuple[str, list[str]]).decode
decode_call = msgspec.msgpack.Decoder(tuple[int, str, list[Any]]).decode
decode_ready = msgspec.msgpack.Decoder(ReadyInfo).decode
decode_failure = msgspec.msgpack.Decoder(Failure).decode
decode_outputs = msgspec.msgpack.Decoder(StepOutputs).decode
decode_value = msgspec.msgpack.Decoder(tuple[int, Any, str | None]).decode
