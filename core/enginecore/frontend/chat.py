"""From messages to prompt text: normalise, adapt to what the template can do, render.

What a template can do is found by trying it once on small conversations: whether it takes text or part lists as
content, whether it shows a second system message, and one in mid-conversation. Where it takes one system message only,
system and developer messages are merged in order, in front. A developer message is rendered as system unless the
template knows the role.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from enginecore.errors import ParameterError
from enginecore.frontend.messages import merge_system, normalise
from enginecore.frontend.template import Template, TemplateFailed

#: Renders a template's variables to text; the server passes one that works in another process, with a time limit.
Render = Callable[[dict[str, Any]], str]

#: What a request's chat_template_kwargs may not set: it would replace the conversation or the rendering itself.
RESERVED_KWARGS = frozenset(
    [
        "messages",
        "tools",
        "tokenize",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "documents",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "conversation",
        "raise_exception",
        "strftime_now",
        "tojson",
        "bos_token",
        "eos_token",
        "unk_token",
        "pad_token",
        "sep_token",
        "cls_token",
        "mask_token",
        "self",
    ]
)

_START, _END, _PROBE = "\ue0f1\ue0f2", "\ue0f3\ue0f4", "\ue0f5"


def load_template(value: str | None) -> str | None:
    """The source of a template given as a file or, when it has braces or line breaks, as itself. ParameterError
    otherwise."""
    if value is None:
        return None
    if os.path.isfile(value):
        return Path(value).read_text(encoding="utf-8")
    if "{" in value or "\n" in value:
        return value
    raise ParameterError(f"the chat template file {value!r} does not exist", param="chat_template")


def check_template_kwargs(kwargs: Any) -> dict[str, Any]:
    """A request's chat_template_kwargs, refused when they touch anything but the template's own switches."""
    if not isinstance(kwargs, dict):
        raise ParameterError("chat_template_kwargs must be an object", param="chat_template_kwargs")
    for name in kwargs:
        if name in RESERVED_KWARGS or not name.isidentifier() or name.startswith("_"):
            raise ParameterError(
                f"chat_template_kwargs may not set {name[:64]!r}", param=f"chat_template_kwargs.{name[:64]}"
            )
    return kwargs


class ChatRenderer:
    """Renders conversations with one template. Thread-safe."""

    def __init__(self, source: str | None, special_tokens: dict[str, str], render: Render | None = None) -> None:
        self.source = source
        self._special_tokens = special_tokens
        self._render_raw: Render | None = render
        self._abilities: tuple[bool, bool, bool] | None = None
        if source is not None:
            compiled = Template(source)
            self._render_raw = render or compiled.render

    def render(
        self,
        messages: Any,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation. Raises ParameterError."""
        if self.source is None:
            raise ParameterError(
                "the model has no chat template; supply one at start-up",
                param="messages",
                code="no_chat_template",
                fix="--chat-template FILE, or use /v1/completions",
            )
        if continue_final_message and add_generation_prompt:
            raise ParameterError(
                "add_generation_prompt and continue_final_message cannot both be true", param="continue_final_message"
            )
        conversation = normalise(messages)
        final = conversation[-1]
        if continue_final_message and final["role"] != "assistant":
            raise ParameterError(
                f"continue_final_message needs a last message with role assistant, got {final['role']}",
                param="continue_final_message",
            )
        prefill = final["content"]
        if continue_final_message:
            final["content"] = _START + prefill + _END
        variables = {
            **(check_template_kwargs(template_kwargs) if template_kwargs else {}),
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._render(self._adapt(conversation), variables)
        return _cut_at_prefill(text, prefill) if continue_final_message else text

    def prepare(self) -> None:
        """Find out what the template can do now, so that the first request does not wait for it."""
        if self.source is not None and self._abilities is None:
            self._abilities = self._probe()

    def _render(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        assert self._render_raw is not None
        return self._render_raw({**self._special_tokens, **variables, "messages": messages})

    def _adapt(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self.prepare()
        assert self._abilities is not None
        takes_text, many_leading, anywhere = self._abilities
        if "developer" not in (self.source or ""):
            for message in messages:
                if message["role"] == "developer":
                    message["role"] = "system"
        if not anywhere:
            messages = merge_system(messages)
        elif not many_leading:
            messages = merge_system(messages, leading_only=True)
        if not takes_text:
            for message in messages:
                message["content"] = [{"type": "text", "text": message["content"]}]
        return messages

    def _probe(self) -> tuple[bool, bool, bool]:
        """(takes text content, shows several system messages in front, shows one in mid-conversation)."""

        def shows(*roles: str, as_text: bool = True) -> bool:
            marks = [f"{_PROBE}{index}{_PROBE}" for index in range(len(roles))]
            contents: list[Any] = marks if as_text else [[{"type": "text", "text": mark}] for mark in marks]
            messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
            try:
                text = self._render(messages, {"tools": None, "add_generation_prompt": True})
            except TemplateFailed:
                return False
            return all(mark in text for mark in marks)

        as_text = shows("user") or not shows("user", as_text=False)
        return (
            as_text,
            shows("system", "system", "user", as_text=as_text),
            shows("system", "user", "assistant", "system", "user", as_text=as_text),
        )


def _cut_at_prefill(text: str, prefill: str) -> str:
    """Everything before the final message, then its text exactly as given: no trimming, no end-of-turn."""
    start = text.rfind(_START)
    if start >= 0:
        return text[:start] + prefill
    end = text.rfind(_END)
    if end >= 0:
        return text[:end]
    raise ParameterError(
        "the chat template does not show the final message, so it cannot be continued", param="continue_final_message"
    )
