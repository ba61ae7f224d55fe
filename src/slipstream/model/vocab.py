"""Do two models speak the same tokens? Compared by text, id by id; padding of the head is allowed."""

from __future__ import annotations

from typing import Any

from slipstream.errors import DrafterError


def shared_vocabulary(target: Any, draft: Any, target_size: int, draft_size: int) -> int:
    """How many ids, from 0 on, mean the same token to both. Raises DrafterError at the first difference.

    Heads are often padded to different sizes (Qwen2.5: 151,665 tokens, 151,936 rows): ids beyond
    the smaller tokenizer are never drafted.
    """
    if target is None:
        raise DrafterError("a draft model is compared by vocabulary: pass the target's tokenizer")
    shared = min(len(target), len(draft), target_size, draft_size)
    ours = target.convert_ids_to_tokens(list(range(shared)))
    theirs = draft.convert_ids_to_tokens(list(range(shared)))
    for token_id, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            raise DrafterError(
                f"the draft model has another vocabulary: id {token_id} is {a!r} for the target and {b!r} for"
                " the draft; choose a draft of the same model family"
            )
    longer = max(len(target), len(draft))
    if shared < 0.9 * min(longer, target_size):
        raise DrafterError(
            f"the draft model knows only {shared} of the target's {len(target)} tokens; choose a draft of"
            " the same model family"
        )
    return shared
