"""Chat templates: a sandboxed Jinja environment with the extras that model authors rely on.

The environment is that of transformers' `apply_chat_template`: immutable sandbox, trimmed blocks, loop controls,
`raise_exception`, `strftime_now`, `tojson` without escaping, and the `generation` tag (which only marks text).
"""

from __future__ import annotations

import datetime
import json
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from enginecore.errors import ParameterError


class TemplateFailed(ParameterError):
    """The template refused the conversation or is wrong; the message is the template's own where it has one."""


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}: renders its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@jinja2.pass_context
def _unchanged(context: Any, value: Any) -> Any:
    return value


def _environment() -> ImmutableSandboxedEnvironment:
    # Nothing is computed while a template compiles, which has neither a time nor a memory limit: the optimizer is off,
    # and a finalizer that takes the context keeps constant output such as {{ 'x' * 10**10 }} for the render.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        optimized=False,
        finalize=_unchanged,
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class Template:
    """A compiled template. Raises ParameterError when it does not compile."""

    def __init__(self, source: str) -> None:
        try:
            self._template = _environment().from_string(source)
        except (jinja2.exceptions.TemplateError, RecursionError, SyntaxError) as error:
            raise ParameterError(f"the chat template does not compile: {error}", param="chat_template") from error

    def render(self, variables: dict[str, Any]) -> str:
        """Text of a conversation. Whatever goes wrong inside is a TemplateFailed."""
        try:
            return self._template.render(variables)
        except jinja2.exceptions.SecurityError as error:
            raise TemplateFailed(
                f"the chat template tried something the sandbox forbids: {error}", param="messages"
            ) from error
        except jinja2.exceptions.TemplateError as error:
            raise TemplateFailed(f"the chat template refused the messages: {error}", param="messages") from error
        except MemoryError as error:
            raise TemplateFailed("the chat template needs too much memory", param="messages") from error
        except Exception as error:  # a template can raise anything
            raise TemplateFailed(
                f"the chat template failed on these messages: {type(error).__name__}: {error}", param="messages"
            ) from error
