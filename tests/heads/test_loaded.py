"""Trained heads through `slipstream.load`: packed bfloat16 weights, and trees against their chains."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import slipstream
from slipstream.core.choices import full_tree
from slipstream.core.draft import Draft
from slipstream.core.params import SamplingParams
from slipstream.core.tree import TokenTree
from slipstream.heads.io import save_eagle, save_medusa
from slipstream.logits.pipeline import LogitsPipeline
from slipstream.model.pack import PackRow
from slipstream.model.runner import Runner
from slipstream.testing.heads import random_eagle, random_medusa
from slipstream.testing.tiny import save_tiny, tiny_model
from slipstream.verify import ViewRow, build_views, point_mass


def test_heads_on_a_packed_target(tmp_path: Path) -> None:
    """The LM head is packed before the drafter asks for its rows; heads take the target's dtype.

    Chains, so that the tokens are the same bit for bit in bfloat16 too.
    """
    model = tiny_model(layers=3)
    save_eagle(random_eagle(model, 1), tmp_path / "one")
    save_eagle(random_eagle(model, 3, draft_vocab_size=50), tmp_path / "three")
    save_medusa(random_medusa(model, output="target", draft_vocab_size=50), tmp_path / "shared")
    save_medusa(random_medusa(model), tmp_path / "own")
    folder = save_tiny(tmp_path / "target", model=model, dtype=torch.bfloat16)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True)
    with slipstream.load(str(folder)) as session:
        expected = session.generate("hello there", params)
        for spec in ("eagle:heads={}/one,top_k=1", "eagle:heads={}/three,top_k=1",
                     "medusa:heads={}/shared,topk=1x1x1", "medusa:heads={}/own,topk=1x1"):  # fmt: skip
            drafter = session.use(spec.format(tmp_path))
            assert drafter.memory_bytes > 0
            found = session.generate("hello there", params)
            assert found.tokens == expected.tokens and found.counts.draft_tokens > 0


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_tree_is_accepted_at_least_as_far_as_any_chain_in_it(kind: str) -> None:
    """For the same noise, computed by a model: the tree in one forward, every chain in its own."""
    model = tiny_model(kind, vocab_size=6)
    runner = Runner(model, pack=False)
    dice = random.Random(0)
    prompt = [1, 4, 2, 0, 5, 3]
    runner.cache.open(0)
    runner.extend(0, prompt[:-1])
    params = SamplingParams(temperature=1.5)
    pipeline = LogitsPipeline(params, 6, frozenset(), len(prompt))

    def accepted(tree: TokenTree, seed: int) -> tuple[int, ...]:
        logits = runner.forward([PackRow(0, tree.tokens, tree.parents)]).logits
        assert logits is not None
        (view,) = build_views([ViewRow(pipeline, prompt, tree, seed, 0)], logits)

        verdict = point_mass(Draft(tree), view)
        return (*(tree.tokens[n] for n in verdict.path), verdict.token)

    longest = 0
    for seed in range(12):
        ranked = [dice.sample(range(6), 6) for _ in range(3)]
        paths = [[ranked[d][r] for d, r in enumerate(path)] for path in full_tree([4, 3, 2]).paths]
        tree = TokenTree.from_paths(prompt[-1], paths)
        whole = accepted(tree, seed)
        longest = max(longest, len(whole))
        for leaf in range(1, len(tree)):
            if not tree.children(leaf):
                chain = accepted(TokenTree.chain(prompt[-1], tree.path_tokens(leaf)), seed)
                assert whole[: len(chain)] == chain
    assert longest > 2
    runner.close()
