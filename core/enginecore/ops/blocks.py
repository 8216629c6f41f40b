"""GGUF's simple blocks as numbers: 32 inputs with a scale each, some with a minimum.

    q4_0  scale f16 | 16 bytes                     scale * (code - 8)
    q4_1  scale f16 | minimum f16 | 16 bytes       scale * code + minimum
    q5_0  scale f16 | 32 bits | 16 bytes           scale * (code - 16), bit i of the bits being the fifth of code i
    q5_1  scale f16 | minimum f16 | 32 bits | 16 bytes
    q8_0  scale f16 | 32 signed bytes              scale * code

Codes 0 to 15 lie in the low halves of the 16 bytes, 16 to 31 in the high ones. Each step is one rounding to float32, in
the order above, so that the numbers are those of ggml's own tools to the last bit.

Shapes: S blocks, B bytes of a block.
"""

from __future__ import annotations

import torch

#: scheme -> (offset of the codes, has a minimum, has fifth bits); None of a nibble for "q8_0".
_NIBBLES = {"q4_0": (8, False, False), "q4_1": (0, True, False), "q5_0": (16, False, True), "q5_1": (0, True, True)}

UNPACKED = frozenset({*_NIBBLES, "q8_0"})


def unpack_blocks(scheme: str, blocks_SB: torch.Tensor) -> torch.Tensor:
    """float32 [S, 32], on the device of `blocks_SB` (uint8). `scheme` is one of UNPACKED."""
    scale_S1 = _half(blocks_SB, 0)
    if scheme == "q8_0":
        return blocks_SB[:, 2:].view(torch.int8).float().mul_(scale_S1)
    offset, has_minimum, has_fifth = _NIBBLES[scheme]
    at = 4 if has_minimum else 2
    packed = blocks_SB[:, -16:]
    codes = torch.empty(len(blocks_SB), 2, 16, dtype=torch.uint8, device=blocks_SB.device)
    torch.bitwise_and(packed, 15, out=codes[:, 0])
    torch.bitwise_right_shift(packed, 4, out=codes[:, 1])
    if has_fifth:
        shifts = torch.arange(8, dtype=torch.uint8, device=blocks_SB.device)
        bits = (blocks_SB[:, at : at + 4, None] >> shifts) & 1
        codes |= (bits << 4).view(len(blocks_SB), 2, 16)
    values = codes.view(-1, 32).float()
    if offset:
        values -= offset
    values *= scale_S1
    if has_minimum:
        values += _half(blocks_SB, 2)
    return values


def _half(blocks_SB: torch.Tensor, at: int) -> torch.Tensor:
    return blocks_SB[:, at : at + 2].contiguous().view(torch.float16).float()
