"""Token ids to text, one token at a time.

A token is a string of bytes; characters may be spread over several tokens. The bytes go through an incremental UTF-8
decoder, which keeps the start of an unfinished character until the rest arrives: the concatenated stream is the
decoding of the concatenated bytes, whatever the steps were. Bytes that can never become a character turn into U+FFFD,
and so does an unfinished character at the very end (one U+FFFD for it, not one a byte).
"""

from __future__ import annotations

import codecs
from typing import Protocol

_new_decoder = codecs.getincrementaldecoder("utf-8")


class TokenSource(Protocol):
    """The part of a tokenizer that turning tokens into text needs."""

    vocab_size: int

    @property
    def special_token_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...


class TokenTable:
    """The bytes of every token, looked up once. Ids beyond the tokenizer's vocabulary (padding rows of a model) are
    empty."""

    def __init__(self, tokenizer: TokenSource) -> None:
        self.special = frozenset(tokenizer.special_token_ids)
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._longest: int | None = None
        self._ids: dict[bytes, int] | None = None

    def raw(self, token_id: int) -> bytes:
        """Raw UTF-8 bytes of a token, possibly a part of a character."""
        known = self._bytes.get(token_id)
        if known is None:
            try:
                known = self._tokenizer.token_bytes(token_id)
            except (IndexError, KeyError, ValueError, OverflowError):
                known = b""
            self._bytes[token_id] = known
        return known

    def text(self, token_id: int) -> str:
        """A token on its own, readable: parts of characters show as U+FFFD."""
        return self.raw(token_id).decode("utf-8", "replace")

    def longest(self) -> int:
        """The number of bytes of the longest token: no text of more than this times k bytes fits k tokens."""
        if self._longest is None:
            self._longest = max((len(self.raw(token)) for token in range(self._tokenizer.vocab_size)), default=1) or 1
        return self._longest

    def spellings(self, text: bytes, limit: int) -> list[tuple[int, ...]]:
        """Ways to write `text` as ordinary tokens, fewest tokens first, at most `limit`."""
        if self._ids is None:
            ids = (token for token in range(self._tokenizer.vocab_size) if token not in self.special)
            self._ids = {self.raw(token): token for token in ids}
        longest = self.longest()
        found: list[tuple[int, ...]] = []
        paths: list[tuple[int, tuple[int, ...]]] = [(0, ())]
        for start, tokens in paths:  # breadth first; grows while it is walked
            if start == len(text):
                found.append(tokens)
            if len(found) >= limit or len(paths) > 64 * limit:
                break
            for end in range(min(len(text), start + longest), start, -1):
                token = self._ids.get(text[start:end])
                if token is not None:
                    paths.append((end, (*tokens, token)))
        return found


class Detokenizer:
    """Incremental decoding of one sequence. Special tokens that are `shown` are not skipped."""

    __slots__ = ("_decode", "_skip", "_table")

    def __init__(
        self, table: TokenTable, *, skip_special_tokens: bool = True, shown: frozenset[int] = frozenset()
    ) -> None:
        self._table = table
        self._skip = table.special - shown if skip_special_tokens else frozenset()
        self._decode = _new_decoder("replace").decode

    def add(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is unfinished or for a skipped special token."""
        if token_id in self._skip:
            return ""
        return self._decode(self._table.raw(token_id))

    def finish(self) -> str:
        """What is left at the end: "" or one U+FFFD."""
        return self._decode(b"", True)


def token_pieces(table: TokenTable, token_ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    """The text that each token adds; joined, they are the text of all tokens. A leftover goes to the last one."""
    detokenizer = Detokenizer(table, skip_special_tokens=skip_special_tokens)
    pieces = [detokenizer.add(token) for token in token_ids]
    if pieces:
        pieces[-1] += detokenizer.finish()
    return pieces
