"""Log-probabilities as the two OpenAI formats and vLLM's prompt_logprobs have them.

Values are raw log-softmax of the model's logits; minus infinity (and anything below it) is written as -9999.0, since
JSON has no infinities.
"""

from __future__ import annotations

from typing import Any

from enginecore.frontend.detokenizer import TokenTable, token_pieces
from enginecore.frontend.input_processor import PreparedRequest
from enginecore.frontend.outputs import CompletionOutput, LogprobDict
from enginecore.request import SamplingParams

FLOOR = -9999.0


def finite(value: float) -> float:
    """A number that JSON can hold."""
    return value if value >= FLOOR else FLOOR


def chat_logprobs(
    table: TokenTable, output: CompletionOutput, top: int, params: SamplingParams, *, as_ids: bool
) -> dict[str, Any]:
    """The `logprobs` object of a chat choice: one entry a token.

    `bytes` are the raw bytes that the token adds to the content: none for a special token that is not shown and for the
    token that ended the text.
    """
    entries = []
    ended = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
    ended = ended and not params.include_stop_str_in_output
    last = len(output.token_ids) - 1
    for index, (token, position) in enumerate(zip(output.token_ids, output.logprobs or [], strict=False)):
        shown = not (params.skip_special_tokens and token in table.special) and not (ended and index == last)
        best = sorted((rank_of(p.rank), t) for t, p in position.items())[:top] if top else []
        entry = _chat_entry(table, token, position, as_ids)
        if not shown:
            entry["bytes"] = []
        entry["top_logprobs"] = [_chat_entry(table, each, position, as_ids) for _, each in best]
        entries.append(entry)
    return {"content": entries, "refusal": None}


def rank_of(rank: int | None) -> int:
    """For sorting."""
    return rank if rank is not None else 1 << 62


def _chat_entry(table: TokenTable, token: int, position: LogprobDict, as_ids: bool) -> dict[str, Any]:
    raw = table.raw(token)
    text = f"token_id:{token}" if as_ids else raw.decode("utf-8", "replace")
    return {"token": text, "logprob": finite(position[token].logprob), "bytes": list(raw)}


class CompletionLogprobs:
    """Builds the legacy `logprobs` object of one completions choice, in one go or delta by delta.

    `tokens` are the texts that the tokens add, so that joined they are the text (of a character spread over several
    tokens the last one has all of it); `text_offset` counts characters from the start of the choice's text.
    """

    def __init__(self, table: TokenTable, top: int, *, as_ids: bool) -> None:
        self._table = table
        self._top = top
        self._as_ids = as_ids
        self._offset = 0

    def _add(self, result: dict[str, list[Any]], token: int, text: str, position: LogprobDict | None) -> None:
        result["text_offset"].append(self._offset)
        self._offset += len(text)
        result["tokens"].append(f"token_id:{token}" if self._as_ids else text)
        if position is None:
            result["token_logprobs"].append(None)
            result["top_logprobs"].append(None)
            return
        result["token_logprobs"].append(finite(position[token].logprob))
        best = sorted((rank_of(p.rank), each) for each, p in position.items())
        kept = [each for _, each in best[: self._top]]
        if token not in kept:
            kept.append(token)
        result["top_logprobs"].append({self._name(each): finite(position[each].logprob) for each in kept})

    def _name(self, token: int) -> str:
        """A token as a key: bytes that are no text of their own are spelled out, so that keys stay apart."""
        if self._as_ids:
            return f"token_id:{token}"
        raw = self._table.raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def build(
        self, output: CompletionOutput | None, prompt: tuple[list[int], list[str], list[LogprobDict | None]] | None
    ) -> dict[str, Any]:
        """The object for the prompt (ids, texts, log-probabilities) and an output, either of which may be missing."""
        result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        if prompt is not None:
            for token, text, position in zip(*prompt, strict=True):
                self._add(result, token, text, position)
        if output is not None:
            texts = output.token_texts or []
            for token, text, position in zip(output.token_ids, texts, output.logprobs or [], strict=False):
                self._add(result, token, text, position)
        return result


def prompt_pieces(table: TokenTable, request: PreparedRequest) -> list[str]:
    """The text of each prompt token; joined, the prompt as given. A start token that the tokenizer put in front is
    ""."""
    skip = request.text is None and request.params.skip_special_tokens
    pieces = token_pieces(table, request.token_ids, skip_special_tokens=skip)
    if request.text is not None and pieces and "".join(pieces) != request.text == "".join(pieces[1:]):
        pieces[0] = ""
    return pieces


def prompt_logprobs(positions: list[LogprobDict | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's `prompt_logprobs`: for each prompt token {token id: {logprob, rank, decoded_token}}; the first is null."""
    if positions is None:
        return None
    return [None if position is None else _prompt_position(position) for position in positions]


def _prompt_position(position: LogprobDict) -> dict[str, Any]:
    return {
        str(token): {"logprob": finite(each.logprob), "rank": each.rank, "decoded_token": each.decoded_token}
        for token, each in position.items()
    }
