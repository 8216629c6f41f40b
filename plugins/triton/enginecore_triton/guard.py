"""What happens when a kernel does not compile: the reference runs on the same device, once logged and always counted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from enginecore.errors import UnsupportedError
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

logger = logging.getLogger(__name__)

#: Errors of the compiler, and of a launch that the part is too small for. Nothing has run when they are raised.
COMPILE_ERRORS = (CompilationError, OutOfResources, PTXASError)


def is_compile_error(error: BaseException) -> bool:
    """Some passes of the compiler fail with a bare RuntimeError; faults of the device are RuntimeErrors too."""
    return isinstance(error, COMPILE_ERRORS) or (isinstance(error, RuntimeError) and "PassManager" in str(error))


def guarded(
    name: str, run: Callable[[], Any], instead: Callable[[], Any], fallbacks: dict[str, int], strict: bool
) -> Any:
    """`run()`, or `instead()` where the kernel does not compile; with `strict` that is an UnsupportedError."""
    try:
        return run()
    except Exception as error:
        if not is_compile_error(error):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        if strict:
            raise UnsupportedError(f"the kernel of {name!r} does not compile for this device: {reason}") from error
        if name not in fallbacks:
            logger.warning("%s runs as the torch reference: its kernel does not compile: %s", name, reason)
        fallbacks[name] = fallbacks.get(name, 0) + 1
    return instead()
