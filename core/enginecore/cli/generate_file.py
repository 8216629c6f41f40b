"""Batch generation from one JSON lines file to another."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from enginecore.cli.common import open_llm
from enginecore.config import EngineArgs
from enginecore.errors import ParameterError
from enginecore.request import SamplingParams

if TYPE_CHECKING:
    from enginecore.frontend.llm import LLM
    from enginecore.frontend.outputs import CompletionOutput, RequestOutput

KINDS = ("prompt", "prompt_token_ids", "messages")


@dataclass(frozen=True)
class FileRequest:
    """One line: its number, what it asks, the fields that are copied to its answer, and its sampling fields."""

    line: int
    kind: str
    content: Any
    copied: dict[str, Any]
    sampling: dict[str, Any]


def check_sampling(fields: dict[str, Any]) -> dict[str, Any]:
    """`fields` with JSON's text keys made numbers where they are token ids. Raises ParameterError."""
    unknown = sorted(set(fields) - set(SamplingParams.__struct_fields__))
    if unknown:
        raise ParameterError(f"unknown field {unknown[0]!r}", param=unknown[0])
    fields = {name: value for name, value in fields.items() if value is not None}
    try:
        params = msgspec.convert(fields, SamplingParams, str_keys=True)
    except msgspec.ValidationError as error:
        raise ParameterError(str(error)) from error
    return {name: getattr(params, name) for name in fields}


def read_requests(path: Path, defaults: dict[str, Any]) -> list[FileRequest]:
    """Every line of a file, checked. Raises ParameterError naming the file and the line; empty lines are skipped."""
    requests = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    requests.append(_request(number, line, defaults))
                except ParameterError as error:
                    raise ParameterError(f"{path}, line {number}: {error.message}", param=error.param) from error
    except UnicodeDecodeError as error:
        raise ParameterError(f"{path} is not UTF-8 text", param="prompts") from error
    if not requests:
        raise ParameterError(f"{path} holds no requests", param="prompts")
    return requests


def _request(number: int, line: str, defaults: dict[str, Any]) -> FileRequest:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ParameterError("not a JSON object")
    kinds = [kind for kind in KINDS if kind in entry]
    if len(kinds) != 1:
        raise ParameterError("needs exactly one of prompt, prompt_token_ids and messages")
    kind = kinds[0]
    content = entry.pop(kind)
    copied = {"id": entry.pop("id")} if "id" in entry else {}
    _check_content(kind, content)
    own = check_sampling(entry)
    return FileRequest(number, kind, content, copied, check_sampling({**defaults, **own}))


def _check_content(kind: str, content: Any) -> None:
    if kind == "prompt" and not (isinstance(content, str) and content):
        raise ParameterError("prompt must be text that is not empty", param=kind)
    if kind == "prompt_token_ids" and not (
        isinstance(content, list) and content and all(type(token) is int and token >= 0 for token in content)
    ):
        raise ParameterError("prompt_token_ids must be a list of token ids", param=kind)
    if kind == "messages" and not (
        isinstance(content, list)
        and content
        and all(isinstance(message, dict) and "role" in message for message in content)
    ):
        raise ParameterError("messages must be a list of objects with a role", param=kind)


def with_defaults(llm: LLM, sampling: dict[str, Any]) -> SamplingParams:
    """The model's own sampling defaults under the fields that were given."""
    return msgspec.structs.replace(llm.get_default_sampling_params(), **sampling)


def generate_file(engine: EngineArgs, requests: list[FileRequest], source: Path, out: Path, *, progress: bool) -> None:
    """Answer every request and write `out` in one piece: it exists whole or not at all."""
    _check_writable(out)
    with open_llm(engine) as llm:
        answers: dict[int, RequestOutput] = {}
        plain = [request for request in requests if request.kind != "messages"]
        chats = [request for request in requests if request.kind == "messages"]
        for group, call in ((plain, llm.generate), (chats, llm.chat)):
            if not group:
                continue
            params = [with_defaults(llm, request.sampling) for request in group]
            try:
                outputs = call([request.content for request in group], params, use_tqdm=progress)
            except ParameterError as error:
                raise _at_line(error, source, group) from error
            answers.update(zip((request.line for request in group), outputs, strict=True))
    _write(out, [json.dumps(_answer(request, answers[request.line]), ensure_ascii=False) for request in requests])
    print(f"{len(requests)} answers written to {out}", file=sys.stderr)


def _at_line(error: ParameterError, source: Path, group: list[FileRequest]) -> ParameterError:
    """The engine numbers prompts; the user knows lines."""
    match = re.match(r"(?:prompt|conversation) (\d+): ", error.message)
    index, text = (int(match[1]), error.message[match.end() :]) if match else (0, error.message)
    if not match and len(group) > 1:
        return error
    return ParameterError(f"{source}, line {group[index].line}: {text}", param=error.param, fix=error.fix)


def _answer(request: FileRequest, output: RequestOutput) -> dict[str, Any]:
    """One line of the output: the choice itself, or `choices` when several were asked for."""
    choices = [_choice(choice) for choice in output.outputs]
    return {
        **request.copied,
        **(choices[0] if len(choices) == 1 else {"choices": choices}),
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_output_tokens": output.num_generated_tokens,
        "num_cached_tokens": output.num_cached_tokens,
    }


def _choice(choice: CompletionOutput) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }
    if choice.logprobs is not None:
        answer["cumulative_logprob"] = choice.cumulative_logprob
        answer["logprobs"] = [
            {str(token): {"logprob": entry.logprob, "rank": entry.rank, "token": entry.decoded_token}
             for token, entry in position.items()} for position in choice.logprobs
        ]  # fmt: skip
    return answer


def _check_writable(out: Path) -> None:
    """Find out before the work, not after it."""
    folder = out.parent
    if out.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        problem = "is a directory" if out.is_dir() else f"cannot be written: no writable directory {folder}"
        raise ParameterError(f"--out {out} {problem}", param="out")


def _write(out: Path, lines: list[str]) -> None:
    handle, temporary = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, out)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
