from __future__ import annotations

import pytest
from enginecore.frontend.template import Template, TemplateFailed

#: Constant expressions that would take the machine's memory or hours.
EXPENSIVE = [
    "{{ 'x' * 10**13 }}",
    "{{ 'x'|center(10**13) }}",
    "{% set a = 9**9**9 %}",
    "{% if 'x' * 10**13 %}{% endif %}",
]


@pytest.mark.parametrize("source", EXPENSIVE)
def test_nothing_is_computed_while_a_template_compiles(source: str) -> None:
    template = Template("{% if go %}" + source + "{% endif %}fine")
    assert template.render({"go": False}) == "fine"


def test_values_are_shown_as_jinja_shows_them() -> None:
    source = "{{ 1 }} {{ 1.5 }} {{ none }} {{ true }} {{ missing }}|{{ 'a' ~ 1 }} {{ text|upper }}"
    assert Template(source).render({"text": "é"}) == "1 1.5 None True |a1 É"


def test_variables_may_have_any_name() -> None:
    assert Template("{{ args }}").render({"self": 1, "args": 2}) == "2"


@pytest.mark.parametrize("source", ["{{ ''.__class__ }}{{ 1 // 0 }}", "{{ messages.append(1) }}", "{{ a.b.c }}"])
def test_whatever_goes_wrong_is_one_kind_of_error(source: str) -> None:
    with pytest.raises(TemplateFailed):
        Template(source).render({"messages": []})
