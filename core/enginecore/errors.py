"""Every error that a user of enginecore can meet, with the exit code the command line gives it.

An error message states what was wrong, with the value, and what to do about it. `param` names the field of the
request or the option that caused it, so that the HTTP layer can put it into the error envelope.
"""

from __future__ import annotations


class EngineCoreError(Exception):
    """Base class. `exit_code` is what the command line exits with; `fix` is what the user can type or change."""

    exit_code = 1

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message} ({self.fix})" if self.fix else self.message


class ParameterError(EngineCoreError, ValueError):
    """A request or option value that is refused; a ValueError too, as Python callers expect."""

    exit_code = 2

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, fix: str | None = None
    ) -> None:
        super().__init__(message, fix=fix)
        self.param = param
        self.code = code


class ModelError(EngineCoreError):
    """The model cannot be found or its files cannot be used: unknown name, truncated or corrupt file, no weights."""


class KVCacheTooSmall(EngineCoreError):
    """The cache cannot hold one sequence of `max_model_len` tokens."""


class EngineDeadError(EngineCoreError):
    """The engine process has ended; every request in flight gets this error."""


class QueueFullError(EngineCoreError):
    """The waiting queue has reached its limit. `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeviceError(EngineCoreError):
    """Base of the failures that concern a device plugin."""

    exit_code = 3


class BrokenPluginError(DeviceError):
    """A plugin raised, hung, crashed or contradicted itself."""

    exit_code = 3


class AmbiguousDeviceError(DeviceError):
    """More than one device fits what the user asked for, or two distributions claim one name."""

    exit_code = 4


class DriverMissingError(DeviceError):
    """The device or its driver is not on this machine."""

    exit_code = 5


class WrongTorchBuildError(DeviceError):
    """The installed torch was built for another device; found before any native library is loaded."""

    exit_code = 6


class ContractMismatchError(DeviceError):
    """The plugin was built against another version of the plugin contract."""

    exit_code = 7


class UnsupportedError(DeviceError):
    """The device cannot run this model or feature; `reasons` holds all of them, found before weights are read."""

    exit_code = 8

    def __init__(self, message: str, *, reasons: tuple[str, ...] = (), fix: str | None = None) -> None:
        text = message if not reasons else message + ": " + "; ".join(reasons)
        super().__init__(text, fix=fix)
        self.reasons = reasons


class OutOfDeviceMemory(DeviceError):
    """A step or an allocation found the device's memory exhausted. It costs the requests of that step, not the
    engine."""


class RequestError(EngineCoreError):
    """The engine could not run one request, for instance because it needs more cache than there is. The others go
    on."""
