"""Tree shapes: the best one for given accuracies, files, cuts."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.choices import (
    MOST_NODES,
    Choices,
    best_tree,
    choices_of,
    full_tree,
    read_accuracies,
    read_choices,
)
from slipstream.errors import ParameterError

accuracies_ = st.lists(
    st.lists(st.integers(0, 8).map(lambda n: n / 8), min_size=1, max_size=3), min_size=1, max_size=3
)


@given(accuracies_, st.integers(0, 12))
def test_the_best_tree_is_the_best(accuracies: list[list[float]], nodes: int) -> None:
    """No tree of so many nodes expects more: a tree's worth is at most that of its best nodes."""
    tree = best_tree(accuracies, nodes)
    every = [
        path
        for depth in range(1, len(accuracies) + 1)
        for path in itertools.product(*(range(len(row)) for row in accuracies[:depth]))
    ]
    worth = sorted((worth_of(path, accuracies) for path in every), reverse=True)
    assert len(tree) <= nodes
    assert tree.expected_tau(accuracies) == pytest.approx(1 + sum(worth[:nodes]))
    for front in range(nodes):  # grown best first, so any front part is the best smaller tree
        assert tree.cut(9, front).paths == best_tree(accuracies, front).paths


def worth_of(path: tuple[int, ...], accuracies: list[list[float]]) -> float:
    value = 1.0
    for depth, rank in enumerate(path):
        value *= accuracies[depth][rank]
    return value


def test_a_known_tree() -> None:
    """Worth: (0) .5, (0 0) .25, (1) .2, (0 0 0) .125, (0 1) .1, (1 0) .1."""
    table = [[0.5, 0.2], [0.5, 0.2], [0.5, 0.2]]
    tree = best_tree(table, 6)
    assert tree.paths == ((0,), (0, 0), (1,), (0, 0, 0), (0, 1), (1, 0))
    assert tree.expected_tau(table) == pytest.approx(1 + 0.5 + 0.25 + 0.2 + 0.125 + 0.1 + 0.1)
    assert best_tree(table, 4, depth=1).paths == ((0,), (1,))
    assert (tree.depth, tree.widths) == (3, (2, 2, 1))


def test_full_trees() -> None:
    assert full_tree([2, 1]).paths == ((0,), (1,), (0, 0), (1, 0))
    assert len(full_tree([4, 3, 2])) == 4 + 12 + 24
    with pytest.raises(ParameterError, match="at least 1 child"):
        full_tree([2, 0])
    for widths in ([1025], [1] * 1025, [100] * 100):
        with pytest.raises(ParameterError, match="full tree of .* must be from 0 to 1024"):
            full_tree(widths)


@pytest.mark.parametrize(
    ("paths", "match"),
    [
        (((0, 0), (0,)), "needs \\[0\\] before it"),
        (((0,), (0,)), "twice"),
        (((),), "list of ranks"),
        (((0,), (-1,)), "list of ranks"),
    ],
)
def test_bad_shapes_are_refused(paths: tuple[tuple[int, ...], ...], match: str) -> None:
    with pytest.raises(ParameterError, match=match):
        Choices(paths)


def test_shapes_as_options_give_them(tmp_path: Path) -> None:
    assert choices_of("0+1+0.0").paths == ((0,), (1,), (0, 0))
    (tmp_path / "tree.json").write_text("[[1], [0]]")
    assert choices_of(str(tmp_path / "tree.json")).paths == ((1,), (0,))
    for text, match in (
        ("0+", "must be ranks"),
        ("0..1", "must be ranks"),
        ("0.0+0", "before it"),
        ("0+0", "twice"),
        ("a", "cannot be read"),
        ("0+-1", "cannot be read"),
        ("~nobody-of-this-name/tree.json", "leads nowhere"),
        ("+".join(map(str, range(MOST_NODES + 1))), "must be from 0 to 1024"),
    ):
        with pytest.raises(ParameterError, match=match):
            choices_of(text)


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text("[[0, 0], [0], [1]]")
    assert read_choices(file).paths == ((0,), (1,), (0, 0))
    file.write_text('{"choices": [[1], [1, 0], [0]]}')
    assert read_choices(file).paths == ((1,), (1, 0), (0,))
    for text, match in (
        ("[[0, 1]]", "tree.json: the choice \\[0, 1\\] needs \\[0\\]"),
        ("[0]", "list of rank paths"),
        ("[[true]]", "list of rank paths"),
        ("{", "not JSON"),
        ("{}", "list of rank paths"),
        (json.dumps([[0]] * (MOST_NODES + 1)), "tree.json: .* must be from 0 to 1024"),
    ):
        file.write_text(text)
        with pytest.raises(ParameterError, match=match):
            read_choices(file)
    file.write_text('{"accuracies": [[0.5, 0.1], [1]]}')
    assert read_accuracies(file) == [[0.5, 0.1], [1.0]]
    file.write_text("[[1.5]]")
    with pytest.raises(ParameterError, match="fractions"):
        read_accuracies(file)
    with pytest.raises(ParameterError, match="cannot be read"):
        read_choices(tmp_path / "none.json")
    with pytest.raises(ParameterError, match="fractions"):
        best_tree([[1.5]], 3)
