"""How much memory a cached token takes, measured with the very drafters that will run, and how many fit."""

from __future__ import annotations

import torch

from slipstream.core.params import SamplingParams
from slipstream.engine.session import Session
from slipstream.errors import CapacityError
from slipstream.model import memory
from slipstream.model.cache import WIDTH
from slipstream.model.progress import size

SHARE = 0.5  # of what is free after loading; activations, prompts and everything else need the rest
_WARM_UP_TOKENS = 8


def bytes_per_token(session: Session) -> int:
    """Of target and drafters together, from a short answer, which also warms everything up.

    Every step of it drafts, whatever the controller thinks of that, which learns nothing of it.
    """
    engine = session.engine
    drafter, controller = engine.drafter, engine.controller
    engine.set_drafter(drafter)
    before = engine.memory_bytes
    rows = session.submit([0], SamplingParams(max_tokens=_WARM_UP_TOKENS, ignore_eos=True))
    most = before
    while not rows[0].finished:
        engine.step()
        most = max(most, engine.memory_bytes if not rows[0].finished else 0)
    engine.set_drafter(drafter, controller)
    return max((most - before) // WIDTH, 1)


def limit_cache(session: Session, budget: int | None) -> int:
    """Set the engine's limit from a budget in bytes (None: half of what is available); gives the tokens.

    Raises CapacityError if not even one block fits.
    """
    each = bytes_per_token(session)
    device = session.engine.runner.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory.available()
    total = int(free * SHARE) if budget is None else budget
    tokens = total // each // WIDTH * WIDTH
    if tokens < WIDTH:
        raise CapacityError(
            f"the cache budget of {size(total)} holds {total // each} tokens, at least {WIDTH} are needed:"
            " free memory, or raise --cache-memory"
        )
    session.engine.limit_cache(tokens)
    return tokens
