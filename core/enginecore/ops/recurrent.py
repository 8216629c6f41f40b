"""References of the layers that carry a state from token to token, one token after another.

Sequences lie end to end: sequence i has the rows starts[i] to starts[i + 1], and its state in row slots[i] of `states`,
which counts as zero where has_state[i] is false and is overwritten with the state after the last row. A slot of -1 is
padding: its rows get an output from a zero state, and nothing is stored.

Shape suffixes: T tokens, N sequences, S slots, C channels, W taps, D state size, H heads, P head size, G groups.
Sources: Gu and Dao 2023 (selective scan), Dao and Gu 2024 (state space duality).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F


def _sequences(
    states: torch.Tensor, starts_N1: torch.Tensor, slots_N: torch.Tensor, has_state_N: torch.Tensor, exact: torch.dtype
) -> Iterator[tuple[int, int, int, torch.Tensor]]:
    """(first row, end, slot, the state before) of each sequence that has rows."""
    starts = starts_N1.tolist()
    for i, (slot, known) in enumerate(zip(slots_N.tolist(), has_state_N.tolist(), strict=True)):
        if starts[i + 1] > starts[i]:
            before = states[slot].to(exact) if known and slot >= 0 else torch.zeros_like(states[0], dtype=exact)
            yield starts[i], starts[i + 1], slot, before


def _exact(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def causal_conv(
    x_TC: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    states_SCW: torch.Tensor,
    starts_N1: torch.Tensor,
    slots_N: torch.Tensor,
    has_state_N: torch.Tensor,
    silu: bool,
    max_query_len: int,
) -> torch.Tensor:
    exact, out_TC, past = _exact(x_TC), torch.empty_like(x_TC), weight_CW.shape[1] - 1
    for start, end, slot, before_CW in _sequences(states_SCW, starts_N1, slots_N, has_state_N, exact):
        line_CL = torch.cat([before_CW, x_TC[start:end].to(exact).t()], dim=1)
        y_CT = (line_CL.unfold(1, past + 1, 1) * weight_CW.to(exact).unsqueeze(1)).sum(-1)
        if bias_C is not None:
            y_CT = y_CT + bias_C.to(exact).unsqueeze(1)
        out_TC[start:end] = (F.silu(y_CT) if silu else y_CT).t().to(x_TC.dtype)
        if slot >= 0:
            states_SCW[slot] = line_CL[:, line_CL.shape[1] - past :].to(states_SCW.dtype)
    return out_TC


def _step(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool, exact: torch.dtype) -> torch.Tensor:
    dt = dt.to(exact) if bias is None else dt.to(exact) + bias.to(exact)
    return F.softplus(dt) if softplus else dt


def selective_scan(
    x_TC: torch.Tensor,
    dt_TC: torch.Tensor,
    a_CD: torch.Tensor,
    b_TD: torch.Tensor,
    c_TD: torch.Tensor,
    skip_C: torch.Tensor | None,
    gate_TC: torch.Tensor | None,
    dt_bias_C: torch.Tensor | None,
    dt_softplus: bool,
    states_SCD: torch.Tensor,
    starts_N1: torch.Tensor,
    slots_N: torch.Tensor,
    has_state_N: torch.Tensor,
    max_query_len: int,
) -> torch.Tensor:
    exact, out_TC = _exact(x_TC), torch.empty_like(x_TC)
    step_TC = _step(dt_TC, dt_bias_C, dt_softplus, exact)
    for start, end, slot, state_CD in _sequences(states_SCD, starts_N1, slots_N, has_state_N, exact):
        for t in range(start, end):
            x_C = x_TC[t].to(exact)
            decay_CD = torch.exp(step_TC[t].unsqueeze(1) * a_CD.to(exact))
            state_CD = decay_CD * state_CD + (step_TC[t] * x_C).unsqueeze(1) * b_TD[t].to(exact)
            y_C = state_CD @ c_TD[t].to(exact)
            if skip_C is not None:
                y_C = y_C + skip_C.to(exact) * x_C
            if gate_TC is not None:
                y_C = y_C * F.silu(gate_TC[t].to(exact))
            out_TC[t] = y_C.to(x_TC.dtype)
        if slot >= 0:
            states_SCD[slot] = state_CD.to(states_SCD.dtype)
    return out_TC


def ssd_scan(
    x_THP: torch.Tensor,
    dt_TH: torch.Tensor,
    a_H: torch.Tensor,
    b_TGD: torch.Tensor,
    c_TGD: torch.Tensor,
    skip_H: torch.Tensor | None,
    gate_THP: torch.Tensor | None,
    dt_bias_H: torch.Tensor | None,
    dt_softplus: bool,
    states_SHPD: torch.Tensor,
    starts_N1: torch.Tensor,
    slots_N: torch.Tensor,
    has_state_N: torch.Tensor,
    max_query_len: int,
) -> torch.Tensor:
    exact, out_THP = _exact(x_THP), torch.empty_like(x_THP)
    heads_per_group = x_THP.shape[1] // b_TGD.shape[1]
    step_TH = _step(dt_TH, dt_bias_H, dt_softplus, exact)
    for start, end, slot, state_HPD in _sequences(states_SHPD, starts_N1, slots_N, has_state_N, exact):
        for t in range(start, end):
            x_HP = x_THP[t].to(exact)
            b_HD, c_HD = (side[t].to(exact).repeat_interleave(heads_per_group, 0) for side in (b_TGD, c_TGD))
            decay_H = torch.exp(step_TH[t] * a_H.to(exact))
            taken_HP = step_TH[t].unsqueeze(1) * x_HP
            state_HPD = decay_H[:, None, None] * state_HPD + taken_HP.unsqueeze(2) * b_HD.unsqueeze(1)
            y_HP = torch.einsum("hpd,hd->hp", state_HPD, c_HD)
            if skip_H is not None:
                y_HP = y_HP + skip_H.to(exact).unsqueeze(1) * x_HP
            if gate_THP is not None:
                y_HP = y_HP * F.silu(gate_THP[t].to(exact))
            out_THP[t] = y_HP.to(x_THP.dtype)
        if slot >= 0:
            states_SHPD[slot] = state_HPD.to(states_SHPD.dtype)
    return out_THP
