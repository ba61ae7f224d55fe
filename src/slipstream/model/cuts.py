"""Does it matter into which pieces a prompt is cut? Asked of this model, on this machine.

For another number of rows another kernel may run, which rounds otherwise; then keys that were computed in
other pieces are keys of the same tokens, but other bits. Where all pieces give the same bits, what one
sequence has computed can stand in for any beginning of another's prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slipstream.model.runner import CHUNK, Runner
from slipstream.model.taps import decoder

# One token a step as when an answer is decoded, then pieces of about as many rows as kernels change at.
_SINGLE = 3
_PIECES = (5, 9, 24, 64, 160)
_LAYERS = 4  # the others are made alike, and a large model would take long


def cuts_agree(runner: Runner) -> bool:
    """Whether a drawn text has the same keys and values, bit for bit, read in one piece and in many."""
    length = min(CHUNK, runner.context)
    vocab = min(runner.vocab_size, runner.model.get_input_embeddings().weight.shape[0])
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab, (length,), generator=generator).tolist()
    cache, (whole, parted) = runner.cache, (-1, -2)
    cache.open(whole)
    cache.open(parted)
    try:
        with _first_layers(runner.model), runner.altered(None):
            runner.extend(whole, tokens)
            at = 0
            for size in (*[1] * _SINGLE, *_PIECES, length):
                runner.extend(parted, tokens[at : at + size])
                at += size
        (one,), (other,) = (cache.release(slot, [range(length)]) for slot in (whole, parted))
    finally:
        cache.close(whole)
        cache.close(parted)
    return all(torch.equal(*pair) for layer in one for pair in zip(one[layer], other[layer], strict=True))


@contextmanager
def _first_layers(model: nn.Module) -> Iterator[None]:
    inner: Any = decoder(model)
    layers = inner.layers
    inner.layers = layers[:_LAYERS]
    try:
        yield
    finally:
        inner.layers = layers
