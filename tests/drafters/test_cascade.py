"""Cascades: who is asked, what is merged, what is told to whom, and the same sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.core.draft import Draft, Drafter, DraftRequest, Needs, Observation
from slipstream.core.params import SamplingParams
from slipstream.core.spec import parse_spec, parse_specs
from slipstream.core.stats import SourceCounts
from slipstream.core.tree import TokenTree
from slipstream.drafters import build_drafter
from slipstream.drafters.base import TargetInfo
from slipstream.drafters.cascade import CascadeConfig, CascadeDrafter
from slipstream.drafters.draft_model import DraftModelConfig, ModelDrafter
from slipstream.errors import DrafterError, ParameterError
from slipstream.model.runner import Runner
from slipstream.testing.tiny import tiny_model

INFO = TargetInfo(24, 2048)


class Fake(Drafter):
    """Drafts what it is told to, and notes what happens to it."""

    num_speculative_tokens = 6

    def __init__(self, name: str, *paths: Sequence[int], score: float | None = None, **more: Any) -> None:
        self.name, self.paths, self.score = name, paths, score
        self.needs = more.pop("needs", Needs())
        self.q = more.pop("q", False)
        self.fails = more.pop("fails", False)
        self.asked: list[DraftRequest] = []
        self.told: list[Observation] = []
        self.calls: list[str] = []

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self.calls.append(f"open {seq_id}")

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.asked += requests
        return [self._one(r) for r in requests]

    def _one(self, request: DraftRequest) -> Draft:
        tree = TokenTree.from_paths(request.root, self.paths)
        laws = [torch.ones(24) / 24 if tree.children(n) else None for n in range(len(tree))]
        each = (
            None if self.score is None else (1.0, *[self.score / max(tree.num_drafted, 1)] * tree.num_drafted)
        )
        return Draft(tree, tuple(laws) if self.q else None, each)

    def observe(self, observations: Sequence[Observation]) -> None:
        self.told += observations

    def close(self, seq_id: int) -> None:
        self.calls.append(f"close {seq_id}")

    @property
    def memory_bytes(self) -> int:
        return 100

    def shutdown(self) -> None:
        self.calls.append("shutdown")
        if self.fails:
            raise RuntimeError("broken")


def cascade(*parts: Drafter, **options: Any) -> CascadeDrafter:
    return CascadeDrafter(CascadeConfig(drafters="none", **options), INFO, parts)


def one(drafter: Drafter, request: DraftRequest) -> Draft:
    (draft,) = drafter.propose([request])
    return draft


# -- the first that is good enough ----------------------------------------------------------------


def test_the_first_good_enough_part_drafts_and_the_rest_are_not_asked(bench: Any) -> None:
    parts = Fake("a", [1, 2], score=0.5), Fake("b", [3, 4], score=1.5), Fake("c", [5])
    draft = one(cascade(*parts), bench.ask([9, 8]))
    assert (draft.tree.tokens, draft.source) == ((8, 3, 4), "b")
    assert len(parts[0].asked) == 1 and not parts[2].asked


def test_where_none_is_good_enough_the_best_drafts(bench: Any) -> None:
    parts = Fake("a", [1], score=0.2), Fake("b", [3], score=0.6), Fake("c", [5], score=0.4), Fake("d")
    assert one(cascade(*parts), bench.ask([9, 8])).source == "b"
    assert one(cascade(Fake("d")), bench.ask([9, 8])).tree.num_drafted == 0


def test_a_part_that_tells_no_score_is_good_enough_and_a_sampled_draft_is_never_dropped(bench: Any) -> None:
    assert one(cascade(Fake("a", [1]), Fake("b", [2])), bench.ask([9, 8])).source == "a"
    sampled = Fake("a", [1, 2], score=0.0, q=True)
    draft = one(cascade(sampled, Fake("b", [2], score=5.0)), bench.ask([9, 8]))
    assert draft.source == "a" and draft.q is not None


def test_rows_go_their_own_ways(bench: Any) -> None:
    suffix = build_drafter("suffix", INFO)
    fallback = Fake("model", [7])
    rows = [bench.ask([1, 2, 3, 1, 2, 3, 1, 2], seq_id=4), bench.ask([1, 2, 3, 4], seq_id=7)]
    drafts = cascade(suffix, fallback).propose(rows)
    assert [d.source for d in drafts] == ["suffix", "model"]
    assert [r.seq_id for r in fallback.asked] == [7]


def test_each_part_keeps_to_its_own_length(bench: Any) -> None:
    short, long = Fake("a", [1, 2, 3, 4], score=0.1), Fake("b", [1, 2, 3, 4])
    short.num_speculative_tokens = 2
    whole = cascade(short, long)
    assert whole.num_speculative_tokens == 6
    assert one(whole, bench.ask([9, 8], 3, 10)).tree.num_drafted == 3
    assert (short.asked[0].budget.depth, short.asked[0].budget.nodes) == (2, 2)
    assert (long.asked[0].budget.depth, long.asked[0].budget.nodes) == (3, 6)
    assert cascade(short, num_speculative_tokens=1).num_speculative_tokens == 1


# -- merged ---------------------------------------------------------------------------------------


def test_merging_gives_the_union_and_the_nodes_that_are_left(bench: Any) -> None:
    parts = Fake("a", [1, 2], score=1.0), Fake("b", [1, 3], [4, 5, 6], score=4.0), Fake("c", [7])
    draft = one(cascade(*parts, mode="merge"), bench.ask([9, 8], 8, 5))
    assert draft.tree == TokenTree.from_paths(8, [[1, 2], [1, 3], [4], [7]])
    assert [p.asked[0].budget.nodes for p in parts] == [5, 3, 1]
    assert draft.source == "a+b+c" and draft.scores is None
    assert draft.sources == ((), ("a", "b"), ("a",), ("b",), ("b",), ("c",))


def test_each_part_of_a_merged_draft_counts_what_it_drafted(bench: Any) -> None:
    parts = Fake("a", [1, 2]), Fake("b", [1, 3], [4, 5]), Fake("c", [7])
    draft = one(cascade(*parts, mode="merge"), bench.ask([9, 8], 8, 9))
    tree = draft.tree
    path = [tree.find_child(0, 1), tree.find_child(tree.find_child(0, 1) or 0, 3)]
    counts = draft.counts_by_source([node for node in path if node is not None])
    assert counts == {"a": SourceCounts(1, 2, 1), "b": SourceCounts(1, 4, 2), "c": SourceCounts(1, 1, 0)}
    cut = draft.truncate(1)  # what is cut off is no part's
    assert cut.counts_by_source([])["a"] == SourceCounts(1, 1, 0)
    assert list(draft.truncate(8, 1).counts_by_source([])) == ["a", "b"]


def test_merged_parts_have_room_for_all_and_the_first_good_one_for_the_largest() -> None:
    tree, chain = Fake("a"), Fake("b")
    tree.draft_nodes = 20
    assert cascade(tree, chain, mode="merge").draft_nodes == 26
    assert cascade(chain, chain, mode="merge").draft_nodes == 12
    assert cascade(tree, chain).draft_nodes == 20 and cascade(chain, chain).draft_nodes == 0
    assert cascade(tree, chain, mode="merge", num_speculative_tokens=3).draft_nodes == 0


def test_scores_are_asked_for_where_they_are_looked_at(bench: Any) -> None:
    first, merged = (Fake("a", [1]), Fake("b", [2])), (Fake("a", [1]), Fake("b", [2]))
    one(cascade(*first, min_score=2.0), bench.ask([9, 8]))
    one(cascade(*merged, mode="merge"), bench.ask([9, 8]))
    assert first[0].asked[0].scored and not first[1].asked  # a tells none and is trusted
    assert not any(p.asked[0].scored for p in merged)
    inner = Fake("a", [1])
    outer = cascade(cascade(inner, mode="merge"), Fake("b"))
    one(outer, bench.ask([9, 8]))
    assert inner.asked[0].scored


def test_a_node_of_several_parts_has_the_higher_score(bench: Any) -> None:
    parts = Fake("a", [1, 2], score=1.0), Fake("b", [1, 3], score=1.8)
    draft = one(cascade(*parts, mode="merge"), bench.ask([9, 8]))
    assert draft.tree.tokens == (8, 1, 2, 3) and draft.scores == (1.0, 0.9, 0.5, 0.9)


def test_merging_skips_parts_with_nothing_to_say(bench: Any) -> None:
    draft = one(cascade(Fake("a"), Fake("b", [1]), mode="merge"), bench.ask([9, 8]))
    assert (draft.source, draft.tree.tokens) == ("b", (8, 1))


def test_a_sampled_draft_is_used_alone(bench: Any) -> None:
    last = Fake("c", [3])
    draft = one(cascade(Fake("a", [1]), Fake("b", [2], q=True), last, mode="merge"), bench.ask([9, 8]))
    assert (draft.source, draft.tree.tokens) == ("b", (8, 2)) and draft.q is not None
    assert not last.asked


# -- what the parts are told ----------------------------------------------------------------------


def test_a_part_that_reads_the_prompt_waits_for_the_first_token_and_the_others_do_not(bench: Any) -> None:
    slow, fast = Fake("slow", [1], needs=Needs(reads_prompt=True)), Fake("fast", [2])
    whole = cascade(slow, fast)
    assert not whole.needs.reads_prompt and cascade(slow).needs.reads_prompt
    assert one(whole, bench.ask([9, 8], prompt=2)).source == "fast"
    assert one(whole, bench.ask([9, 8, 7], prompt=2)).source == "slow"


def test_needs_are_united_and_each_part_sees_what_it_declared(bench: Any) -> None:
    parts = (
        Fake("a", needs=Needs(hidden_layers=(2, 1))),
        Fake("b", needs=Needs(hidden_layers=(2,), last_hidden=True)),
        Fake("c", needs=Needs(node_logits=True)),
    )
    whole = cascade(*parts)
    assert whole.needs == Needs((1, 2), last_hidden=True, node_logits=True)
    features: dict[int | str, torch.Tensor] = {1: torch.zeros(1), 2: torch.zeros(1), "last": torch.zeros(1)}
    whole.observe([Observation(0, 0, (3,), features, node_logits=torch.zeros(1, 24))])
    assert [sorted(map(str, p.told[0].features)) for p in parts] == [["1", "2"], ["2", "last"], []]
    assert [p.told[0].node_logits is not None for p in parts] == [False, False, True]


def test_opening_closing_memory_and_shutdown_reach_all(bench: Any) -> None:
    parts = Fake("a"), Fake("b", fails=True), Fake("c")
    whole = cascade(*parts)
    whole.open(3, [1])
    whole.close(3)
    assert whole.memory_bytes == 300
    with pytest.raises(DrafterError, match="'b' .*broken"):
        whole.shutdown()
    assert all(p.calls == ["open 3", "close 3", "shutdown"] for p in parts)


# -- in the engine --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        "cascade:drafters=suffix+recycle",
        "cascade:mode=merge,drafters=suffix(tree=true,remember=false)+ngram(min_n=1,branches=2)+recycle(k=3)",
        "cascade:drafters=cascade(drafters=suffix+ngram(min_n=1),mode=merge)+recycle,min_score=2",
    ],
)
def test_the_sample_is_that_of_plain_decoding(bench: Any, spec: str) -> None:
    counts = bench.assert_same_sample(lambda: build_drafter(spec, INFO))
    assert counts.accepted_tokens > 0 and len(counts.sources) > 1
    for name in ("accepted_tokens", "draft_tokens", "drafts"):
        parts = [getattr(part, name) for part in counts.sources.values()]
        whole = getattr(counts, name)
        assert max(parts) <= whole <= sum(parts)
        if "merge" not in spec:  # a merged token counts for each part that drafted it
            assert whole == sum(parts)


def test_a_model_behind_the_suffix_tree(bench: Any) -> None:
    runner = Runner(tiny_model("llama", vocab_size=24, layers=1, hidden=16, seed=2), pack=False)
    model = ModelDrafter(DraftModelConfig("given", num_speculative_tokens=2), INFO, runner)
    drafter = cascade(build_drafter("suffix", INFO), model)
    for params in (
        SamplingParams(max_tokens=16, seed=3),
        SamplingParams(max_tokens=16, seed=5, temperature=0.8),
    ):
        plain, _ = bench.generate(build_drafter("none", INFO), params)
        outputs, counts = bench.generate(drafter, params)
        assert outputs == plain
        assert counts.sources["draft_model"].draft_tokens > 0
    drafter.shutdown()


@pytest.mark.parametrize("width", [1, 2])
def test_an_unsure_model_is_passed_over_and_a_sure_one_is_taken(bench: Any, width: int) -> None:
    """A draft model tells its scores when asked, as every part of a cascade is."""
    runner = Runner(tiny_model("llama", vocab_size=24, layers=1, hidden=16, seed=2), pack=False)
    config = DraftModelConfig("given", num_speculative_tokens=3, width=width)
    ask = bench.ask([1, 2, 3], 3, 6)
    model = ModelDrafter(config, INFO, runner)
    (told,) = model.propose([replace(ask, scored=True)])
    assert told.scores is not None
    expected = sum(told.scores[1:])
    for min_score, source in ((expected - 0.01, "draft_model"), (expected + 0.01, "sure")):
        whole = cascade(model, Fake("sure", [7], score=5.0), min_score=min_score)
        draft = one(whole, bench.ask([1, 2, 3], 3, 6))
        assert draft.source == source
    model.shutdown()


def test_a_sampled_model_in_a_cascade_runs(bench: Any) -> None:
    runner = Runner(tiny_model("llama", vocab_size=24, layers=1, hidden=16, seed=2), pack=False)
    model = ModelDrafter(DraftModelConfig("given", 3, sampled=True), INFO, runner)
    for mode in ("first", "merge"):
        whole = cascade(build_drafter("suffix", INFO), model, mode=mode)
        outputs, counts = bench.generate(whole, SamplingParams(max_tokens=20, temperature=0.8, seed=1))
        assert all(len(o) == 20 for o in outputs) and counts.sources["draft_model"].draft_tokens > 0
    whole.shutdown()


# -- how it is written ----------------------------------------------------------------------------


def test_nested_options_stand_in_parentheses() -> None:
    name, values = parse_spec("cascade:drafters=suffix+draft_model(model=./a:b,sampled=true),mode=merge")
    assert name == "cascade"
    assert values == {"drafters": "suffix+draft_model(model=./a:b,sampled=true)", "mode": "merge"}
    assert parse_specs(values["drafters"]) == ["suffix", "draft_model:model=./a:b,sampled=true"]
    assert parse_specs("one(a=x(b=1,c=2)+y) + two()") == ["one:a=x(b=1,c=2)+y", "two"]
    assert parse_specs("./f.py:Mine(k=1)") == ["./f.py:Mine:k=1"]


@pytest.mark.parametrize("text", ["a=(", "a=)", "a=)(", "a=(b=1,c=2"])
def test_parentheses_must_match(text: str) -> None:
    with pytest.raises(ParameterError, match="parentheses"):
        parse_spec(f"cascade:{text}")


@pytest.mark.parametrize(
    ("text", "match"), [("a++b", "empty part"), ("(k=1)", "empty"), ("a(k=1)b", "written")]
)
def test_parts_must_be_names_with_options(text: str, match: str) -> None:
    with pytest.raises(ParameterError, match=match):
        parse_specs(text)


def test_a_model_alone_means_the_suffix_tree_first() -> None:
    assert CascadeConfig(model="big/model").specs == ["suffix", "draft_model:model=big/model"]


@pytest.mark.parametrize(
    "options",
    [
        "",
        ":drafters=suffix,model=x",
        ":drafters=suffix,min_score=-1",
        ":mode=all,drafters=suffix",
        ":drafters=suffix,mode=merge,min_score=2",
    ],
)
def test_bad_options_are_refused(options: str) -> None:
    with pytest.raises(ParameterError, match="cascade"):
        build_drafter(f"cascade{options}", INFO)


def test_a_part_that_cannot_be_built_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from slipstream.drafters.suffix import SuffixDrafter

    closed: list[Drafter] = []
    monkeypatch.setattr(SuffixDrafter, "shutdown", lambda self: closed.append(self))
    with pytest.raises(DrafterError):
        build_drafter(f"cascade:drafters=suffix+medusa(heads={tmp_path})", replace(INFO, model=tiny_model()))
    assert len(closed) == 1
