"""Drafters that try to break the loop: always right, always wrong, too long, out of range, random trees.

Each is a function of one request, wrapped in a `FunctionDrafter`. All are deterministic and depend on
the request alone, as the contract of `Drafter` wants; all but `wrong_root` keep it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from slipstream.control.base import Controller, RowState
from slipstream.core.draft import Budget, Draft, Drafter, DraftRequest
from slipstream.core.tree import TokenTree

DraftFor = Callable[[DraftRequest], Draft]
Known = Mapping[int, Sequence[int]]  # request seed -> the output it will have


class FunctionDrafter(Drafter):
    """Drafts what a function of the request gives."""

    name = "function"

    def __init__(self, draft_for: DraftFor, num_speculative_tokens: int = 4) -> None:
        self._draft_for = draft_for
        self.num_speculative_tokens = num_speculative_tokens

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._draft_for(r) for r in requests]


class RandomBudgets(Controller):
    """A depth of 0 to `depth` and up to three times as many nodes, other for every row and position."""

    name = "random"

    def __init__(self, depth: int = 8, salt: int = 0) -> None:
        self._depth = depth
        self._salt = salt

    def plan(self, rows: Sequence[RowState]) -> list[Budget]:
        budgets = []
        for row in rows:
            chance = random.Random(f"{self._salt} {row.seq_id} {row.position}")
            depth = chance.randint(0, self._depth)
            budgets.append(Budget(depth, depth * chance.randint(1, 3)))
        return budgets


def _random_of(request: DraftRequest, salt: object = 0) -> random.Random:
    return random.Random(f"{salt} {request.seed} {len(request.tokens)}")


def _chain(request: DraftRequest, tokens: Sequence[int]) -> Draft:
    return Draft(TokenTree.chain(request.root, tokens))


def upcoming(known: Known, request: DraftRequest) -> list[int]:
    """What the request will go on with; empty beyond what is known."""
    return list(known[request.seed][len(request.tokens) - request.prompt_length :])


def right(known: Known) -> DraftFor:
    """Every drafted token is what the target will say."""
    return lambda r: _chain(r, upcoming(known, r)[: r.budget.depth])


def wrong(known: Known, vocab_size: int) -> DraftFor:
    """No drafted token is."""
    return lambda r: _chain(r, [(t + 1) % vocab_size for t in upcoming(known, r)[: r.budget.depth]])


def right_until(known: Known, vocab_size: int) -> DraftFor:
    """Right up to a random depth, wrong from there on."""

    def draft(request: DraftRequest) -> Draft:
        tokens = upcoming(known, request)[: request.budget.depth]
        turn = _random_of(request, "turn").randint(0, len(tokens))
        return _chain(request, [(t + (i >= turn)) % vocab_size for i, t in enumerate(tokens)])

    return draft


def nothing(request: DraftRequest) -> Draft:
    """An empty draft although one was asked for."""
    return _chain(request, ())


def random_chain(vocab_size: int) -> DraftFor:
    """Tokens that have nothing to do with the text."""

    def draft(request: DraftRequest) -> Draft:
        chance = _random_of(request)
        return _chain(request, [chance.randrange(vocab_size) for _ in range(request.budget.depth)])

    return draft


def too_long(known: Known, vocab_size: int) -> DraftFor:
    """Far beyond the budget, right as long as the output is known, and wide."""

    def draft(request: DraftRequest) -> Draft:
        tokens = upcoming(known, request)
        long = [*tokens, *([tokens[-1] if tokens else 0] * (request.budget.depth + 5))]
        others = [[(t + 1) % vocab_size] for t in long[:9]]
        return Draft(TokenTree.from_paths(request.root, [long, *others]))

    return draft


def out_of_range(known: Known, vocab_size: int, width: int) -> DraftFor:
    """Right tokens mixed with ids that do not exist: negative, in the head's padding, beyond the head."""

    def draft(request: DraftRequest) -> Draft:
        chance = _random_of(request, "range")
        tokens = upcoming(known, request)[: request.budget.depth]
        strange = (-1, -(1 << 40), vocab_size, width - 1, width, 1 << 40)
        return _chain(request, [chance.choice((t, t, t, chance.choice(strange))) for t in tokens])

    return draft


def random_tree(known: Known, vocab_size: int) -> DraftFor:
    """A tree of random shape within the budget; the right path is hidden in it half the time."""

    def draft(request: DraftRequest) -> Draft:
        chance = _random_of(request, "tree")
        future = upcoming(known, request) if chance.random() < 0.5 else []
        paths: list[list[int]] = [[]]
        nodes = 0
        while nodes < request.budget.nodes:
            path = chance.choice(paths)
            if len(path) == request.budget.depth:
                nodes += 1  # a wasted try, so that the loop ends
                continue
            on_course = path == future[: len(path)] and len(path) < len(future)
            token = chance.randrange(vocab_size)
            if on_course and chance.random() < 0.7:
                token = future[len(path)]
            if [*path, token] not in paths:
                paths.append([*path, token])
            nodes += 1
        return Draft(TokenTree.from_paths(request.root, paths))

    return draft


def wrong_root(request: DraftRequest) -> Draft:
    """Breaks the contract: drafts after another token than the root."""
    return Draft(TokenTree.chain(request.root + 1, (0,)))


def any_of(choices: Sequence[DraftFor]) -> DraftFor:
    """Another one of them for every row and position."""
    return lambda r: _random_of(r, "any").choice(choices)(r)


def adversaries(known: Known, vocab_size: int, width: int) -> dict[str, DraftFor]:
    """All that keep the contract, and a mix of them. width: of the target's head, padding included."""
    each: dict[str, DraftFor] = {
        "right": right(known),
        "wrong": wrong(known, vocab_size),
        "right_until": right_until(known, vocab_size),
        "nothing": nothing,
        "random_chain": random_chain(vocab_size),
        "too_long": too_long(known, vocab_size),
        "out_of_range": out_of_range(known, vocab_size, width),
        "random_tree": random_tree(known, vocab_size),
    }
    return {**each, "any_of": any_of(tuple(each.values()))}
