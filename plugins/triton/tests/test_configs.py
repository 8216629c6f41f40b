"""Tuning configs are data with rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from enginecore_triton import configs


def write(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(configs, "_FOLDER", folder)
    configs.table.cache_clear()
    configs._pick.cache_clear()
    (folder / "op.json").write_text(text)


@pytest.fixture(autouse=True)
def forget() -> object:
    yield
    configs.table.cache_clear()
    configs._pick.cache_clear()


def test_the_first_row_that_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        tmp_path, monkeypatch,
        """{"sm_90": [{"upto": {"a": 2, "b": 4}, "constants": {"N": 1}}, {"upto": {"a": 9}, "constants": {"N": 2}},
                      {"constants": {"N": 3}, "options": {"num_warps": 8}}],
            "default": [{"constants": {"N": 4}}]}""",
    )  # fmt: skip
    found = [configs.pick("op", "sm_90", a=a, b=b).constants["N"] for a, b in [(2, 4), (2, 5), (3, 1), (10, 0)]]
    assert found == [1, 2, 2, 3]
    assert configs.pick("op", "sm_75", a=1).constants == {"N": 4}, "an architecture that has no rows"
    assert configs.pick("op", "sm_90", b=1).constants == {"N": 1}, "a size that is not given is no bound"
    assert configs.pick("op", "sm_90", a=10).keywords == {"N": 3, "num_warps": 8, "enable_fp_fusion": True}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"sm_90": [{}]}', "no 'default'"),
        ('{"default": [{"upto": {"a": 1}}]}', "last row"),
        ('{"default": [{}], "sm_90": []}', "last row"),
    ],
)
def test_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str) -> None:
    write(tmp_path, monkeypatch, text)
    with pytest.raises(ValueError, match=problem):
        configs.pick("op", "sm_90")


def test_what_is_shipped_keeps_them() -> None:
    assert len(configs.names()) > 3
    for op in configs.names():
        for rows in configs.table(op).values():
            warps = [row.options.get("num_warps", 4) for row in rows]
            assert all(count in (1, 2, 4, 8, 16) for count in warps)
