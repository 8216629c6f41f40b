"""`Tokenizer`: text to ids and back, from a model's directory or a GGUF file. Neither torch nor transformers.

Encoding is thread-safe: nothing about a tokenizer changes after `load`. The library releases the GIL in its calls for
batches only, so a text travels as a batch of one: a long one must not hold up the other threads of a server.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from enginecore.errors import ModelError
from enginecore.frontend.gguf_tokenizer import build_tokenizer, byte_alphabet, named_tokens, wrap_text
from enginecore.models.gguf_config import token_ids
from enginecore.models.gguf_reader import GGUFFile
from enginecore.models.store import read_json

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_BYTE_TOKEN_LENGTH = len("<0x00>")


class Tokenizer:
    """A model's tokenizer. `special_tokens` maps bos_token, eos_token... to their text, for chat templates.

    `eos_token_id` is the tokenizer's; `eos_token_ids` adds generation_config's. `special_token_ids` are the tokens that
    `decode` leaves out. `add_bos` says whether `encode` puts bos first. `vocab_size` is one more than the largest id.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str],
        eos_token_ids: list[int],
        chat_template: str | None = None,
        response_template: dict[str, Any] | None = None,
    ) -> None:
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._spelling = _spelling(backend)
        self._alphabet = byte_alphabet()
        self.special_tokens = special_tokens
        self.chat_template = chat_template
        #: How transformers takes the model's answers apart, where the checkpoint says so.
        self.response_template = response_template
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocab.values(), default=-1) + 1
        self.bos_token_id = self._id("bos_token")
        self.eos_token_id = self._id("eos_token")
        own = [] if self.eos_token_id is None else [self.eos_token_id]
        self.eos_token_ids: list[int] = list(dict.fromkeys([*own, *eos_token_ids]))
        self.special_token_ids = frozenset(index for index, token in self._added.items() if token.special)
        self.add_bos = self.bos_token_id is not None and self.encode("a")[:1] == [self.bos_token_id]

    @classmethod
    def load(cls, model_path: str) -> Tokenizer:
        """The tokenizer of a model directory (tokenizer.json) or a .gguf file. Raises ModelError in one line."""
        path = Path(model_path)
        return cls._from_gguf(path) if path.is_file() else cls._from_directory(path)

    @classmethod
    def _from_gguf(cls, path: Path) -> Tokenizer:
        file = GGUFFile(str(path))
        eos = token_ids(file).get("eos_token_id", [])
        template = file.get("tokenizer.chat_template")
        return cls(
            build_tokenizer(file),
            special_tokens=named_tokens(file),
            eos_token_ids=eos if isinstance(eos, list) else [eos],
            chat_template=template if isinstance(template, str) else None,
        )

    @classmethod
    def _from_directory(cls, path: Path) -> Tokenizer:
        source = path / "tokenizer.json"
        if not source.is_file():
            raise ModelError(
                f"{path} has no tokenizer.json",
                fix="write one with AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers",
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(source))
        except Exception as error:  # the library raises plain Exception
            raise ModelError(f"{source} cannot be used: {error}") from error
        # Both may be stored with a tokenizer; ours never cuts or fills.
        backend.no_truncation()
        backend.no_padding()
        config = _optional_json(path / "tokenizer_config.json")
        named = _named_tokens(_optional_json(path / "special_tokens_map.json"), config)
        _follow_config(backend, config, named)
        return cls(
            backend,
            special_tokens=named,
            eos_token_ids=_eos_ids(path),
            chat_template=_chat_template(path, config),
            response_template=_response_template(path, config),
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens that are written out in `text` become themselves."""
        try:
            ids = self._encode(text, add_special_tokens)
        except (UnicodeEncodeError, TypeError):
            ids = self._encode(_sound(text), add_special_tokens)
        return ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Token ids of two texts as the model reads them together, and of each token whether it is of the second kind
        (1) where the model tells them apart."""
        (encoding,) = self._backend.encode_batch_fast([(_sound(first), _sound(second))], add_special_tokens=True)
        return encoding.ids, encoding.type_ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def serialized(self) -> str:
        """The `tokenizers` library's JSON, from which the same tokenizer can be made."""
        text: str = self._backend.to_str()
        return text

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token that is written so; None when there is none, or only an ordinary one."""
        token: int | None = self._backend.token_to_id(text)
        return token if token in self.special_token_ids else None

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes that the token adds to a text, which may be a part of a character. Added tokens: their text.

        Raises IndexError for an id that the tokenizer does not have.
        """
        added = self._added.get(token_id)
        if added is not None:
            return str(added.content).encode()
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            raise IndexError(f"there is no token {token_id}; ids run from 0 to {self.vocab_size - 1}")
        if self._spelling == "byte_level":
            known = [self._alphabet.get(character) for character in token]
            return bytes(b for b in known if b is not None) if None not in known else token.encode()
        if self._spelling == "sentencepiece":
            if len(token) == _BYTE_TOKEN_LENGTH and token.startswith("<0x") and token.endswith(">"):
                return bytes([int(token[3:5], 16)])
            return token.replace("▁", " ").encode()
        if self._spelling == "wordpiece":
            return (token[2:] if token.startswith("##") else " " + token).encode()
        return token.encode()

    def token_text(self, token_id: int) -> str:
        """The token readably; a part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        token: int | None = self._backend.token_to_id(text) if text is not None else None
        return token


def _sound(text: str) -> str:
    """`text` without halves of surrogate pairs, which JSON can carry and UTF-8 cannot."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _spelling(backend: tokenizers.Tokenizer) -> str:
    """How the vocabulary spells bytes and spaces, told by the decoder."""
    kinds: set[str] = set()

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if "type" in node:
                kinds.add(str(node["type"]))
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    if backend.decoder is not None:
        walk(json.loads(backend.decoder.__getstate__()))
    if "ByteLevel" in kinds:
        return "byte_level"
    if kinds & {"ByteFallback", "Metaspace"}:
        return "sentencepiece"
    return "wordpiece" if "WordPiece" in kinds else "plain"


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _named_tokens(*sources: dict[str, Any]) -> dict[str, str]:
    """bos_token and the like out of transformers' files, where a token is a string or {"content": string}."""
    named = {}
    for source in sources:
        for name in _NAMED:
            value = source.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                named[name] = value
    return named


def _follow_config(backend: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, str]) -> None:
    """Where tokenizer_config.json states add_bos_token or add_eos_token, that goes before tokenizer.json's template."""
    stated = [config.get(f"add_{name}_token") for name in ("bos", "eos")]
    if not any(isinstance(value, bool) for value in stated):
        return
    plain = backend.encode("a", add_special_tokens=False).ids
    wrapped = backend.encode("a").ids
    tokens = [backend.token_to_id(named.get(f"{name}_token", "")) for name in ("bos", "eos")]
    before, after = wrapped[:1], wrapped[-1:]
    grown = len(wrapped) > len(plain)
    now = [grown and before == [tokens[0]], grown and after == [tokens[1]]]
    want = [value if isinstance(value, bool) else has for value, has in zip(stated, now, strict=True)]
    want = [value and token is not None for value, token in zip(want, tokens, strict=True)]
    if want == now and len(wrapped) == len(plain) + sum(now):
        return
    parts: list[tuple[str, int] | None] = [None, None]
    for i, name in enumerate(("bos", "eos")):
        token = tokens[i]
        if want[i] and token is not None:
            parts[i] = (named[f"{name}_token"], token)
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    wrap_text(backend, parts[0], parts[1])


def _eos_ids(path: Path) -> list[int]:
    """The ids of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        value = _optional_json(path / name).get("eos_token_id")
        if isinstance(value, int):
            return [value]
        if isinstance(value, list):
            return [token for token in value if isinstance(token, int)]
    return []


def _response_template(path: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    name = "response_template"
    template = config.get(name) or _optional_json(path / "processor_config.json").get(name)
    return template if isinstance(template, dict) else None


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    for name in ("chat_template.jinja", "chat_template.json"):
        file = path / name
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            return text if name.endswith(".jinja") else _optional_json(file).get("chat_template")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default") or next(iter(named.values()), None)
    return template if isinstance(template, str) else None
