"""`--html`: a page that stands alone, holds what was measured, and trusts nothing that a server says."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from enginecore.cli.bench_charts import distributions, ratio_bars
from enginecore.cli.bench_compare import FIGURES, RATES
from enginecore.cli.bench_html import page_of
from enginecore.cli.main import main

from tests.cli.stub_server import StubServer

pytest.importorskip("matplotlib")
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Elements that close in the order in which they open, their ids, and the text outside of pictures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page(path: Path) -> Page:
    text = path.read_text(encoding="utf-8")
    found = Page(text)
    assert all(link.startswith("#") for link in found.links), "nothing is fetched from anywhere"
    assert "script" not in found.seen and "@import" not in text and "url(http" not in text
    assert "Machine and versions" in found.text and "enginecore bench" in found.text
    return found


def test_pages_of_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StubServer(["a", "b", "c"]) as one, StubServer(["a", "b", "c"]) as two:
        common = ["--num-requests", "3", "--ttft-slo", "1000", "--html"]
        single, sweep, both = (tmp_path / f"{name}.html" for name in ("single", "sweep", "both"))
        assert main(["bench", "serve", "--url", one.url, *common, str(single)]) == 0
        assert main(["bench", "serve", "--url", one.url, "--sweep-concurrency", "1,2", *common, str(sweep)]) == 0
        line = ["bench", "compare", f"<b>two={two.url}", "--ours", one.url, "--rounds", "2"]
        assert main([*line, *common, str(both)]) == 0
    assert page(single).seen.count("svg") == 1
    assert page(sweep).seen.count("svg") == 2 and "goodput.share" in page(sweep).text
    compared = page(both)
    assert compared.seen.count("svg") == 2 and "b" not in set(compared.seen) - {"b"} and "<b>two" in compared.text
    report = json.loads(re.search(r"(\{.*\})", compared.text[compared.text.index("All figures") :], re.DOTALL)[1])  # type: ignore[index]
    assert list(report["servers"]) == ["enginecore", "<b>two"] and "samples" not in report


def test_pages_of_the_engine_hold_the_full_configuration(
    smollm2: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sim = [smollm2, "--device", "sim", "--max-model-len", "512", "--num-blocks", "64", "--num-requests", "2"]
    target = tmp_path / "page.html"
    assert main(["bench", "throughput", *sim, "--html", str(target), "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    shown = page(target)
    assert all(name in shown.text for name in report["settings"]) and report["system_fingerprint"] in shown.text
    progress = report["progress"]
    assert len(progress["at_s"]) == len(progress["running"]) == min(100, report["num_steps"] - 1)
    assert max(progress["running"]) == report["peak_running"] and progress["at_s"] == sorted(progress["at_s"])
    line = [*sim, "--batch-sizes", "1,2", "--input-len", "8", "--output-len", "2", "--repeat", "1"]
    assert main(["bench", "latency", *line, "--html", str(target)]) == 0
    assert page(target).seen.count("svg") == 1 and "batch size" in page(target).text


def test_what_a_server_says_is_text() -> None:
    evil = "<script>alert(1)</script>&amp;"
    text = page_of({"benchmark": "serve", "model": evil, "notes": [evil], "errors": [], "ttft_ms": None})
    shown = Page(text)
    assert "script" not in shown.seen and shown.text.count(evil) >= 3


def test_pictures_of_few_and_odd_figures() -> None:
    ratio = {"median": 2.0, "min": 1.5, "max": 2.5}
    ratios: dict[str, dict[str, Any]] = {
        "x": {**dict.fromkeys(FIGURES), "output_tok_per_s": ratio},
        "y": {"ttft_ms.p50": ratio},
    }
    for picture in (
        ratio_bars(ratios, FIGURES, list(RATES)),
        distributions({"one": {"ttft_ms": [3.0]}, "two": {"ttft_ms": []}}, {"ttft_ms": 2.0}),
        distributions({"one": {"itl_ms": [0.0] * 50 + [1.0, 1e6]}}, {}),
    ):
        assert picture.startswith("<svg") and picture.rstrip().endswith("</svg>") and not re.search("<g id=", picture)


@pytest.mark.parametrize(
    ("name", "said"), [("x.txt", "html must end in .html"), ("no/x.html", "html: there is no folder")]
)
@pytest.mark.parametrize("command", ["serve", "throughput", "latency", "compare"])
def test_a_page_that_cannot_be_written_is_refused_first(
    command: str, name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", command, "no-such-model", "--html", str(tmp_path / name)]) == 2
    assert said in capsys.readouterr().err
