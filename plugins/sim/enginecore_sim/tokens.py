"""The token function: which token follows a sequence on the simulated device. Plain integers, no dependencies.

All arithmetic is modulo 2^64. With M(x) the splitmix64 finaliser and B an odd constant, for tokens t_0 .. t_p:

    e_p = e_{p-1} + (t_p + 1) * B^(p+1)          e_{-1} = 0: the entry that position p has in the cache
    r_p = sum over j <= p of M(e_j) * B^(j+1)    what position p reads from the cache

The best candidates for the token at p + 1 are M(r_p + k) mod V for k = 0, 1, .. 7, best first, V being the vocabulary.
Like a real key or value, e_p depends on the whole prefix, and like real attention, r_p reads every entry up to p: a
missing, stale, foreign or misplaced block changes each token that follows.
"""

from __future__ import annotations

from collections.abc import Sequence

MASK = (1 << 64) - 1
BASE = 0x9E3779B97F4A7C15
NUM_CANDIDATES = 8

#: A step in which one sequence computes these tokens in a row raises (RAISE) or ends the process at once (EXIT).
RAISE_PROMPT = (1, 0, 0, 1, 0, 0, 1, 0)
EXIT_PROMPT = (1, 1, 0, 1, 1, 0, 1, 1)


def mix(value: int) -> int:
    """The splitmix64 finaliser (Steele, Lea and Flood 2014): a bijection of 64-bit numbers that scatters them."""
    value &= MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def candidates(tokens: Sequence[int], vocab_size: int) -> list[int]:
    """The best next tokens after `tokens`, best first and without repeats."""
    entry = readout = 0
    power = 1
    for token in tokens:
        power = power * BASE & MASK
        entry = (entry + (token + 1) * power) & MASK
        readout = (readout + mix(entry) * power) & MASK
    return list(dict.fromkeys(mix(readout + k) % vocab_size for k in range(NUM_CANDIDATES)))


def expected_tokens(prompt: Sequence[int], n: int, *, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> list[int]:
    """The greedy answer to `prompt`: `n` tokens, or fewer when one of `eos_token_ids` ends it (and is included)."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(candidates(tokens, vocab_size)[0])
        if tokens[-1] in eos_token_ids:
            break
    return tokens[len(prompt) :]
