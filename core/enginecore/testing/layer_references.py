"""What the ops of experts, adapters and recurrent layers must compute, in float64 on the host, one number after another
where that is plainest. As with `references`, nothing is shared with what the engine runs.

Shape suffixes as in `enginecore.ops.schema`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from enginecore.testing.references import f64


def _gate(x: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return x / (1 + torch.exp(-x))
    if activation == "gelu":
        return x * (1 + torch.erf(x / math.sqrt(2))) / 2
    return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def moe_experts(
    x_TE: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    activation: str,
) -> torch.Tensor:  # fmt: skip
    x, weights, gate_up, down = f64(x_TE), f64(weights_TK), f64(gate_up), f64(down)
    out, inner = torch.zeros_like(x), gate_up.shape[1] // 2
    for token, experts in enumerate(ids_TK.tolist()):
        for place, expert in enumerate(experts):
            if expert >= 0:
                both = gate_up[expert] @ x[token]
                out[token] += weights[token, place] * (down[expert] @ (_gate(both[:inner], activation) * both[inner:]))
    return out


def lora_shrink(x_TI: torch.Tensor, a_SNRI: torch.Tensor, adapter_T: torch.Tensor) -> torch.Tensor:
    x, a = f64(x_TI), f64(a_SNRI)
    out = torch.zeros(a.shape[0], x.shape[0], a.shape[2], dtype=x.dtype)
    for token, adapter in enumerate(adapter_T.tolist()):
        if adapter >= 0:
            for part in range(a.shape[0]):
                out[part, token] = a[part, adapter] @ x[token]
    return out


def lora_expand(
    h_STR: torch.Tensor, b: list[torch.Tensor], adapter_T: torch.Tensor, y_TO: torch.Tensor
) -> torch.Tensor:
    h, out = f64(h_STR), f64(y_TO)
    for token, adapter in enumerate(adapter_T.tolist()):
        if adapter >= 0:
            added = [f64(slices[adapter]) @ h[part, token] for part, slices in enumerate(b)]
            out[token, : sum(map(len, added))] += torch.cat(added)
    return out


def _sequences(
    states: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor, known: torch.Tensor
) -> Iterator[tuple[range, int, torch.Tensor]]:
    bounds = starts.tolist()
    for index, (slot, has) in enumerate(zip(slots.tolist(), known.tolist(), strict=True)):
        state = f64(states[slot]) if has and slot >= 0 else torch.zeros(states.shape[1:], dtype=torch.float64)
        yield range(bounds[index], bounds[index + 1]), slot, state


def causal_conv(
    x_TC: torch.Tensor, weight_CW: torch.Tensor, bias_C: torch.Tensor | None, states: torch.Tensor,
    starts: torch.Tensor, slots: torch.Tensor, known: torch.Tensor, silu: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The outputs, and the states afterwards."""
    x, weight, after = f64(x_TC), f64(weight_CW), f64(states)
    out = torch.zeros_like(x)
    for rows, slot, past_CW in _sequences(states, starts, slots, known):
        window = list(past_CW.unbind(1))
        for t in rows:
            window.append(x[t])
            y = sum((weight[:, tap] * window[tap] for tap in range(len(window))), torch.zeros_like(x[t]))
            y = y if bias_C is None else y + f64(bias_C)
            out[t] = _gate(y, "silu") if silu else y
            window.pop(0)
        if slot >= 0 and len(rows):
            after[slot] = torch.stack(window, 1)
    return out, after


def _steps(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    dt = f64(dt) if bias is None else f64(dt) + f64(bias)
    return torch.log(1 + torch.exp(-dt.abs())) + dt.clamp(min=0) if softplus else dt


def selective_scan(
    x_TC: torch.Tensor, dt_TC: torch.Tensor, a_CD: torch.Tensor, b_TD: torch.Tensor, c_TD: torch.Tensor,
    skip_C: torch.Tensor | None, gate_TC: torch.Tensor | None, bias_C: torch.Tensor | None, softplus: bool,
    states: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor, known: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    x, dt, a, b, c = f64(x_TC), _steps(dt_TC, bias_C, softplus), f64(a_CD), f64(b_TD), f64(c_TD)
    out, after = torch.zeros_like(x), f64(states)
    for rows, slot, state in _sequences(states, starts, slots, known):
        for t in rows:
            for d in range(a.shape[1]):
                state[:, d] = torch.exp(dt[t] * a[:, d]) * state[:, d] + dt[t] * x[t] * b[t, d]
            y = (state * c[t]).sum(1)
            y = y if skip_C is None else y + f64(skip_C) * x[t]
            out[t] = y if gate_TC is None else y * _gate(f64(gate_TC)[t], "silu")
        if slot >= 0 and len(rows):
            after[slot] = state
    return out, after


def ssd_scan(
    x_THP: torch.Tensor, dt_TH: torch.Tensor, a_H: torch.Tensor, b_TGD: torch.Tensor, c_TGD: torch.Tensor,
    skip_H: torch.Tensor | None, gate_THP: torch.Tensor | None, bias_H: torch.Tensor | None, softplus: bool,
    states: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor, known: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Each head is a selective scan whose channels share one step and one decay."""
    heads, width = x_THP.shape[1:]
    per_group = heads // b_TGD.shape[1]
    out, after = torch.zeros(x_THP.shape, dtype=torch.float64), f64(states)
    steps = _steps(dt_TH, bias_H, softplus)
    for head in range(heads):
        group = head // per_group
        out[:, head], after[:, head] = selective_scan(
            x_THP[:, head], steps[:, head, None].expand(-1, width), f64(a_H)[head].expand(width, states.shape[3]),
            b_TGD[:, group], c_TGD[:, group], None if skip_H is None else skip_H[head].expand(width),
            None if gate_THP is None else gate_THP[:, head], None, False, states[:, head], starts, slots, known,
        )  # fmt: skip
    return out, after


def speculate(
    drafts: list[int], target_DV: torch.Tensor, draft_DV: torch.Tensor | None, bonus: int, accept: list[float],
    redraw: float,
) -> list[int]:  # fmt: skip
    """One row of rejection_sample: the tokens it ends with."""
    taken: list[int] = []
    for place, token in enumerate(drafts):
        p = f64(target_DV[place])
        q = torch.zeros_like(p) if draft_DV is None else f64(draft_DV[place])
        if draft_DV is None:
            q[token] = 1.0
        if accept[place] * float(q[token]) < float(p[token]):
            taken.append(token)
            continue
        rest = (p - q).clamp(min=0).cumsum(0)
        return [*taken, int((rest <= redraw * float(rest[-1])).sum())]
    return [*taken, bonus]
