"""Do two models speak the same tokens?"""

from __future__ import annotations

from typing import Any

import pytest

from slipstream.errors import DrafterError
from slipstream.model.vocab import shared_vocabulary
from slipstream.testing.tiny import tiny_tokenizer


class Named:
    """As much of a tokenizer as is asked for."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.names[i] for i in ids]


@pytest.mark.parametrize(("target", "draft", "shared"), [(258, 258, 258), (300, 258, 258), (258, 400, 258)])
def test_heads_of_other_widths_share_the_tokenizers_ids(target: int, draft: int, shared: int) -> None:
    tokenizer: Any = tiny_tokenizer()
    assert shared_vocabulary(tokenizer, tokenizer, target, draft) == shared


def test_the_first_id_that_differs_is_named() -> None:
    with pytest.raises(DrafterError, match=r"id 1 is 'b' for the target and 'x'"):
        shared_vocabulary(Named("a", "b", "c"), Named("a", "x", "c"), 3, 3)


def test_a_few_more_tokens_on_one_side_are_fine_and_many_are_not() -> None:
    names = [f"t{i}" for i in range(100)]
    assert shared_vocabulary(Named(*names), Named(*names[:95]), 100, 128) == 95
    with pytest.raises(DrafterError, match="knows only 50"):
        shared_vocabulary(Named(*names), Named(*names[:50]), 100, 128)
