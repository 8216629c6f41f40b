"""Bad words as token sequences that must not be generated.

A word can be spelled in many ways from tokens: with and without a space before it, as one token or as several. The
usual spellings (what the tokenizer gives for "word" and " word") always go in; other ways to cut the same bytes into
tokens are added as far as `MAX_SPELLINGS` allows, since a model that may not say " Paris" is tempted by " Par" + "is".
"""

from __future__ import annotations

from typing import Protocol

from enginecore.frontend.detokenizer import TokenTable

#: How many spellings of one word are banned at most.
MAX_SPELLINGS = 16


class Encoder(Protocol):
    vocab_size: int

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


def banned_sequences(tokenizer: Encoder, table: TokenTable, words: list[str]) -> list[list[int]]:
    """Token sequences for all words, without duplicates."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()):
            canonical = tokenizer.encode(text, add_special_tokens=False)
            found[tuple(canonical)] = None
            target = b"".join(map(table.raw, canonical))
            for spelling in table.spellings(target, MAX_SPELLINGS):
                found[spelling] = None
    found.pop((), None)
    return [list(ids) for ids in found]
