"""API keys: who calls, whether they may, and how much they may.

A key is compared with every known one in constant time, as hashes, so that neither its length nor where it differs
shows in the time. What a key may do is held by its name; two keys of one name are one client (which is how a key is
changed without a gap).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from enginecore.errors import ParameterError
from enginecore.frontend.outputs import RequestOutput
from enginecore.request import SamplingParams
from enginecore.server.args import ServerArgs
from enginecore.server.errors import ApiError
from enginecore.server.tracing import RequestSpan

_NAMED = re.compile(r"([A-Za-z0-9_.@-]{1,64}):(\S+)")
_OPTION = re.compile(r"(requests-per-minute|tokens-per-minute|concurrency)=(\d{1,12})")

Clock = Callable[[], float]


class Limits(msgspec.Struct, frozen=True):
    """What a client may do; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None


class Bucket:
    """A minute's allowance that fills up evenly. It may be overdrawn, and is then closed until that is made good."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self._size = float(per_minute)
        self._level = float(per_minute)
        self._clock = clock
        self._stamp = clock()

    def wait(self, amount: float) -> float:
        """Seconds until `amount` is there; 0 when it is."""
        now = self._clock()
        self._level = min(self._size, self._level + (now - self._stamp) * self._size / 60)
        self._stamp = now
        missing = amount - self._level
        return 0.0 if missing <= 0 else missing * 60 / self._size

    def spend(self, amount: float) -> None:
        self._level -= amount


class Client:
    """One name with its limits and what it has used of them."""

    def __init__(self, name: str, limits: Limits, *, admin: bool = False, clock: Clock = time.monotonic) -> None:
        self.name, self.limits, self.admin = name, limits, admin
        self.in_flight = 0
        self._requests = Bucket(limits.requests_per_minute, clock) if limits.requests_per_minute else None
        self._tokens = Bucket(limits.tokens_per_minute, clock) if limits.tokens_per_minute else None

    @contextlib.contextmanager
    def admit(self) -> Iterator[None]:
        """Let a request in and hold its place while it runs; ApiError 429 with Retry-After when there is none."""
        limits = self.limits
        if limits.concurrency and self.in_flight >= limits.concurrency:
            raise _too_many(f"{limits.concurrency} requests of this key are in flight, its limit", 1)
        if self._tokens is not None and (wait := self._tokens.wait(1)):
            raise _too_many(f"this key has used its {limits.tokens_per_minute} tokens a minute", wait)
        if self._requests is not None:
            if wait := self._requests.wait(1):
                raise _too_many(f"this key has made its {limits.requests_per_minute} requests a minute", wait)
            self._requests.spend(1)
        with self.hold():
            yield

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Count as in flight."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def charge(self, tokens: int) -> None:
        """Tokens that were read or written for this client."""
        if self._tokens is not None:
            self._tokens.spend(tokens)


def _too_many(message: str, wait: float) -> ApiError:
    seconds = str(max(1, math.ceil(wait)))
    return ApiError(
        429, f"{message}; try again in {seconds} s", code="rate_limit_exceeded", headers={"Retry-After": seconds}
    )


class Tally:
    """Tokens of one HTTP request, charged to its client as they come."""

    __slots__ = ("_client", "_seen", "generated", "prompt", "span")

    def __init__(self, client: Client | None) -> None:
        self._client = client
        self._seen: dict[int, int] = {}
        self.prompt = self.generated = 0
        #: Where the request is traced, its span.
        self.span: RequestSpan | None = None

    def asked(self, params: SamplingParams, model: str) -> None:
        """How the tokens are to be made, and by what."""
        if self.span is not None:
            self.span.asked(params, model)

    def update(self, key: int, output: RequestOutput) -> None:
        """The newest figures of prompt number `key` (they are totals, not deltas)."""
        before = self._seen.get(key)
        self._seen[key] = output.num_generated_tokens
        fresh = output.num_generated_tokens - (before or 0)
        self.generated += fresh
        if before is None:
            self.prompt += len(output.prompt_token_ids)
            fresh += len(output.prompt_token_ids)
        if self._client is not None:
            self._client.charge(fresh)
        if self.span is not None:
            self.span.update(key, output)


class Keyring:
    """All keys of a server."""

    def __init__(self, args: ServerArgs, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        default = Limits(args.key_requests_per_minute, args.key_tokens_per_minute, args.key_concurrency)
        self._default = default
        self._clients: dict[str, Client] = {}
        self._keys: list[tuple[bytes, Client]] = []
        self._anonymous = Client("", default, clock=clock)
        for index, text in enumerate(args.api_keys):
            self._add(text, f"key{index + 1}", default, admin=False)
        for index, text in enumerate(args.admin_keys):
            self._add(text, f"admin{index + 1}", Limits(), admin=True)
        if args.api_key_file is not None:
            self._read(Path(args.api_key_file))
        self.has_admins = any(client.admin for _, client in self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def names(self) -> list[str]:
        return list(self._clients)

    def _add(self, text: str, name: str, limits: Limits, *, admin: bool) -> None:
        named = _NAMED.fullmatch(text)
        if named:
            name, text = named.groups()
        client = self._clients.setdefault(name, Client(name, limits, admin=admin, clock=self._clock))
        if client.limits != limits or client.admin != admin:
            raise ParameterError(f"the keys named {name!r} have different limits", param="api_keys")
        self._keys.append((hashlib.sha256(text.encode()).digest(), client))

    def _read(self, path: Path) -> None:
        """A file of `name:key` a line, perhaps with limits: requests-per-minute=, tokens-per-minute=, concurrency=, or
        the word admin. What stands behind # is a comment."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ParameterError(f"the key file cannot be read: {error}", param="api_key_file") from error
        for number, line in enumerate(lines, 1):
            key, *options = line.partition("#")[0].split() or [""]
            if not key:
                continue
            matches = [match for option in options if (match := _OPTION.fullmatch(option))]
            found = {match[1]: match[2] for match in matches}
            if not _NAMED.fullmatch(key) or len(matches) + options.count("admin") != len(options):
                told = f"line {number} of the key file must be name:key, then requests-per-minute=N and the like"
                raise ParameterError(told, param="api_key_file")
            values = {name.replace("-", "_"): int(value) for name, value in found.items()}
            self._add(key, "", msgspec.structs.replace(self._default, **values), admin="admin" in options)

    def find(self, headers: dict[bytes, bytes]) -> Client:
        """The client of a request's `Authorization: Bearer KEY` or `X-Api-Key`; ApiError 401."""
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        return self.find_key(token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b""))

    def find_key(self, given: bytes) -> Client:
        """The client of a key; ApiError 401. A server without keys has one client for all."""
        if not self._keys:
            return self._anonymous
        digest = hashlib.sha256(given).digest()
        found: Client | None = None
        for known, client in self._keys:  # to the end, whichever it is
            if hmac.compare_digest(digest, known):
                found = client
        if found is None:
            what = "a valid API key is needed" if given else "an API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, what, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return found
