"""The reference for the engine: plain decoding by the model's own attention, with no cache and no engine.

Every token costs a forward over everything before it. What the engine adds (slots, masks, packing,
drafts, batches) has no part in it, so a test that finds both equal has tested all of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from slipstream.core.params import SamplingParams
from slipstream.engine.engine import Engine
from slipstream.logits.pipeline import LogitsPipeline


@dataclass(frozen=True)
class Request:
    """What is asked: of the engine, or of the reference."""

    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int


@torch.inference_mode()
def plain_decode(
    model: PreTrainedModel, request: Request, *, vocab_size: int, eos_ids: Iterable[int] = ()
) -> list[int]:
    """Output tokens of a request with max_tokens, the end token included. Stop strings are not applied.

    The model must not be held by a `Runner`: give a twin.
    """
    params, tokens = request.params, list(request.prompt)
    stop = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
    pipeline = LogitsPipeline(params, vocab_size, stop, len(tokens))
    for _ in range(params.max_tokens or 0):
        row = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]  # [V]
        tokens.append(pipeline.token(row, tokens, request.seed, len(tokens)))
        if tokens[-1] in stop:
            break
    return tokens[len(request.prompt) :]


def run_all(engine: Engine, requests: Sequence[Request], *, arrive: int = 0) -> list[list[int]]:
    """Output tokens of all requests, decoded together.

    arrive: requests added before each step; 0 adds all at once. Checks on the way that events and
    sequences tell the same.
    """
    ids: list[int] = []
    told: dict[int, list[int]] = {}
    waiting = list(requests)
    while waiting or engine.has_work:
        for request in waiting[: arrive or None]:
            ids.append(engine.add(request.prompt, request.params, seed=request.seed))
        del waiting[: arrive or len(waiting)]
        rows = {i: row for i in ids if (row := engine.find(i)) is not None}
        for event in engine.step():
            told.setdefault(event.seq_id, []).extend(event.tokens)
            if rows[event.seq_id].output != told[event.seq_id]:
                raise AssertionError(f"events of row {event.seq_id} tell other tokens than its sequence")
    return [told[i] for i in ids]
