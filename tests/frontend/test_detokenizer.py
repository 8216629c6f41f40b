from __future__ import annotations

from enginecore.frontend.detokenizer import Detokenizer, TokenTable, token_pieces
from hypothesis import given
from hypothesis import strategies as st

from tests.frontend.toy import EOS, ToyTokenizer

TOKENIZER = ToyTokenizer()
TABLE = TokenTable(TOKENIZER)


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=60), st.booleans())
def test_stream_equals_whole(ids: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(TABLE, skip_special_tokens=skip)
    text = "".join(map(detokenizer.add, ids)) + detokenizer.finish()
    assert text == TOKENIZER.decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=30))
def test_valid_text_never_shows_replacement_characters(text: str) -> None:
    detokenizer = Detokenizer(TABLE)
    shown = [detokenizer.add(byte) for byte in text.encode()]
    assert "".join(shown) == text and detokenizer.finish() == ""
    assert "".join(token_pieces(TABLE, list(text.encode()))) == text


def test_unfinished_character_is_held_back_then_becomes_one_replacement() -> None:
    detokenizer = Detokenizer(TABLE)
    assert [detokenizer.add(byte) for byte in "a😀".encode()[:4]] == ["a", "", "", ""]
    assert detokenizer.finish() == "�"


def test_special_tokens_between_the_bytes_of_a_character_are_skipped() -> None:
    first, *rest = "é".encode()
    detokenizer = Detokenizer(TABLE)
    assert [detokenizer.add(token) for token in (first, EOS, *rest)] == ["", "", "é"]
    assert Detokenizer(TABLE, skip_special_tokens=False).add(EOS) == "<|end|>"


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    assert Detokenizer(TABLE).add(10**6) == "" and TABLE.text(10**6) == ""


def test_longest_token() -> None:
    assert TABLE.longest() == len("<|start|>")


def test_spellings_are_all_ways_to_write_a_word() -> None:
    found = TABLE.spellings(b"abc", 100)
    written = {tuple(TABLE.raw(token) for token in ids) for ids in found}
    assert written == {(b"abc",), (b"ab", b"c"), (b"a", b"bc"), (b"a", b"b", b"c")}
    assert len(found[0]) == 1 and TABLE.spellings(b"abc", 2) == found[:2]
