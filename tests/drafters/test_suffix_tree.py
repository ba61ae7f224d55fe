"""The suffix tree against counting by hand."""

from __future__ import annotations

import gc
import random
import tracemalloc
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.drafters._suffix_guess import Guess, Limits, best_guess
from slipstream.drafters._suffix_tree import TOKEN_BYTES, GrowingTree, SuffixTree

Text = Sequence[int]
texts = st.lists(st.integers(0, 3), max_size=30)
depths = st.integers(2, 6)


def by_hand(text: Text, starts: Iterable[int], depth: int) -> Counter[tuple[int, ...]]:
    """How often each string of up to `depth` tokens begins at one of `starts`."""
    return Counter(tuple(text[i : i + k]) for i in starts for k in range(1, min(depth, len(text) - i) + 1))


def of_tree(tree: SuffixTree) -> Counter[tuple[int, ...]]:
    counts: Counter[tuple[int, ...]] = Counter()
    for path, node in tree.walk():
        for k in range(len(path) - node.readable + 1, len(path) + 1):
            counts[path[:k]] = node.count
    return counts


@given(text=texts, depth=depths)
def test_a_growing_tree_counts_all_starts_before_the_longest_repeated_suffix(text: Text, depth: int) -> None:
    tree = GrowingTree(depth)
    for n, token in enumerate(text, start=1):
        tree.extend([token])
        tree.check()
        repeated = (
            j
            for j in range(max(0, n - depth + 1), n)
            if any(text[i : i + n - j] == text[j:n] for i in range(j))
        )
        assert tree.counted == next(repeated, n)
        assert of_tree(tree) == by_hand(text[:n], range(tree.counted), depth)


@given(text=texts, cuts=st.lists(st.integers(0, 30), max_size=4), depth=depths)
def test_a_growing_tree_does_not_depend_on_how_tokens_come(text: Text, cuts: list[int], depth: int) -> None:
    whole, pieces = GrowingTree(depth), GrowingTree(depth)
    whole.extend(text)
    ends = [*sorted(min(c, len(text)) for c in cuts), len(text)]
    for start, end in zip([0, *ends], ends, strict=False):
        pieces.extend(text[start:end])
    assert of_tree(whole) == of_tree(pieces) and whole.counted == pieces.counted


@given(steps=st.lists(st.one_of(texts, st.integers(0, 5)), max_size=12), depth=depths)
def test_adding_and_removing_texts_counts_exactly_those_that_are_there(
    steps: list[list[int] | int], depth: int
) -> None:
    tree, there = SuffixTree(depth), []
    for step in steps:
        if isinstance(step, list):
            there.append(tree.add(step))
        elif there:
            tree.remove(there.pop(step % len(there)))
        tree.check()
        expected: Counter[tuple[int, ...]] = Counter()
        for text in there:
            expected.update(by_hand(text.tolist(), range(len(text)), depth))
        assert of_tree(tree) == expected
    for text in there:
        tree.remove(text)
    assert (tree.num_nodes, tree.num_inner, tree.root.count, tree.root.children) == (0, 0, 0, None)


@given(kept=texts, gone=texts, depth=depths)
def test_a_removed_text_is_let_go(kept: list[int], gone: list[int], depth: int) -> None:
    tree = SuffixTree(depth)
    text = tree.add(gone)
    tree.add(kept)
    tree.remove(text)
    assert all(node.text is not text for _, node in tree.walk())


def naive_best(text: Text, tail: Text, depth: int, limits: Limits) -> tuple[float, int]:
    """Score and match of the best chain by counts alone, ties between tokens aside."""
    counts, best = by_hand(text, range(len(text)), depth), (0.0, 0)
    for match in range(1, min(len(tail), depth - 1) + 1):
        path = tuple(tail[len(tail) - match :])
        if not counts[path]:
            break
        prob, score = 1.0, 0.0
        for _ in range(min(limits.depth, limits.room(match))):
            total, top = counts[path], max((counts[(*path, t)], t) for t in range(4))
            prob *= top[0] / total
            if len(path) == depth or not top[0] or prob < limits.floor:
                break
            score += prob
            path = (*path, top[1])
        if score and score >= best[0]:
            best = (score, match)
    return best


@given(text=texts, tail=texts, depth=depths, floor=st.sampled_from([0.0, 0.3, 0.6]))
def test_the_first_step_of_a_guess_is_the_likeliest(text: Text, tail: Text, depth: int, floor: float) -> None:
    tree, limits = SuffixTree(depth), Limits(1, 1, floor=floor)
    tree.add(text)
    found = best_guess(tree, array("i", tail), limits)
    score, match = naive_best(text, tail, depth, limits)
    assert (found.score, found.match) == (pytest.approx(score), match) if found else score == 0.0


@given(
    text=texts,
    depth=depths,
    limits=st.builds(
        Limits,
        st.integers(1, 4),
        st.integers(1, 8),
        st.sampled_from([1.0, 3.0]),
        st.just(0.0),
        st.sampled_from([0.0, 0.2]),
        st.booleans(),
        st.sampled_from([1, 4]),
    ),
)
def test_guesses_keep_their_limits_and_their_probabilities(text: Text, depth: int, limits: Limits) -> None:
    tree = GrowingTree(depth)
    tree.extend(text)
    guess = best_guess(tree, tree.repeated(), limits)
    if guess is None:
        return
    assert guess.match <= len(text) - tree.counted
    assert 1 <= len(guess.tokens) <= limits.room(guess.match) <= limits.nodes
    assert guess.score == pytest.approx(sum(guess.probs))
    suffix = tuple(text[len(text) - guess.match :])
    paths: list[tuple[int, ...]] = [()]
    for token, parent, prob in zip(guess.tokens, guess.parents, guess.probs, strict=True):
        path = (*paths[parent], token)
        assert path not in paths and len(path) <= limits.depth
        share = 1.0
        for k in range(len(path)):
            share *= tree.occurrences((*suffix, *path[: k + 1])) / tree.occurrences((*suffix, *path[:k]))
        assert prob == pytest.approx(share) and prob >= limits.floor - 1e-9
        paths.append(path)


@pytest.mark.parametrize(
    ("factor", "offset", "block", "rooms"),
    [
        (1.0, 0.0, 1, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9]),
        (1.0, 0.0, 4, [3, 3, 3, 7, 7, 7, 7, 9, 9, 9]),
        (0.5, -1.0, 4, [0, 0, 0, 3, 3, 3, 3, 3, 3, 7]),
        (1e308, 1e308, 4, [9] * 10),
    ],
)
def test_a_match_has_room_for_whole_blocks(
    factor: float, offset: float, block: int, rooms: list[int]
) -> None:
    limits = Limits(9, 9, factor, offset, block=block)
    assert [limits.room(match) for match in range(1, 11)] == rooms


def test_a_tie_goes_to_the_longer_match_and_the_later_token() -> None:
    tree = GrowingTree()
    tree.extend([1, 2, 3, 8, 1, 2, 4, 9, 5, 1, 2])
    guess = best_guess(tree, tree.repeated(), Limits(1, 1))
    assert guess == Guess((4,), (0,), (0.5,), 0.5, 2)


def test_branches_come_best_first() -> None:
    tree = SuffixTree()
    for follow in ([5, 6], [5, 6], [5, 7], [8, 9]):
        tree.add([1, *follow])
    guess = best_guess(tree, array("i", [1]), Limits(8, 8, factor=8, floor=0.2, branch=True))
    assert guess is not None
    assert guess.tokens[:2] == (5, 6)
    assert list(guess.probs) == sorted(guess.probs, reverse=True)
    assert dict(zip(guess.tokens, guess.probs, strict=True)) == {5: 0.75, 6: 0.5, 7: 0.25, 8: 0.25, 9: 0.25}


def test_an_unusable_depth_is_refused() -> None:
    with pytest.raises(ValueError, match="max_depth"):
        SuffixTree(1)


def test_the_memory_estimate_is_near_what_python_allocates() -> None:
    rng = random.Random(0)
    words = [[rng.randrange(400) for _ in range(rng.randrange(2, 9))] for _ in range(300)]
    text = [token for _ in range(2000) for token in words[min(rng.randrange(300), rng.randrange(300))]]
    gc.collect()
    tracemalloc.start()
    try:
        tree = SuffixTree()
        tree.add(text)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held / 1.4 < tree.memory_bytes + len(text) * TOKEN_BYTES < held * 1.4
