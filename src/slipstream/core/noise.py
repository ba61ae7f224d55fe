"""Noise that is a pure function of (seed, position, purpose, token).

Speculation changes how many random numbers a step would consume, so a stream of them would make the
output depend on the drafter. Keying the noise by the *absolute output position* removes that: at one
position the target's token is the same whether it was drafted or not, alone or in a batch (the idea
of drafter-invariant speculation, arXiv 2408.07978). Tokens are drawn by the Gumbel-max rule:
argmax over the tokens of log p + G, G = -log(-log u), has the law p.

**One more key, the pass.** A pass has an *origin*, the absolute position of its root; origins only grow, so
no two passes of a request share one. Noise that a pass may look at *behind* the place where its output ends
must be keyed by the origin as well: its value has had a say in where the output ended, so the next pass,
which starts there, would meet noise that is no longer independent of what is committed. Which noise is that?

- TOKEN: a rule draws the target's token at the nodes it keeps and at the one it ends on, so the next pass
  starts behind everything that was looked at. Position alone is safe, and is what makes the sample the same
  with and without speculation. TOKEN noise is never keyed by the origin.
- ACCEPT under plain rejection and at multi-candidate nodes: tested in order until the first failure, and
  the output ends there. Position alone would do. Block verification takes the *largest* position that
  passes, so it looks at all of them: position alone is wrong.
- RESIDUAL: one draw, at the end of the output. Position alone would do.
- DRAFT: the tokens behind the end were drawn too. Rejection and multi-candidate nodes never compared them
  with anything, but block verification did, and so does a controller that is told how long a draft was when
  the draft stopped on its own confidence. Position alone is wrong.

So everything but TOKEN is keyed by the origin, whatever the rule: `Law.draw` and the view see to it. The
tests enumerate reuse exactly: harmless under rejection and at multi-candidate nodes, a wrong law under
block verification, for ACCEPT alone and for DRAFT alone.

The generator is the 64-bit finaliser of SplitMix64 applied to the mixed key. It is written with
torch integers, which wrap, so every device gives the same bits.
"""

from __future__ import annotations

from enum import IntEnum

import torch

_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


class Purpose(IntEnum):
    """Independent streams at one position. Two draws that both matter never share one.

    All but TOKEN are to be keyed by the pass's origin too (see above).
    """

    TOKEN = 0  # the target's own draw
    ACCEPT = 1  # the uniform of a ratio test
    RESIDUAL = 2  # the draw after a rejection
    DRAFT = 3  # a drafter's draw


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX2) & _MASK
    return value ^ (value >> 31)


def _key(seed: int, position: int, purpose: Purpose, index: int, origin: int | None) -> int:
    """64-bit key; every part goes through its own round so that near keys do not correlate."""
    if purpose is Purpose.TOKEN and origin is not None:
        raise ValueError("the target's own draw must not depend on where a pass began")
    key = _mix((seed + _GOLDEN) & _MASK)
    for part in (position, int(purpose), index, *(() if origin is None else (origin,))):
        key = _mix((key ^ ((part + 1) * _GOLDEN)) & _MASK)
    return key


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64 (torch shifts arithmetically)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(
    seed: int, position: int, purpose: Purpose, index: int = 0, *, origin: int | None = None
) -> float:
    """One number of [0, 1) with 53 bits. `index` separates draws of one purpose at one position."""
    return (_mix(_key(seed, position, purpose, index, origin)) >> 11) * 2.0**-53


def gumbel(
    tokens: torch.Tensor,
    seed: int,
    position: int,
    purpose: Purpose,
    index: int = 0,
    *,
    origin: int | None = None,
) -> torch.Tensor:
    """Standard Gumbel noise for token ids [n] (int64), as float64 [n] on their device."""
    x = tokens * _signed(_GOLDEN) + _signed(_key(seed, position, purpose, index, origin))  # [n], wraps
    x = (x ^ _shift(x, 30)) * _signed(_MIX1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX2)
    x = _shift(x ^ _shift(x, 31), 11)  # 53 bits
    u = (x.double() + 0.5) * 2.0**-53  # strictly inside (0, 1)
    return -torch.log(-torch.log(u))
