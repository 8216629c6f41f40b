from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from enginecore.errors import ParameterError
from enginecore.frontend.chat import ChatRenderer
from enginecore.frontend.template_pool import TemplatePool

ENDLESS = (
    "{% if messages[0].content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}"
)
SOURCE = ENDLESS + (
    "{{ messages[0].content }}{{ 'x' * messages[0].size }}{% if refuse %}{{ raise_exception('no') }}{% endif %}"
)


@pytest.fixture
def pool() -> Iterator[TemplatePool]:
    pool = TemplatePool(SOURCE, size=2, seconds=1)
    yield pool
    pool.close()


def test_renders_and_reports_errors(pool: TemplatePool) -> None:
    assert pool.render({"messages": [{"content": "é😀", "size": 2}]}) == "é😀xx"
    with pytest.raises(ParameterError, match="refused the messages: no"):
        pool.render({"messages": [{"content": "", "size": 0}], "refuse": True})
    large = "y" * 3_000_000
    assert pool.render({"messages": [{"content": large, "size": 0}]}) == large


def test_a_template_that_never_ends_is_stopped_and_others_go_on(pool: TemplatePool) -> None:
    errors: list[Exception] = []

    def endless() -> None:
        try:
            pool.render({"messages": [{"content": "loop", "size": 0}]})
        except ParameterError as error:
            errors.append(error)

    thread = threading.Thread(target=endless)
    thread.start()
    assert pool.render({"messages": [{"content": "fine", "size": 0}]}) == "fine"
    thread.join(20)
    assert len(errors) == 1 and "took longer than 1 s" in str(errors[0])
    assert pool.render({"messages": [{"content": "again", "size": 0}]}) == "again"


def test_a_template_that_eats_memory_is_refused(pool: TemplatePool) -> None:
    with pytest.raises(ParameterError):
        pool.render({"messages": [{"content": "a", "size": 10**11}]})
    assert pool.render({"messages": [{"content": "b", "size": 0}]}) == "b"


def test_a_process_that_died_is_replaced(pool: TemplatePool) -> None:
    pool.render({"messages": [{"content": "a", "size": 0}]})
    worker = pool._slots.get()
    assert worker is not None
    worker._process.kill()
    worker._process.wait()
    pool._slots.put(worker)
    assert pool.render({"messages": [{"content": "b", "size": 0}]}) == "b"


def test_works_under_a_renderer(pool: TemplatePool) -> None:
    renderer = ChatRenderer("{% for m in messages %}{{ m.role }}{% endfor %}", {})
    inner = TemplatePool(renderer.source or "")
    try:
        assert (
            ChatRenderer(renderer.source, {}, inner.render).render([{"role": "developer", "content": "x"}]) == "system"
        )
    finally:
        inner.close()
