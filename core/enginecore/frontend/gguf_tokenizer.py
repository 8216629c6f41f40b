"""A tokenizer out of a GGUF file's metadata, built with the `tokenizers` library.

llama.cpp stores the vocabulary, the merges and a name ("pre") for how text is split before merging. Byte-level BPE
("gpt2") and sentencepiece BPE ("llama") vocabularies are covered; others are refused.
"""

from __future__ import annotations

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from enginecore.errors import ModelError
from enginecore.models.gguf_reader import GGUFFile

#: llama.cpp's token types.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

#: How a "pre" type splits text, as a regular expression. GPT-2's own split is used for the types in _GPT2_TYPES, and
#: after splitting off single digits for those in _DIGITS_TYPES.
_SPLITS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "dbrx", "smaug-bpe", "lfm2"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}
_GPT2_TYPES = {"default", "gpt-2", "gpt2", "olmo", "phi-2", "jina-es", "jina-de", "mpt", "jais", "trillion"}
_DIGITS_TYPES = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}


def byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones stand for themselves, the rest for characters from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spelled = {chr(byte): byte for byte in plain}
    others = (byte for byte in range(256) if byte not in set(plain))
    spelled.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return spelled


def build_tokenizer(file: GGUFFile) -> Tokenizer:
    """The tokenizer that `file` describes. Raises ModelError when it describes none that is known."""
    kind = file.get("tokenizer.ggml.model")
    tokens = file.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{file.path} has no vocabulary (tokenizer.ggml.tokens)")
    if kind == "gpt2":
        tokenizer = _byte_level(file, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(file, tokens)
    else:
        raise ModelError(f"{file.path}: tokenizers of type {kind!r} are not supported, only gpt2 and llama")
    _add_tokens(tokenizer, file, tokens, byte_level=kind == "gpt2")
    add_bos = file.get("tokenizer.ggml.add_bos_token", kind == "llama")
    add_eos = file.get("tokenizer.ggml.add_eos_token", False)
    wrap_text(
        tokenizer,
        _token(file, tokens, "bos") if add_bos else None,
        _token(file, tokens, "eos") if add_eos else None,
    )
    return tokenizer


def named_tokens(file: GGUFFile) -> dict[str, str]:
    """The text of bos_token, eos_token, unk_token and pad_token, those that there are."""
    tokens = file.raw_strings("tokenizer.ggml.tokens")
    named = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token = file.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token, int) and 0 <= token < len(tokens):
            named[name] = tokens[token].decode("utf-8", "replace")
    return named


def wrap_text(tokenizer: Tokenizer, bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> None:
    """Make `encode` put a token before or after each text."""
    parts = [bos[0]] if bos else []
    parts += ["$A"]
    parts += [eos[0]] if eos else []
    if len(parts) == 1:
        return
    special = list(dict.fromkeys(token for token in (bos, eos) if token))
    tokenizer.post_processor = processors.TemplateProcessing(single=parts, pair=[*parts, "$B"], special_tokens=special)


def _token(file: GGUFFile, tokens: list[str], key: str) -> tuple[str, int] | None:
    token = file.get(f"tokenizer.ggml.{key}_token_id")
    return (tokens[token], token) if isinstance(token, int) and 0 <= token < len(tokens) else None


def _byte_level(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges", [])]
    vocab = {token: index for index, token in enumerate(tokens)}
    # The library does not raise on a merge of unknown tokens, it panics.
    if not all(
        len(merge) == 2 and merge[0] in vocab and merge[1] in vocab and "".join(merge) in vocab for merge in merges
    ):
        raise ModelError(f"{file.path}: tokenizer.ggml.merges does not fit the vocabulary")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False))
    tokenizer.pre_tokenizer = _pre_tokenizer(file)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(file: GGUFFile) -> pre_tokenizers.PreTokenizer:
    kind = file.get("tokenizer.ggml.pre", "default")
    if kind in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[kind]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind in _DIGITS_TYPES:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if kind in _GPT2_TYPES:
        return gpt2
    raise ModelError(
        f"{file.path}: pre-tokenizer {kind!r} is not supported", fix="use the model's directory with its tokenizer.json"
    )


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    scores = file.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise ModelError(f"{file.path}: a sentencepiece vocabulary without one score for each token")
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = _token(file, tokens, "unknown")
    model = models.BPE(
        vocab=vocab,
        merges=_merges(tokens, scores, vocab, _types(file, len(tokens))),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if prefix else "never", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    return tokenizer


def _merges(tokens: list[str], scores: np.ndarray, vocab: dict[str, int], types: np.ndarray) -> list[tuple[str, str]]:
    """The merges that a sentencepiece vocabulary implies: each way to cut a token into two others, best score first."""
    found = []
    for index, token in enumerate(tokens):
        if types[index] in (_UNKNOWN, _CONTROL, _BYTE):
            continue
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [(a, b) for a, b in cuts if a in vocab and b in vocab]
        pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        found += [(float(scores[index]), a, b) for a, b in pairs]
    found.sort(key=lambda entry: (entry[0], len(entry[1]), len(entry[2])), reverse=True)
    return [(a, b) for _, a, b in found]


def _types(file: GGUFFile, count: int) -> np.ndarray:
    types = file.get("tokenizer.ggml.token_type")
    return types if isinstance(types, np.ndarray) and len(types) == count else np.ones(count, np.int32)


def _add_tokens(tokenizer: Tokenizer, file: GGUFFile, tokens: list[str], *, byte_level: bool) -> None:
    """Control tokens become special tokens, user-defined ones plain added tokens: both are matched whole in a text.

    A byte-level vocabulary spells every real token in the byte alphabet; a control token that is not spelled so is an
    unused slot that a converter filled in.
    """
    alphabet = set(byte_alphabet())
    types = _types(file, len(tokens))
    control = [tokens[i] for i in np.flatnonzero(types == _CONTROL)]
    control = [token for token in control if not byte_level or set(token) <= alphabet]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    defined = [tokens[i] for i in np.flatnonzero(types == _USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in defined])
