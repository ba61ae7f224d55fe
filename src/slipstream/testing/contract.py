"""What every drafter must keep, as tests. For yours:

    from slipstream.testing.contract import DrafterContract

    class TestMine(DrafterContract):
        drafter = "./mine.py:Mine:option=value"

or, in a checkout of Slipstream, `pytest tests/contract --drafter ./mine.py:Mine:option=value`. The target is
a random model of 258 byte tokens that runs in milliseconds; in the drafter's options `{draft}` stands for
the folder of a saved draft model, in which draft_vocab.json lists half of its tokens, `{heads}` for one with
the folders of random heads that fit the target: medusa, medusa_reduced, eagle1 and eagle3.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.core.draft import Draft, Drafter, DraftRequest
from slipstream.core.params import SamplingParams
from slipstream.drafters import TargetInfo, build_drafter
from slipstream.engine.engine import Engine
from slipstream.logits.pipeline import LogitsPipeline
from slipstream.model.runner import Runner
from slipstream.testing.chisquare import chi_square
from slipstream.testing.heads import save_random_heads
from slipstream.testing.oracle import Request, plain_decode, run_all
from slipstream.testing.tiny import MIN_VOCAB, save_tiny, tiny_model, tiny_tokenizer

WIDTH, VOCAB, CONTEXT = MIN_VOCAB + 6, MIN_VOCAB, 512
EOS = frozenset({65})
PROMPTS = ((1, 2, 3, 1, 2, 3, 1), (7,), tuple(range(40, 60)), (9, 9, 9, 9), (200, 100))
Known = dict[tuple[int, int], tuple[Any, ...]]


def target_model() -> Any:
    """The target; the same weights at every call."""
    return tiny_model("llama", vocab_size=WIDTH, layers=2, seed=1, max_position_embeddings=CONTEXT)


def requests(temperature: float) -> list[Request]:
    params = SamplingParams(max_tokens=14, temperature=temperature, top_k=4, repetition_penalty=1.1)
    return [Request(prompt, params, 90 + i) for i, prompt in enumerate(PROMPTS)]


class DrafterContract:
    """Inherit and set `drafter`."""

    drafter: str = ""

    @pytest.fixture
    def spec(self) -> str:
        """What is tested, as written after --drafter."""
        return self.drafter

    @pytest.fixture(scope="class")
    def draft_folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        model = tiny_model("llama", vocab_size=WIDTH, layers=1, seed=2)
        folder = save_tiny(tmp_path_factory.mktemp("draft"), model=model, tokenizer=tiny_tokenizer())
        (folder / "draft_vocab.json").write_text(json.dumps(list(range(0, VOCAB, 2))))
        return folder

    @pytest.fixture(scope="class")
    def heads_folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return save_random_heads(target_model(), tmp_path_factory.mktemp("heads"))

    @pytest.fixture
    def runner(self) -> Runner:
        return Runner(target_model(), pack=False)

    @pytest.fixture
    def info(self, runner: Runner) -> TargetInfo:
        return TargetInfo(
            VOCAB, CONTEXT, tiny_tokenizer(), "float32", eos_ids=EOS, model=runner.model, runner=runner
        )

    @pytest.fixture
    def built(self, spec: str, info: TargetInfo, draft_folder: Path, heads_folder: Path) -> Drafter:
        spec = spec.replace("{draft}", str(draft_folder)).replace("{heads}", str(heads_folder))
        return build_drafter(spec, info)

    # -- drafts ---------------------------------------------------------------------------------

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_drafts_are_rooted_at_the_root_and_truthful(
        self, built: Drafter, runner: Runner, temperature: float
    ) -> None:
        """Trees check themselves when they are made; a draft beyond its budget can be cut."""
        for request, draft in _watch(built, runner, requests(temperature))[1]:
            assert draft.tree.tokens[0] == request.root
            cut = draft.truncate(request.budget.depth, request.budget.nodes)
            assert cut.tree.depth <= request.budget.depth and cut.tree.num_drafted <= request.budget.nodes
            for node in range(1, len(cut.tree)) if cut.q else ():
                row = cut.q[cut.tree.parents[node]] if cut.q else None
                assert row is not None and row.shape == (VOCAB,), "q rows have the target's vocabulary"
                assert row.dtype in (torch.float32, torch.float64) and float(row.min()) >= 0
                assert abs(float(row.double().sum()) - 1) < 1e-5
                assert float(row[cut.tree.tokens[node]]) > 0, "a drafted token was drawn from its q"

    def test_there_is_one_draft_a_request_even_for_one(self, built: Drafter, runner: Runner) -> None:
        asked: list[int] = []
        _watch(built, runner, requests(0.0), asked)
        _watch(built, runner, requests(0.0)[:1], asked)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_drafts_depend_neither_on_company_nor_on_order(
        self, built: Drafter, runner: Runner, temperature: float
    ) -> None:
        """A drafter that learns has the same drafts for a batch in any order, at every single step."""
        many = requests(temperature)
        if built.learns:
            _watch(built, runner, many, check_company=True)
            return
        together = _drafts(built, runner, many)
        assert together == _drafts(built, runner, many), "the same requests again give the same drafts"
        assert together == _drafts(built, runner, many[::-1])
        alone: Known = {}
        for one in many:
            alone |= _drafts(built, runner, [one])
        assert together == alone

    # -- the output -------------------------------------------------------------------------------

    def test_greedy_output_is_that_of_plain_decoding(self, built: Drafter, runner: Runner) -> None:
        _assert_plain(built, runner, requests(0.0))

    def test_sampled_output_keeps_the_tokens_or_the_law(self, built: Drafter, runner: Runner) -> None:
        """Point masses: the tokens of plain decoding with the same seed. Drafts with q: their law."""
        seen = _watch(built, runner, requests(1.0))[1]
        if all(draft.q is None for _, draft in seen):
            _assert_plain(built, runner, requests(1.0))
        else:
            _assert_law(built, runner)

    def test_one_token_prompts_and_one_token_answers_work(self, built: Drafter, runner: Runner) -> None:
        short = SamplingParams(max_tokens=1)
        _assert_plain(built, runner, [Request((t,), short.with_(max_tokens=1 + t), t) for t in range(4)])

    @pytest.mark.parametrize("room", [1, 2, 5, 9])
    def test_nothing_is_generated_past_the_context(self, built: Drafter, runner: Runner, room: int) -> None:
        engine = Engine(runner, built, vocab_size=VOCAB, context=len(PROMPTS[0]) + room)
        row = engine.find(engine.add(PROMPTS[0], SamplingParams(), seed=1))
        list(engine.run())
        assert row is not None and (row.num_output, row.finish_reason) == (room, "length")

    def test_what_earlier_prompts_left_in_the_cache_changes_nothing(
        self, built: Drafter, runner: Runner
    ) -> None:
        """A prompt's beginning may not be observed, unless the drafter is fed hidden states of all of it."""
        start = tuple((7 * i) % 60 for i in range(70))
        many = [replace(r, prompt=start + r.prompt) for r in requests(0.0)[:3]]
        twin = target_model()
        want = [plain_decode(twin, r, vocab_size=VOCAB, eos_ids=EOS) for r in many]
        counts = []
        for tokens in (0, 2000):
            engine = _engine(built, runner, max_rows=3, chunk=40, prefix_tokens=tokens)
            assert run_all(engine, many[:1]) == want[:1]
            assert run_all(engine, many) == want
            counts.append((engine.counts.draft_tokens, engine.counts.accepted_tokens))
        assert built.learns or counts[0] == counts[1], "the same drafts"
        whole = built.needs.features and not built.needs.last_only
        assert (engine.prefix_counts.hits > 0) != whole

    # -- memory -----------------------------------------------------------------------------------

    def test_a_closed_row_leaves_no_memory(self, built: Drafter, runner: Runner) -> None:
        memory, sizes = built.memory_bytes, _sizes(built)
        for _ in range(3):
            _watch(built, runner, requests(1.0))
        assert _sizes(built) == sizes
        if built.learns:
            built.shutdown()  # what was learned was all there was
            assert built.memory_bytes <= memory
        else:
            assert built.memory_bytes == memory

    def test_a_cancelled_row_leaves_no_memory_and_its_id_may_come_again(
        self, built: Drafter, runner: Runner
    ) -> None:
        """A second engine counts its ids from 0 again, and its prompts are observed from 0 again."""
        memory, sizes = built.memory_bytes, _sizes(built)
        for steps in (1, 2, 3, 5):
            engine = _engine(built, runner, chunk=3)
            ids = [engine.add(r.prompt, r.params, seed=r.seed) for r in requests(0.0)]
            for _ in range(steps):
                engine.step()
            for seq_id in ids:
                engine.cancel(seq_id)
            engine.apply_cancels()
            assert _sizes(built) == sizes
            assert built.learns or built.memory_bytes == memory
        _assert_plain(built, runner, requests(0.0)[::-1])

    def test_closing_what_is_not_there_changes_nothing(self, built: Drafter, runner: Runner) -> None:
        built.close(12345)
        built.close(-1)
        _assert_plain(built, runner, requests(0.0)[:2])

    def test_shutdown_can_be_called_again(self, built: Drafter, runner: Runner) -> None:
        _watch(built, runner, requests(0.0)[:1])
        built.shutdown()
        built.shutdown()


# -- how the tests are run ------------------------------------------------------------------------------


def _engine(drafter: Drafter, runner: Runner, **options: Any) -> Engine:
    return Engine(runner, drafter, vocab_size=VOCAB, eos_ids=EOS, **options)


def _watch(
    drafter: Drafter,
    runner: Runner,
    many: Sequence[Request],
    asked: list[int] | None = None,
    check_company: bool = False,
) -> tuple[list[list[int]], list[tuple[DraftRequest, Draft]]]:
    """The outputs, and every request with the draft it got (with the tokens as they were then)."""
    seen: list[tuple[DraftRequest, Draft]] = []
    propose = drafter.propose

    def spy(batch: Sequence[DraftRequest]) -> list[Draft]:
        frozen = [
            DraftRequest(r.seq_id, tuple(r.tokens), r.prompt_length, r.budget, r.params, r.seed)
            for r in batch
        ]
        drafts = propose(batch)
        assert len(drafts) == len(batch), "one draft a request"
        seen.extend(zip(frozen, drafts, strict=True))
        if check_company:
            assert [d.tree for d in propose(batch[::-1])] == [d.tree for d in drafts[::-1]]
            assert [propose([r])[0].tree for r in batch] == [d.tree for d in drafts]
        return drafts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "propose", spy)
        outputs = run_all(_engine(drafter, runner, max_rows=4, chunk=6), many)
    return outputs, seen


def _drafts(drafter: Drafter, runner: Runner, many: Sequence[Request]) -> Known:
    """(seed, committed tokens) -> the tree."""
    seen = _watch(drafter, runner, many)[1]
    return {(r.seed, len(r.tokens)): (d.tree.tokens, d.tree.parents) for r, d in seen}


def _assert_plain(drafter: Drafter, runner: Runner, many: Sequence[Request]) -> None:
    twin = target_model()
    want = [plain_decode(twin, r, vocab_size=VOCAB, eos_ids=EOS) for r in many]
    assert run_all(_engine(drafter, runner, max_rows=3, chunk=5), many) == want


@torch.inference_mode()
def _assert_law(drafter: Drafter, runner: Runner, count: int = 400) -> None:
    """The joint law of three tokens over `count` seeds, by chi-square (fixed seeds, p > 1e-4)."""
    params = SamplingParams(max_tokens=4, temperature=1.0, top_k=3)
    prompt, twin = PROMPTS[0], target_model()
    pipeline = LogitsPipeline(params, VOCAB, frozenset(), len(prompt))
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for out, mass in law.items():
            row = twin(input_ids=torch.tensor([[*prompt, *out]]), use_cache=False).logits[0, -1]
            probs = pipeline.law(row, (*prompt, *out))
            for token, logp in zip(probs.ids.tolist(), probs.logp.tolist(), strict=True):
                longer[tuple([*out, token])] = mass * float(torch.tensor(logp).exp())
        law = longer
    engine = Engine(runner, drafter, vocab_size=VOCAB, max_rows=100)
    outputs = run_all(engine, [Request(prompt, params, seed) for seed in range(count)])
    assert chi_square(Counter(tuple(o[:3]) for o in outputs), law) > 1e-4


def _sizes(drafter: Drafter) -> dict[str, int]:
    """Entries of every container that the drafter holds."""
    return {k: len(v) for k, v in vars(drafter).items() if isinstance(v, (dict, list, set))}
