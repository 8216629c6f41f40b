"""L1: what speculation needs of sampling: the distribution itself, and drafts that are taken or replaced."""

from __future__ import annotations

import torch

from enginecore.testing import layer_references, references
from enginecore.testing.case import Case, CaseContext
from enginecore.testing.cases.sampling import RULES, logits_of


def distribution(ctx: CaseContext) -> None:
    """Every rule: zero for what is dropped, the rest in proportion; a row without a finite logit is all zero."""
    op = ctx.require_op("sampling_probabilities", "float32")
    rules, vocab = list(RULES.values()), 513
    logits = logits_of(ctx, len(rules) + 1, vocab)
    logits[-1] = -torch.inf
    settings = [torch.tensor([getattr(rule, name) for rule in [*rules, rules[0]]], dtype=dtype, device=ctx.device)
                for name, dtype in (("temperature", torch.float32), ("top_k", torch.int64), ("top_p", torch.float32),
                                    ("min_p", torch.float32))]  # fmt: skip
    out = op(logits.clone().to(ctx.device), *settings)
    ctx.backend.synchronize()
    ctx.check(out.dtype == torch.float32 and out.shape == logits.shape, f"{out.dtype} {tuple(out.shape)} came back")
    expected = torch.zeros(logits.shape, dtype=torch.float64)
    for row, rule in enumerate(rules):
        if rule.temperature == 0:
            expected[row, int(logits[row].argmax())] = 1.0
            continue
        kept = sorted(references.kept_ids(logits[row], rule.temperature, rule.top_k, rule.top_p, rule.min_p))
        expected[row, kept] = (logits[row].double() / rule.temperature)[kept].softmax(0)
    ctx.check(not out[-1].any(), "a row of minus infinities must give zeros")
    for row, rule in enumerate(rules):
        dropped = (expected[row] == 0) & (out[row].cpu() != 0)
        ctx.check(not dropped.any(), f"row {row} ({rule}): {int(dropped.sum())} dropped ids have a probability")
    ctx.close(out[:-1], expected[:-1], "float32", "probabilities", op="sampling_probabilities")


def drafts(certain: bool) -> Case:
    """Rows with no draft, one, several; taken, refused at each place; with a draft's distribution or certain of it."""

    def run(ctx: CaseContext) -> None:
        op = ctx.require_op("rejection_sample", "float32")
        counts, vocab = (0, 1, 3, 5, 2, 4, 1, 5), 61
        starts = torch.tensor([0, *counts]).cumsum(0)
        total = int(starts[-1])
        target, draft = ctx.normal(total, vocab).softmax(-1), ctx.normal(total, vocab).softmax(-1)
        ids = torch.tensor([ctx.integer(0, vocab - 1) for _ in range(total)])
        for at in range(0, total, 2):  # a draft that the target likes, so that some rows go far
            ids[at] = int(target[at].argmax())
        bonus = torch.tensor([ctx.integer(0, vocab - 1) for _ in counts])
        accept, redraw = ctx.uniform(total) * 0.6, ctx.uniform(len(counts))
        given = None if certain else draft
        moved = [x.to(ctx.device) for x in (ids, starts.to(torch.int32), target)]
        ends = [x.to(ctx.device) for x in (bonus, accept, redraw)]
        out = op(*moved, None if given is None else given.to(ctx.device), *ends, 6)
        ctx.backend.synchronize()
        ctx.check(out.dtype == torch.int64 and out.shape == (len(counts), 6), f"{out.dtype} {tuple(out.shape)}")
        lengths = set()
        for row in range(len(counts)):
            part = slice(int(starts[row]), int(starts[row + 1]))
            expected = layer_references.speculate(
                ids[part].tolist(), target[part].cpu(), None if given is None else given[part].cpu(), int(bonus[row]),
                accept[part].tolist(), float(redraw[row]),
            )  # fmt: skip
            lengths.add(len(expected) - 1 - counts[row])
            got = [token for token in out[row].tolist() if token >= 0]
            ctx.check(got == expected, f"row {row} with {counts[row]} drafts gives {got}, and {expected} is due")
        assert len(lengths) > 1, "some rows must take all drafts and some not"

    return Case(1, "rejection_sample", "certain" if certain else "with_distribution", run)


def cases() -> list[Case]:
    return [Case(1, "sampling_probabilities", "every_rule", distribution), drafts(True), drafts(False)]
