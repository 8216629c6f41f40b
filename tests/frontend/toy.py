"""A tokenizer with 256 byte tokens, a few words and three special tokens, and helpers to script engine outputs."""

from __future__ import annotations

import msgspec
from enginecore.config import EngineConfig
from enginecore.request import EngineOutput, EngineStats, StepOutputs, TokenLogprobs

WORDS = [
    "hello",
    " hello",
    " world",
    " wor",
    "ld",
    "the",
    " the",
    " Paris",
    "Paris",
    " Par",
    "is",
    "ab",
    "abc",
    "bc",
    "😀",
]
SPECIAL = {271: "<|start|>", 272: "<|end|>", 273: "<|pad|>"}
EOS = 272


class ToyTokenizer:
    """Greedy longest match over WORDS, then bytes."""

    chat_template = (
        "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    special_tokens = {"bos_token": "<|start|>", "eos_token": "<|end|>"}

    def __init__(self) -> None:
        self._bytes = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS]
        self._bytes += [text.encode() for text in SPECIAL.values()]
        self.vocab_size = len(self._bytes)
        self.bos_token_id, self.eos_token_id, self.eos_token_ids, self.add_bos = None, EOS, [EOS], False
        self.special_token_ids = frozenset(SPECIAL)
        self._ids = {text: token for token, text in enumerate(self._bytes)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        data, ids, position = text.encode(), [], 0
        while position < len(data):
            for length in range(min(12, len(data) - position), 0, -1):
                token = self._ids.get(data[position : position + length])
                if token is not None:
                    ids.append(token)
                    position += length
                    break
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        kept = [token for token in ids if not (skip_special_tokens and token in self.special_token_ids)]
        return b"".join(self._bytes[token] for token in kept).decode("utf-8", "replace")

    def serialized(self) -> str:
        return "{}"

    def special_token_id(self, text: str) -> int | None:
        return next((token for token, known in SPECIAL.items() if known == text), None)

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        return self._bytes[token_id].decode("utf-8", "replace")


def config(**changes: object) -> EngineConfig:
    base = EngineConfig(
        model="toy", model_path="/nowhere", served_model_name="toy", device="toy", plugin="toy", dtype="float32",
        max_model_len=64, vocab_size=274, max_num_seqs=4, max_num_batched_tokens=64, long_prefill_token_threshold=0,
        block_size=16, num_blocks=64, enable_prefix_caching=True, scheduling_policy="fcfs", seed=0, max_logprobs=5,
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def step(*outputs: EngineOutput) -> StepOutputs:
    return StepOutputs(list(outputs), EngineStats())


def entry(token: int, logprob: float, *best: tuple[int, float], rank: int = 1) -> TokenLogprobs:
    return TokenLogprobs([token, *(t for t, _ in best)], [logprob, *(p for _, p in best)], rank)
