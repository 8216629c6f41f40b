from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from enginecore.errors import ParameterError
from enginecore.frontend.chat import ChatRenderer, check_template_kwargs, load_template
from enginecore.frontend.nesting import MAX_NESTING, check_nesting

from tests.frontend.toy import ToyTokenizer

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nDefault<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ONE_SYSTEM = (
    "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'system' %}{{ raise_exception('one system message only') }}{% endif %}"
    "{{ m.role }}:{{ m.content | trim }};{% endfor %}"
)
PARTS = "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %};{% endfor %}"


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def render(messages: Any, template: str = SMOLLM2, **options: Any) -> str:
    return ChatRenderer(template, {"bos_token": "<s>"}).render(messages, **options)


def test_plain_and_generation_prompt() -> None:
    text = "<|im_start|>system\nDefault<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    assert render([user("hi")]) == text + "<|im_start|>assistant\n"
    assert render([user("hi")], add_generation_prompt=False) == text


def test_parts_render_as_text_and_join_with_a_newline() -> None:
    for role in ("system", "user", "assistant"):
        one = [{"role": role, "content": [{"type": "text", "text": "a"}]}, user("x")]
        assert render(one) == render([{"role": role, "content": "a"}, user("x")])
    two = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert render([user(two)]) == render([user("a\nb")])
    assert render([user(two)], PARTS) == "user:a\nb;"


def test_developer_is_system_unless_the_template_knows_it() -> None:
    messages = [{"role": "developer", "content": "d"}, user("x")]
    assert render(messages) == render([{"role": "system", "content": "d"}, user("x")])
    assert render(messages, "{# developer #}{% for m in messages %}{{ m.role }} {% endfor %}") == "developer user "


def test_system_messages_are_merged_where_the_template_takes_one() -> None:
    messages = [
        {"role": "system", "content": "s"}, {"role": "developer", "content": "d"}, user("x"),
        {"role": "system", "content": "late"}, user("y"),
    ]  # fmt: skip
    assert render(messages, ONE_SYSTEM) == "[s\n\nd\n\nlate]user:x;user:y;"
    assert render(messages).count("<|im_start|>system") == 3
    assert render([user("x"), {"role": "system", "content": "late"}], ONE_SYSTEM) == "[late]user:x;"


@pytest.mark.parametrize("final", ["The answer is ", "  padded  ", "", "x<|im_end|>"])
def test_continue_final_message_is_exact(final: str) -> None:
    for template in (SMOLLM2, ONE_SYSTEM):
        messages = [user("q"), {"role": "assistant", "content": final}]
        text = render(messages, template, add_generation_prompt=False, continue_final_message=True)
        before = render([user("q")], template, add_generation_prompt=False)
        assert text.startswith(before) and text[len(before) :].split("\n")[-1].removeprefix("assistant:") == final


@pytest.mark.parametrize(
    ("messages", "options", "param"),
    [
        ([user("a")], {"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"),
        ([user("a")], {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ("hi", {}, "messages"), ([], {}, "messages"), (["hi"], {}, "messages[0]"),
        ([{"content": "x"}], {}, "messages[0].role"), ([{"role": "foo", "content": "x"}], {}, "messages[0].role"),
        ([{"role": 5, "content": "x"}], {}, "messages[0].role"), ([user(None)], {}, "messages[0].content"),
        ([user(5)], {}, "messages[0].content"), ([user([{"type": "image_url"}])], {}, "messages[0].content[0].type"),
        ([user([{"type": "text"}])], {}, "messages[0].content[0].text"),
        ([user([{"text": "a"}])], {}, "messages[0].content[0].type"),
        ([user("a"), {"role": "tool", "content": "x"}], {}, "messages[1].tool_call_id"),
        ([{"role": "assistant", "tool_calls": "x"}], {}, "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], {}, "messages[0].tool_calls[0].function"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], {}, "messages[0].tool_calls[0].function.name"),
    ],
)  # fmt: skip
def test_bad_messages_name_the_field(messages: Any, options: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        render(messages, **options)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": "Zürich"}', '{"city": "Zürich"}'), ("", "{}"), (None, "{}"), ("{bad", '"{bad"'), ("[1]", '"[1]"'),
        ('"str"', '"\\"str\\""'), ({"a": 1}, '{"a": 1}'),
    ],
)  # fmt: skip
def test_tool_history(arguments: Any, shown: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [user("x"), {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "42"}]  # fmt: skip
    template = (
        "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}"
        "{% endif %};{% endfor %}"
    )
    assert render(messages, template) == f"x;{shown};42;"


def test_extras_of_the_environment() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') | length }}"
        "{{ tools | tojson if tools }}"
    )
    tools = [{"name": "é"}]
    assert render([user("a"), user("b")], template, tools=tools) == '<s>a4[{"name": "é"}]'
    with pytest.raises(ParameterError, match="no thanks"):
        render([user("a")], "{{ raise_exception('no thanks') }}")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}", "{{ messages[0].update(a=1) }}",
        "{{ strftime_now.__globals__['json'] }}", "{{ 1 // 0 }}", "{{ nothing.at.all }}",
    ],
)  # fmt: skip
def test_sandbox(template: str) -> None:
    with pytest.raises(ParameterError):
        render([user("a")], template)


def test_template_that_does_not_compile() -> None:
    with pytest.raises(ParameterError, match="does not compile"):
        render([user("a")], "{% if %}")


def test_template_kwargs() -> None:
    assert render([user("a")], "{{ enable_thinking }}", template_kwargs={"enable_thinking": False}) == "False"
    for name in ("chat_template", "tokenize", "messages", "tools", "add_generation_prompt", "a b", "_x", "bos_token"):
        with pytest.raises(ParameterError, match=name):
            check_template_kwargs({name: 1})


def test_no_template() -> None:
    with pytest.raises(ParameterError, match="no chat template; supply one at start-up"):
        ChatRenderer(None, {}).render([user("a")])


def test_load_template(tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{{ messages }}")
    assert load_template(str(file)) == "{{ messages }}" and load_template("{{ x }}") == "{{ x }}"
    assert load_template(None) is None
    with pytest.raises(ParameterError, match="does not exist"):
        load_template(str(tmp_path / "missing.jinja"))


def test_toy_template() -> None:
    assert render([user("a")], ToyTokenizer.chat_template) == "<|start|>user\na<|end|>\n<|start|>assistant\n"


@pytest.mark.parametrize("depth", [MAX_NESTING, MAX_NESTING + 1, 1000, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}"), (b'["]\\"",', b"]"), (b"[[],", b"]")])
def test_nesting(depth: int, opening: bytes, closing: bytes) -> None:
    levels = depth - 1 if opening == b"[[]," else depth
    body = opening * levels + (b"[]" if opening == b"[[]," else b"1") + closing * levels
    if depth > MAX_NESTING:
        with pytest.raises(ParameterError, match="too deep"):
            check_nesting(body, "x")
    else:
        check_nesting(body)


def test_brackets_in_strings_do_not_count() -> None:
    check_nesting(b'["' + b"[" * 1000 + b'\\\\", "\\"' + b"{" * 1000 + b'"]')
    check_nesting(b"[" + b'"[",' * 100_000 + b"1]")
