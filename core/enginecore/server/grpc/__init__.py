"""The gRPC interface (docs/grpc.md). grpcio is optional: only `server`, `calls` and `service` need it."""

from __future__ import annotations

import importlib.util

from enginecore.errors import EngineCoreError

#: What the extra `grpc` brings, as modules.
_NEEDED = ("grpc", "google.protobuf", "grpc_health", "grpc_reflection")


def check_installed() -> None:
    """EngineCoreError that names the extra when a package is missing."""
    for name in _NEEDED:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # of google.protobuf without google
            found = None
        if found is None:
            told = f"--grpc-port needs the Python package {name.replace('_', '.')}, which is not installed"
            raise EngineCoreError(told, fix="pip install 'enginecore[grpc]'")
