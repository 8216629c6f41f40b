"""`enginecore bench kv-policies`: the baselines are sound, and the report says what was run."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from enginecore.cli.bench_kv_contiguous import POLICIES, BuddyMemory, ContiguousScheduler, reserved_tokens
from enginecore.cli.bench_kv_policies import ALL, Plan
from enginecore.cli.bench_kv_published import PUBLISHED, WIDTHS
from enginecore.cli.bench_kv_report import draw_report, measure_kv_policies, table_of
from enginecore.cli.bench_kv_sharing import saved
from enginecore.cli.main import main

from tests.scheduler.fake_executor import Harness, request


@pytest.mark.parametrize("num_blocks", [1, 7, 64, 981])
def test_pieces_never_overlap_and_all_come_back_together(num_blocks: int) -> None:
    rng, memory = random.Random(num_blocks), BuddyMemory(num_blocks)
    largest = 1 << num_blocks.bit_length() - 1
    taken: list[tuple[int, int]] = []
    refused = 0
    for _ in range(3000):
        if taken and rng.random() < 0.5:
            memory.give_back(*taken.pop(rng.randrange(len(taken))))
        else:
            wanted = rng.randint(1, largest)
            piece = memory.take(wanted)
            if piece is None:
                refused += 1
                continue
            assert wanted <= 1 << piece[1] < 2 * wanted
            taken.append(piece)
        blocks = [block for start, order in taken for block in range(start, start + (1 << order))]
        assert len(set(blocks)) == len(blocks) == num_blocks - memory.num_free
        assert all(0 <= block < num_blocks for block in blocks)
    for piece in taken:
        memory.give_back(*piece)
    assert refused and memory.num_free == num_blocks and memory.take(largest) is not None


def test_what_each_policy_sets_aside() -> None:
    asked = request("a", [1] * 100, 25)
    assert [reserved_tokens(policy, asked, 2048) for policy in POLICIES] == [125, 132, 2048]
    assert reserved_tokens("pow2", request("b", [1] * 1500, 520), 2048) == 2048


@pytest.mark.parametrize("policy", POLICIES)
def test_contiguous_memory_gives_the_same_answers_in_one_piece_each(policy: str) -> None:
    harness = Harness(num_blocks=40, max_num_seqs=8, max_model_len=64, prefix_caching=False)
    harness.scheduler = ContiguousScheduler(harness.config, policy)
    rng = random.Random(1)
    requests = [request(f"r{i}", [rng.randrange(5)] * rng.randint(1, 30), rng.randint(1, 30)) for i in range(40)]
    harness.add(*requests)
    most = 0
    while harness.scheduler.has_work():
        harness.step()
        table = harness.scheduler.running
        most = max(most, len(table))
        for slot in table.order.tolist():
            blocks = table.sequence(slot).table.blocks
            assert blocks == list(range(blocks[0], blocks[0] + len(blocks)))
    for each in requests:
        harness.check(each)
    assert harness.scheduler._memory.num_free == 40 and harness.scheduler.stats().num_preemptions == 0
    assert most == 2 if policy == "max" else most > 2


def test_the_report_has_every_row_and_paging_wins(tmp_path: Path) -> None:
    told: list[str] = []
    report = measure_kv_policies(Plan(seconds=12, lengths=("sharegpt",), resolution=2.0), 4, told.append)
    policies = report["policies"]["sharegpt"]["policies"]
    assert list(policies) == list(ALL) and len(told) == len(ALL) + 1
    for key in ("mean_running", "sustained_rate", "token_states"):
        values = [policies[policy][key] for policy in ("paged", "oracle", "max")]
        assert values == sorted(values, reverse=True) and values[0] > 1.5 * values[1], key
    for figures in policies.values():
        shares = [figures[key] for key in ("token_states", "reserved", "internal_waste", "external_waste")]
        assert sum(shares) == pytest.approx(1, abs=1e-6) and min(shares) >= -1e-9
    assert policies["max"]["mean_running"] <= 7, "15.7 thousand slots hold seven sequences of 2,048"
    assert policies["paged"]["internal_waste"] + policies["paged"]["reserved"] < 0.04
    assert policies["oracle"]["internal_waste"] < 0.01 < 0.3 < policies["max"]["internal_waste"]
    assert [row["what"] for row in report["rows"]] == [each.what for each in PUBLISHED["sharegpt"].values()]
    assert all((row["why"] is None) == row["within"] for row in report["rows"])
    text = "\n".join(table_of(report))
    assert "log-normal" in text and all(row["what"] in text for row in report["rows"])
    assert all(row["why"] in text for row in report["rows"] if row["why"])
    json.dumps(report)
    for name in ("kv.svg", "kv.png"):
        draw_report(report, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 10_000


def test_what_sharing_saves() -> None:
    """Samples of 160 tokens, ten blocks, that answer with few: one of four tables' worth is held. Beams share more."""
    samples = [saved("160:16", width, beams=False, num_requests=4) for width in WIDTHS]
    assert samples == sorted(samples) and 0.35 < samples[0] < 0.5 and 0.7 < samples[2] < 10 / 12
    assert saved("160:64", 4, beams=True, num_requests=4) > saved("160:64", 4, beams=False, num_requests=4) > 0.4
    assert saved("16:1", 1, beams=True, num_requests=4) == 0


@pytest.mark.parametrize(
    ("line", "param"),
    [(("--lengths", "sharegpt,chat"), "lengths"), (("--plot", "x.pdf"), "plot"), (("--seconds", "0"), "seconds")],
)
def test_bad_settings_are_refused_before_anything_runs(
    line: tuple[str, ...], param: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "kv-policies", *line]) != 0
    shown: Any = capsys.readouterr()
    assert param in shown.err
