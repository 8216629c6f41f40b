"""Tokenizers from GGUF metadata and from tokenizer.json, against transformers' own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from enginecore.errors import ModelError
from enginecore.frontend.gguf_tokenizer import byte_alphabet
from enginecore.frontend.tokenizer import Tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

TEXTS = [
    "Hello, world!",
    "",
    " ",
    "  lead and trail  ",
    "can't I'll we've THEY'D don’t",
    "naïve café, ÆØÅ, ß, ﬁ",
    "漢字かな交じり文、한국어, 中文。",
    "العربية עברית हिन्दी ไทย",
    "🙂👩‍👩‍👧 🏳️‍🌈 e\u0301 \u200b\ufeff",
    "tabs\tand\n\nnewlines\r\n  \n end",
    "\x00\x07\x7f\x85\xa0\xad",
    "def f(x):\n    return {'a': x ** 2}\n",
    "http://example.com/a?b=c&d=%20#e",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><|im_start",
    "<repo_name>x<file_sep>y<jupyter_code>",
]
NUMBERS = ["1234567", "a  12", "3.14e-10", "x\t\t9", "\n\n 7", "½ ² Ⅷ ١٢٣ १२३", "  2024-01-31T00:00"]


#: Bytes that SmolLM2's vocabulary has no token for.
MISSING_BYTES = frozenset(
    {
        0x4,
        0x6,
        0x13,
        0x14,
        0x16,
        0x1D,
        0xC0,
        0xC1,
        0xF1,
        0xF2,
        0xF5,
        0xF6,
        0xF7,
        0xF8,
        0xF9,
        0xFA,
        0xFB,
        0xFC,
        0xFD,
        0xFE,
        0xFF,
    }
)


@pytest.fixture(scope="module")
def tokenizer(smollm2: str) -> Tokenizer:
    return Tokenizer.load(smollm2)


@pytest.fixture(scope="module")
def oracle(smollm2: str) -> Any:
    """transformers' reading of the same file. It does not know the split type "smollm", which takes single digits off
    before all else (the vocabulary has no token with two digits), so that one step is put in here."""
    from transformers import AutoTokenizer

    folder, name = os.path.split(smollm2)
    made = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    made.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Digits(individual_digits=True), made.backend_tokenizer.pre_tokenizer]
    )
    return made


pytestmark = pytest.mark.model


@pytest.mark.parametrize("text", TEXTS + NUMBERS)
def test_ids_equal_transformers(text: str, tokenizer: Tokenizer, oracle: Any) -> None:
    ids = tokenizer.encode(text)
    assert ids == oracle.encode(text)
    assert b"".join(tokenizer.token_bytes(token) for token in ids) == text.encode()
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


@given(text=st.text(max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_goes_there_and_back(text: str, tokenizer: Tokenizer, oracle: Any) -> None:
    ids = tokenizer.encode(text)
    assert ids == oracle.encode(text)
    # The vocabulary lacks a few bytes (0x16, and those of unassigned planes), which the library then drops.
    known = b"".join(bytes([byte]) for byte in text.encode() if byte not in MISSING_BYTES)
    assert b"".join(tokenizer.token_bytes(token) for token in ids) == known


def test_facts_of_the_real_model(tokenizer: Tokenizer, oracle: Any) -> None:
    assert tokenizer.vocab_size == len(oracle) == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.eos_token_ids) == (1, 2, [2])
    assert not tokenizer.add_bos
    assert tokenizer.special_token_ids == frozenset(range(17))
    assert tokenizer.special_tokens["eos_token"] == "<|im_end|>"
    assert tokenizer.chat_template == oracle.chat_template
    assert tokenizer.token_text(2) == "<|im_end|>"


def test_reference_prompts(tokenizer: Tokenizer, greedy_reference: list[dict[str, Any]]) -> None:
    for case in greedy_reference:
        ids = case["prompt_token_ids"]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if case["kind"] == "chat":
            assert tokenizer.encode(text) == ids
        assert b"".join(tokenizer.token_bytes(token) for token in ids).decode() == text


def test_every_token_has_bytes_and_ids_outside_have_none(tokenizer: Tokenizer) -> None:
    for token in range(tokenizer.vocab_size):
        assert tokenizer.token_bytes(token)
    for token in (-1, tokenizer.vocab_size, 2**31):
        with pytest.raises(IndexError):
            tokenizer.token_bytes(token)


def test_half_a_surrogate_pair_is_not_an_error(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude42")) == "🙂"


def test_threads_may_share_one(tokenizer: Tokenizer) -> None:
    texts = [text * 20 for text in TEXTS]
    expected = [tokenizer.encode(text) for text in texts]
    wrong: list[str] = []

    def work() -> None:
        for _ in range(5):
            for text, ids in zip(texts, expected, strict=True):
                if tokenizer.encode(text) != ids or tokenizer.decode(ids, skip_special_tokens=False) != text:
                    wrong.append(text)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_neither_torch_nor_transformers_is_imported(smollm2: str) -> None:
    code = (
        "import sys; from enginecore.frontend.tokenizer import Tokenizer; Tokenizer.load(sys.argv[1]).encode('x');"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code, smollm2], check=False).returncode == 0


# -- model directories --------------------------------------------------------------------------------------------


def byte_level_json(path: Path, *, bos: bool) -> None:
    """A tokenizer.json with the 256 bytes, one merge and three special tokens; `bos`: its template puts <s> first."""
    vocab = {token: index for index, token in enumerate([*byte_alphabet(), "he"])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("h", "e")]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>", "<|eot|>"])
    if bos:
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 257)]
        )
    made.enable_truncation(4)
    made.enable_padding(length=8)
    made.save(str(path / "tokenizer.json"))


def test_a_directory(tmp_path: Path) -> None:
    byte_level_json(tmp_path, bos=True)
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "plain"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 259]}))
    made = Tokenizer.load(str(tmp_path))
    assert made.encode("hello")[:2] == [257, 256]
    assert len(made.encode("hello", add_special_tokens=False)) == 4, "truncation and padding of the file are off"
    assert made.add_bos
    assert (made.bos_token_id, made.eos_token_id, made.eos_token_ids) == (257, 258, [258, 259])
    assert made.special_token_ids == {257, 258, 259}
    assert made.chat_template == "plain"
    assert made.vocab_size == 260
    assert made.decode(made.encode("hé")) == "hé"


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("stated", [True, False, None])
def test_add_bos_of_the_config_goes_before_the_template(template: bool, stated: bool | None, tmp_path: Path) -> None:
    byte_level_json(tmp_path, bos=template)
    config = {"bos_token": "<s>"} | ({} if stated is None else {"add_bos_token": stated})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    made = Tokenizer.load(str(tmp_path))
    assert made.add_bos == (template if stated is None else stated)
    assert (made.encode("a")[0] == 257) == made.add_bos
    assert len(made.encode("a")) == 1 + made.add_bos


def test_where_chat_templates_are_found(tmp_path: Path) -> None:
    byte_level_json(tmp_path, bos=False)
    assert Tokenizer.load(str(tmp_path)).chat_template is None
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert Tokenizer.load(str(tmp_path)).chat_template == "usual"
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert Tokenizer.load(str(tmp_path)).chat_template == "own file"


def test_eos_of_the_config_serves_when_there_is_no_generation_config(tmp_path: Path) -> None:
    byte_level_json(tmp_path, bos=False)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 258}))
    assert Tokenizer.load(str(tmp_path)).eos_token_ids == [258]


@pytest.mark.parametrize(("content", "message"), [(None, "has no tokenizer.json"), ("{}", "cannot be used")])
def test_directories_without_a_usable_tokenizer(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        Tokenizer.load(str(tmp_path))


# -- GGUF files of other kinds ------------------------------------------------------------------------------------


def write_vocabulary(path: Path, model: str, tokens: list[str], types: list[int], **extra: Any) -> str:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if "pre" in extra:
        writer.add_tokenizer_pre(extra["pre"])
    if "merges" in extra:
        writer.add_token_merges(extra["merges"])
    if "scores" in extra:
        writer.add_token_scores(extra["scores"])
    for key in ("bos", "eos", "eot"):
        if key in extra:
            writer.add_uint32(f"tokenizer.ggml.{key}_token_id", extra[key])
    if "add_bos" in extra:
        writer.add_add_bos_token(extra["add_bos"])
    writer.add_tensor("token_embd.weight", np.zeros((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def byte_level_gguf(path: Path, pre: str, **extra: Any) -> str:
    merges = ["h e", "l l", "1 2", "Ġ h", "12 3"]
    tokens = [*byte_alphabet(), *(merge.replace(" ", "") for merge in merges), "<s>", "</s>", "<|eot|>", "<think>"]
    types = [1] * (256 + len(merges)) + [3, 3, 3, 4]
    values = {"bos": 261, "eos": 262, "eot": 263, **extra}
    return write_vocabulary(path, "gpt2", tokens, types, pre=pre, merges=merges, **values)


@pytest.mark.parametrize("pre", ["gpt-2", "default", "llama-bpe", "qwen2", "tekken", "gpt-4o", "deepseek-r1-qwen"])
def test_split_types_equal_transformers(pre: str, tmp_path: Path) -> None:
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    path = byte_level_gguf(tmp_path / "x.gguf", pre)
    architecture, values, _ = get_gguf_tokenizer(path)
    oracle, _ = convert_gguf_tokenizer(architecture, values)
    made = Tokenizer.load(path)
    for text in [*TEXTS[:-2], *NUMBERS, "hello<think>12 123 1234", "HELLO's", "<s>he</s>"]:
        assert made.encode(text, add_special_tokens=False) == oracle.encode(text, add_special_tokens=False).ids, text


def test_end_of_turn_tokens_end_texts_too(tmp_path: Path) -> None:
    made = Tokenizer.load(byte_level_gguf(tmp_path / "x.gguf", "llama-bpe", add_bos=True))
    assert made.eos_token_ids == [262, 263]
    assert made.add_bos and made.encode("h") == [261, byte_alphabet_index("h")]
    assert made.special_token_ids == {261, 262, 263}
    assert made.token_bytes(264) == b"<think>"


def byte_alphabet_index(character: str) -> int:
    return list(byte_alphabet()).index(character)


def test_sentencepiece_vocabularies_equal_transformers(tmp_path: Path) -> None:
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    pieces = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁h", "▁hello", "▁he", "lo", "o▁", "w", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
    path = write_vocabulary(tmp_path / "x.gguf", "llama", tokens, types, scores=scores, bos=1, eos=2)
    architecture, values, _ = get_gguf_tokenizer(path)
    oracle, _ = convert_gguf_tokenizer(architecture, values)
    made = Tokenizer.load(path)
    assert made.add_bos
    for text in ["hello", " hello", "hello hello", "hello  wé 漢 <s> hello", ""]:
        ids = made.encode(text, add_special_tokens=False)
        assert ids == oracle.encode(text, add_special_tokens=False).ids, text
        assert made.decode(ids, skip_special_tokens=False) == oracle.decode(ids, skip_special_tokens=False)
    assert made.token_bytes(3 + 0xE6) == b"\xe6"
    assert made.token_bytes(259 + pieces.index("▁he")) == b" he"


@pytest.mark.parametrize(
    ("model", "pre", "merges", "message"),
    [
        ("gpt2", "chatglm-bpe", [], "pre-tokenizer 'chatglm-bpe'"),
        ("gpt2", "default", ["a a"], "merges does not fit the vocabulary"),
        ("gpt2", "default", ["a"], "merges does not fit the vocabulary"),
        ("llama", "default", [], "one score for each token"),
        ("bert", "default", [], "type 'bert'"),
    ],
)
def test_kinds_that_are_refused(model: str, pre: str, merges: list[str], message: str, tmp_path: Path) -> None:
    extra = {"merges": merges} if merges else {}
    path = write_vocabulary(tmp_path / "x.gguf", model, ["a"], [1], pre=pre, **extra)
    with pytest.raises(ModelError, match=message):
        Tokenizer.load(path)
