"""Suffix decoding: the same sample, what is remembered, on disk and between threads."""

from __future__ import annotations

import os
import random
import threading
from array import array
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.draft import Observation
from slipstream.core.params import SamplingParams
from slipstream.drafters import build_drafter
from slipstream.drafters._suffix_guess import Limits
from slipstream.drafters._suffix_store import MAGIC, SAVE_EVERY, SuffixStore
from slipstream.drafters.base import TargetInfo
from slipstream.drafters.suffix import SuffixConfig, SuffixDrafter
from slipstream.errors import DrafterError, ParameterError
from slipstream.model.pack import ROWS

INFO = TargetInfo(24, 2048)


def suffix(store: SuffixStore | None = None, **options: Any) -> SuffixDrafter:
    return SuffixDrafter(SuffixConfig(**{"block": 1, **options}), INFO, store)


@pytest.mark.parametrize(
    "spec", ["suffix", "suffix:tree=true,factor=2,min_token_prob=0", "suffix:remember=false,block=1"]
)
def test_the_sample_is_that_of_plain_decoding(bench: Any, spec: str) -> None:
    counts = bench.assert_same_sample(lambda: build_drafter(spec, INFO))
    assert counts.accepted_tokens > 0 and counts.sources["suffix"].accepted_tokens == counts.accepted_tokens


def test_a_repeated_text_is_drafted_as_far_as_the_match_allows(bench: Any) -> None:
    drafter = suffix()
    (draft,) = drafter.propose([bench.ask([1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3], depth=8)])
    assert draft.tree.tokens == (3, 4, 5, 6) and draft.scores == (1.0, 1.0, 1.0, 1.0)
    assert draft.tree.is_chain and draft.q is None


@pytest.mark.parametrize(("matched", "drafted"), [(1, 3), (2, 3), (3, 3), (4, 7), (7, 7), (8, 9)])
def test_drafts_fill_the_blocks_that_a_step_is_padded_to(bench: Any, matched: int, drafted: int) -> None:
    """Three tokens cost no row more than plain decoding has; four more need a match that promises them."""
    text = [*range(40), 99, *range(10 - matched, 10)]
    drafter = SuffixDrafter(SuffixConfig(num_speculative_tokens=9), TargetInfo(200, 2048))
    (draft,) = drafter.propose([bench.ask(text, depth=9)])
    assert draft.tree.tokens[1:] == tuple(range(10, 10 + drafted))


def test_the_block_is_the_one_that_steps_are_padded_to() -> None:
    assert SuffixConfig().block == ROWS and (SuffixConfig().num_speculative_tokens + 1) % ROWS == 0


def test_new_text_drafts_nothing(bench: Any) -> None:
    (draft,) = suffix().propose([bench.ask(list(range(20)))])
    assert draft.tree.num_drafted == 0


def test_a_score_below_the_threshold_drafts_nothing(bench: Any) -> None:
    tokens = [1, 2, 3, 8, 1, 2, 4, 9, 5, 1, 2]
    assert suffix(min_score=0.5).propose([bench.ask(tokens, 1)])[0].tree.num_drafted == 1
    assert suffix(min_score=0.6).propose([bench.ask(tokens, 1)])[0].tree.num_drafted == 0


def test_a_guess_has_the_budgets_size_however_large_its_own_may_be(bench: Any) -> None:
    for tree in (False, True):
        drafter = suffix(factor=1e308, offset=1e308, tree=tree)
        (draft,) = drafter.propose([bench.ask([1, 2, 3, 4, 1, 2], depth=2)])
        assert draft.tree.tokens == (2, 3, 4)


def test_a_tree_holds_several_continuations(bench: Any) -> None:
    tokens = [1, 2, 3, 8, 1, 2, 4, 9, 5, 1, 2]
    (draft,) = suffix(tree=True).propose([bench.ask(tokens, 2, 2)])
    assert draft.tree.parents == (-1, 0, 0) and set(draft.tree.tokens[1:]) == {3, 4}


def test_finished_outputs_are_remembered_and_prompts_are_not(bench: Any) -> None:
    drafter = suffix()
    drafter.open(0, [1, 2, 3])
    drafter.observe([Observation(0, 0, (1, 2))])
    drafter.observe([Observation(0, 2, (3, 10, 11)), Observation(0, 5, (12,))])
    drafter.close(0)
    assert drafter.store is not None and drafter.store.num_tokens == 3
    (draft,) = drafter.propose([bench.ask([5, 10], seq_id=1)])
    assert draft.tree.tokens == (10, 11)
    assert drafter.propose([bench.ask([5, 2], seq_id=2)])[0].tree.num_drafted == 0


def test_every_token_of_an_answer_is_remembered_the_last_one_too(bench: Any) -> None:
    drafter = suffix()
    outputs, _ = bench.generate(drafter, bench_run())
    assert drafter.store is not None
    assert sorted(map(list, drafter.store._texts)) == sorted(outputs)
    (draft,) = drafter.propose([bench.ask([0, *outputs[0][-5:-1]], depth=1, seq_id=99)])
    assert draft.tree.tokens[1:] == (outputs[0][-1],)
    drafter.shutdown()


def test_the_own_text_wins_a_tie(bench: Any) -> None:
    drafter = suffix()
    assert drafter.store is not None
    drafter.store.add([5, 6, 7])
    (draft,) = drafter.propose([bench.ask([5, 6, 8, 9, 5, 6], depth=1)])
    assert draft.tree.tokens == (6, 8)


def test_nothing_is_left_of_closed_rows_and_after_shutdown(bench: Any) -> None:
    drafter = suffix(remember=False)
    bench.generate(drafter, bench_run())
    assert drafter.memory_bytes == 0 and drafter.store is None
    drafter = suffix()
    bench.generate(drafter, bench_run())
    assert drafter.store is not None and drafter.memory_bytes == drafter.store.memory_bytes > 0
    drafter.close(12345)
    drafter.shutdown()
    assert drafter.memory_bytes == 0


def test_a_cancelled_row_is_freed_and_what_it_said_is_remembered(bench: Any) -> None:
    drafter = suffix()
    bench.engine.set_drafter(drafter)
    seq_id = bench.engine.add([1, 2, 3], bench_run())
    for _ in range(8):
        bench.engine.step()
    row = bench.engine.find(seq_id)
    assert drafter.memory_bytes > 0 and drafter.store is not None and not len(drafter.store)
    bench.engine.cancel(seq_id)
    bench.engine.apply_cancels()
    assert drafter.store.num_tokens == len(row.output)
    assert drafter.memory_bytes == drafter.store.memory_bytes


def bench_run() -> SamplingParams:
    return SamplingParams(max_tokens=20)


def test_the_oldest_texts_are_evicted() -> None:
    store = SuffixStore(100, max_requests=3, max_tokens=50)
    rng = random.Random(1)
    for i in range(60):
        store.add([rng.randrange(5) for _ in range(rng.randrange(40))] + [90 + i % 10] * 2)
        store.check()
    assert len(store) <= 3
    tail = array("i", [99])
    assert store.best(tail, Limits(4, 4)) is not None
    store.add(list(range(49)))
    assert len(store) == 1 and store.best(tail, Limits(4, 4)) is None
    store.add(list(range(80)))
    store.check()
    assert store.num_tokens == 50
    assert store.best(array("i", [29]), Limits(4, 4)) is None
    assert store.best(array("i", [30]), Limits(4, 4)) is not None


@pytest.mark.parametrize("bounds", [{"max_requests": 0}, {"max_tokens": 0}])
def test_a_store_without_room_keeps_nothing(bounds: dict[str, int]) -> None:
    store = SuffixStore(100, **bounds)
    store.add([1, 2, 3])
    store.check()
    assert len(store) == 0


# -- threads --------------------------------------------------------------------------------------


def test_engines_in_threads_share_a_store(bench: Any) -> None:
    """Drafters of several threads add to, read from and evict from one store."""
    store = SuffixStore(24, max_requests=6, max_tokens=300)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            rng, drafter = random.Random(seed), suffix(store)
            for row in range(15):
                tokens = [rng.randrange(4) for _ in range(5)]
                drafter.open(row, tokens)
                for _ in range(20):
                    (draft,) = drafter.propose([bench.ask(tokens, seq_id=row, prompt=5)])
                    assert draft.tree.tokens[0] == tokens[-1]
                    tokens.append(rng.randrange(4))
                drafter.close(row)
            drafter.shutdown()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    store.check()
    assert 0 < len(store) <= 6


def test_a_shared_store_outlives_a_drafter(bench: Any) -> None:
    store = SuffixStore(24)
    one, other = suffix(store), suffix(store)
    one.open(0, [1])
    one.observe([Observation(0, 0, (1, 7, 8, 9))])
    one.close(0)
    one.shutdown()
    assert other.propose([bench.ask([3, 7])])[0].tree.tokens == (7, 8)


# -- on disk --------------------------------------------------------------------------------------


def filled(path: Path, **options: Any) -> SuffixStore:
    store = SuffixStore(24, path=path, vocabulary="v", **options)
    store.add([1, 2, 3, 4])
    store.add([5, 6, 7])
    store.save()
    return store


def test_a_store_comes_back_from_its_file(tmp_path: Path) -> None:
    filled(tmp_path / "new" / "store")
    again = SuffixStore(24, path=tmp_path / "new" / "store", vocabulary="v")
    again.check()
    assert (len(again), again.num_tokens) == (2, 7)
    guess = again.best(array("i", [2]), Limits(1, 1))
    assert guess is not None and guess.tokens == (3,)
    smaller = SuffixStore(24, path=tmp_path / "new" / "store", vocabulary="v", max_tokens=4)
    assert smaller.num_tokens == 3  # the oldest did not fit


def test_the_drafter_keeps_its_store_between_runs(tmp_path: Path, bench: Any) -> None:
    spec = f"suffix:store={tmp_path / 'kept'}"
    first = build_drafter(spec, INFO)
    outputs, counts = bench.generate(first, bench_run())
    first.shutdown()
    second = build_drafter(spec, INFO)
    assert bench.generate(second, bench_run())[0] == outputs
    assert second.memory_bytes > 0
    second.shutdown()


def test_a_death_in_mid_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path / "store")
    before = (tmp_path / "store").read_bytes()

    class Killed(BaseException):
        pass

    def die(*_: object) -> None:
        raise Killed

    store.add([9, 9, 9])
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(os, name, die)
            store.save()
        assert (tmp_path / "store").read_bytes() == before
        assert len(SuffixStore(24, path=tmp_path / "store", vocabulary="v")) == 2
    store.save()
    assert len(SuffixStore(24, path=tmp_path / "store", vocabulary="v")) == 3
    assert {p.name for p in tmp_path.iterdir()} <= {"store", ".store.lock"}


@pytest.mark.parametrize("damage", ["cut", "flipped", "header", "infinite", "other file", "empty"])
def test_a_damaged_file_is_refused_with_what_to_do(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "store"
    filled(path)
    raw = path.read_bytes()
    path.write_bytes(
        {
            "cut": raw[:-3],
            "flipped": raw[:-1] + bytes([raw[-1] ^ 1]),
            "header": MAGIC + b"{}\n",
            "infinite": MAGIC + b'{"vocab_size": 24, "vocabulary": "v", "lengths": [Infinity]}\n',
            "other file": b"hello",
            "empty": b"",
        }[damage]
    )
    with pytest.raises(DrafterError, match="delete it, or give another store=FILE"):
        SuffixStore(24, path=path, vocabulary="v")


@pytest.mark.parametrize(("vocab", "vocabulary"), [(25, "v"), (24, "w")])
def test_a_file_of_another_tokenizer_is_refused(tmp_path: Path, vocab: int, vocabulary: str) -> None:
    filled(tmp_path / "store")
    with pytest.raises(DrafterError, match="another tokenizer"):
        SuffixStore(vocab, path=tmp_path / "store", vocabulary=vocabulary)


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DrafterError, match="cannot be written"):
        SuffixStore(24, path=tmp_path / "file" / "store")
    with pytest.raises(DrafterError, match="is not a file; give another store=FILE"):
        SuffixStore(24, path=tmp_path)


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("/proc/store", "cannot be written"),
        ("/proc/self/fdinfo/store", "cannot be written"),
        ("/dev/null", "is not a file"),
        ("/dev/zero", "is not a file"),
        ("{folder}/pipe", "is not a file"),
        ("{folder}/" + "x" * 300, "cannot be written"),
        ("{folder}/nul\0", "cannot be written"),
        ("~nobody-of-this-name/store", "leads nowhere"),
    ],
)
def test_a_place_where_no_file_can_be_is_refused_at_once(tmp_path: Path, place: str, why: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises((DrafterError, ParameterError), match=why):
        SuffixStore(24, path=place.replace("{folder}", str(tmp_path)))


@pytest.mark.skipif(os.geteuid() == 0, reason="everything is allowed to root")
@pytest.mark.parametrize("mode", [0o000, 0o500, 0o400])
def test_a_folder_without_rights_is_refused_at_once(tmp_path: Path, mode: int) -> None:
    (tmp_path / "closed").mkdir(mode=mode)
    with pytest.raises(DrafterError, match="cannot be written .Permission denied"):
        SuffixStore(24, path=tmp_path / "closed" / "store")
    (tmp_path / "closed").chmod(0o700)


def test_looking_at_a_place_leaves_nothing_in_it(tmp_path: Path) -> None:
    SuffixStore(24, path=tmp_path / "store")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_ends_no_request_but_is_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SuffixStore(24, path=tmp_path / "store")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        for _ in range(SAVE_EVERY):
            store.add([1, 2, 3])
        with pytest.raises(DrafterError, match="No space left"):
            store.save()
    store.save()
    assert len(SuffixStore(24, path=tmp_path / "store")) == SAVE_EVERY


@pytest.mark.parametrize(
    "options",
    [
        "max_depth=1",
        "block=0",
        "factor=-1",
        "factor=inf",
        "factor=nan",
        "offset=inf",
        "offset=-inf",
        "offset=nan",
        "min_score=-1",
        "min_token_prob=1.5",
        "num_speculative_tokens=-1",
        "max_tokens=-1",
        "store=x,remember=false",
    ],
)
def test_bad_options_are_refused(options: str) -> None:
    with pytest.raises(ParameterError, match="suffix:"):
        build_drafter(f"suffix:{options}", INFO)
