"""Attention over slots: grouped query heads, folded or not, give the same bits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slipstream.model import attention
from slipstream.model.cache import SlotCache
from slipstream.model.pack import PackRow, build_pack

CPU = torch.device("cpu")


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: list[PackRow],
    before: int,
    window: int | None = None,
) -> torch.Tensor:
    """One layer's attention [T, H·D] of rows whose slots hold `before` tokens, the first of key and value."""
    cache = SlotCache()
    for row in rows:
        cache.open(row.slot)
        if before:
            cache.append(row.slot, [{0: (key[:, :before], value[:, :before])}])
    pack = build_pack([(row, before, cache.reserve(row.slot, len(row.tokens))) for row in rows], CPU)
    output, _ = attention.slot_attention(
        SimpleNamespace(layer_idx=0),  # type: ignore[arg-type]
        query[None],
        key[None, :, before : before + query.shape[1]],
        value[None, :, before : before + query.shape[1]],
        None,
        scaling=0.1,
        sliding_window=window,
        slipstream=attention.AttentionStep(pack, cache),
    )
    return output[0].flatten(1)[: pack.count]


def tensors(kv_heads: int, group: int, lines: int, before: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(lines + 100 * group)
    shapes = ((kv_heads * group, lines, 32), (kv_heads, before + lines, 32), (kv_heads, before + lines, 32))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 2, 6, 7])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 11, 17, 40, 64])
def test_folded_heads_give_the_bits_of_heads_apart(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, group: int, count: int
) -> None:
    before = 70
    lines = -(-count // 8) * 8
    query, key, value = tensors(2, group, lines, before, dtype)
    rows = [PackRow(0, [0] * count)]
    folded = attend(query, key, value, rows, before)
    monkeypatch.setattr(attention, "FOLDED", 0)
    assert torch.equal(folded, attend(query, key, value, rows, before))
    monkeypatch.undo()
    # the definition, in float64
    q, k, v = (t.double() for t in (query[:, :count], key[:, : before + count], value[:, : before + count]))
    scores = q @ k.repeat_interleave(group, 0).transpose(1, 2) * 0.1
    hidden = torch.ones(count, before + count).triu(before + 1).bool()
    law = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    exact = (law @ v.repeat_interleave(group, 0)).transpose(0, 1).flatten(1)
    torch.testing.assert_close(folded.double(), exact, atol=0.03 if dtype == torch.bfloat16 else 1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 4])
def test_a_row_among_others_has_the_bits_it_has_alone(window: int | None) -> None:
    counts, before = (1, 3, 1, 9, 2), 20
    query, key, value = tensors(2, 3, 16, before, torch.bfloat16)
    rows = [PackRow(slot, [0] * count) for slot, count in enumerate(counts)]
    rows[3] = PackRow(3, [0] * 9, [-1, 0, 0, 1, 1, 2, 5, 6, 6])
    together = attend(query, key, value, rows, before, window)
    at = 0
    for row in rows:
        count = len(row.tokens)
        missing = -count % 8
        turned = [
            torch.cat(
                (t[:, : before * (t is not query)], t[:, before * (t is not query) + at :][:, :count]), 1
            )
            for t in (query, key, value)
        ]
        padded = [torch.nn.functional.pad(t, (0, 0, 0, missing)) for t in turned]
        alone = attend(*padded, [row], before, window)
        assert torch.equal(alone, together[at : at + count])
        at += count


def test_what_is_no_number_in_one_row_stays_there() -> None:
    query, key, value = tensors(2, 3, 8, 20, torch.bfloat16)
    rows = [PackRow(slot, [0]) for slot in range(8)]
    clean = attend(query, key, value, rows, 20)
    query[:, 4] = float("nan")
    dirty = attend(query, key, value, rows, 20)
    assert dirty[4].isnan().all()
    assert torch.equal(dirty[[0, 1, 2, 3, 5, 6, 7]], clean[[0, 1, 2, 3, 5, 6, 7]])
