"""Whose account a request goes on, where several parties share an engine."""

from __future__ import annotations

from contextvars import ContextVar

#: The party that the running task works for; None where nothing is known of it, and then its cache salt stands for it.
current_tenant: ContextVar[str | None] = ContextVar("enginecore_tenant", default=None)
