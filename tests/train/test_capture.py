"""Captured states are what serving computes: stored, resumed and online bit for bit, never mixed."""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch

from slipstream.core.params import SamplingParams
from slipstream.errors import CapacityError, ParameterError
from slipstream.model import disk
from slipstream.model.identity import identity
from slipstream.model.load import load
from slipstream.model.runner import Runner
from slipstream.train.capture import Captor, Captured
from slipstream.train.dataset import DataSet
from slipstream.train.samples import Sample
from slipstream.train.shards import capture, plan_capture
from slipstream.train.sources import OnlineSource, StoredSource

VOCAB = 258
ALL = Captured((0, 1, 3), True, 5)


def sample(length: int, seed: int, answer: int = 3) -> Sample:
    tokens = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Sample(tuple(tokens), tuple(i >= answer for i in range(length)))


LENGTHS = (9, 30, 17, 600, 8, 25, 12)  # one is read in two pieces
DATA = DataSet({}, tuple(sample(n, n) for n in LENGTHS), (sample(11, 1), sample(14, 2)))


@pytest.fixture(params=["float32", "bfloat16"])
def captor(request, target_folder):
    loaded = load(str(target_folder), dtype=request.param)
    target = identity(loaded.model, loaded.tokenizer, "tiny")
    runner = Runner(loaded.model, pack=True)
    captor = Captor(runner, VOCAB, ALL)
    captor.target = target
    yield captor
    runner.close()


@pytest.fixture
def fast(target_folder):
    """A captor of the fp32 target alone."""
    loaded = load(str(target_folder))
    target = identity(loaded.model, loaded.tokenizer, "tiny")
    runner = Runner(loaded.model, pack=True)
    captor = Captor(runner, VOCAB, ALL)
    captor.target = target
    yield captor
    runner.close()


def plan_for(captor, folder, data=None, **options):
    data = data or DataSet({"target": captor.target}, DATA.train, DATA.heldout)
    return plan_capture(folder, captor.target, data, captor.captured, **options)


def equal(one, two):
    assert torch.equal(one.tokens, two.tokens) and torch.equal(one.loss, two.loss)
    assert torch.equal(one.lengths, two.lengths) and one.features.keys() == two.features.keys()
    for key in one.features:
        assert one.features[key].dtype == two.features[key].dtype
        assert torch.equal(one.features[key], two.features[key]), key
    for a, b in zip(one.logits, two.logits, strict=True):
        assert torch.equal(a, b)


def batches(source, split="train", **how):
    return list(source.batches(split, **{"epoch": 0, "batch_size": 2, "seed": 3, **how}))


def test_stored_and_online_batches_are_equal_bit_for_bit(captor, tmp_path):
    assert capture(plan_for(captor, tmp_path / "s", shard_bytes=20_000), captor)
    assert len(list((tmp_path / "s").glob("train-*.safetensors"))) > 2
    stored = StoredSource(tmp_path / "s", target=captor.target)
    online = OnlineSource(DATA, captor, captor.target)
    for split, count in (("train", len(LENGTHS)), ("heldout", 2)):
        assert stored.size(split) == online.size(split) == count
        pairs = list(zip(batches(stored, split), batches(online, split), strict=True))
        assert sum(len(a.tokens) for a, _ in pairs) == count
        for a, b in pairs:
            equal(a, b)
    assert stored.manifest["counts"]["train"]["samples"] == len(LENGTHS)
    assert stored.manifest["dtype"] == captor.target["dtype"]


def test_the_states_are_the_models_own(fast, target_folder):
    model = load(str(target_folder)).model  # untouched
    for source in (DATA.train[1], DATA.train[3]):
        states = fast(source)
        out = model(torch.tensor([source.tokens]), output_hidden_states=True)
        for key, index in ((0, 0), (1, 1)):
            torch.testing.assert_close(
                states.features[key], out.hidden_states[index][0], atol=1e-4, rtol=1e-4
            )
        norm = model.model.norm
        torch.testing.assert_close(norm(states.features[3]), states.features["last"], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(states.features["last"], out.hidden_states[-1][0], atol=1e-4, rtol=1e-4)
        values, ids = out.logits[0].topk(5)
        torch.testing.assert_close(states.logits[0], values, atol=1e-3, rtol=1e-3)
        assert (states.logits[1] == ids).float().mean() > 0.99  # near-ties


def test_the_row_of_a_token_speaks_about_the_next_one(session, target):
    """Greedy answers: the best logit at t is the answer's token t + 1, for every token with a loss."""
    prompt = list(b"<user>why?")
    tokens = (*prompt, *session.generate(prompt, SamplingParams(max_tokens=40)).tokens)
    answered = Sample(tokens, tuple(i >= len(prompt) for i in range(len(tokens))))
    captor = Captor(session.engine.runner, VOCAB, ALL)
    (batch,) = OnlineSource(DataSet({}, (answered,), ()), captor, target).batches(
        "train", epoch=0, batch_size=1, seed=0
    )
    captor.close()
    best = batch.logits[1][0, :-1, 0]
    said = batch.loss[0, 1:]
    assert int(said.sum()) == 40
    assert torch.equal(best[said], batch.tokens[0, 1:][said])
    assert not torch.equal(best[:-1][said[1:]], batch.tokens[0, 2:][said[1:]])


def test_batches_are_padded_with_nothing_and_can_enter_a_loss(fast):
    online = OnlineSource(DATA, fast, fast.target)
    (batch, *_) = batches(online, batch_size=3)
    for b, length in enumerate(batch.lengths.tolist()):
        assert not batch.loss[b, length:].any() and not batch.tokens[b, length:].any()
        assert not batch.features["last"][b, length:].any()
        assert batch.features["last"][b, :length].any(-1).all()
    weight = torch.ones(batch.features[0].shape[-1], requires_grad=True)
    (batch.features[0] * weight).sum().backward()
    assert weight.grad is not None


def test_the_order_is_of_seed_and_epoch_and_can_begin_in_the_middle(fast, tmp_path):
    capture(plan_for(fast, tmp_path / "s"), fast)
    for source in (StoredSource(tmp_path / "s"), OnlineSource(DATA, fast, fast.target)):
        order = [b.lengths.tolist() for b in batches(source)]
        assert order == [b.lengths.tolist() for b in batches(source)]
        assert order != [b.lengths.tolist() for b in batches(source, epoch=1)]
        assert order != [b.lengths.tolist() for b in batches(source, seed=4)]
        assert order[2:] == [b.lengths.tolist() for b in batches(source, skip=2)]
        assert sorted(n for b in order for n in b) == sorted(LENGTHS)
        held = [b.lengths.tolist() for b in batches(source, "heldout")]
        assert held == [b.lengths.tolist() for b in batches(source, "heldout", epoch=9, seed=1)] == [[11, 14]]


def test_a_source_gives_less_than_is_stored_but_not_more(fast, tmp_path):
    capture(plan_for(fast, tmp_path / "s"), fast)
    (batch, *_) = batches(StoredSource(tmp_path / "s", Captured((1,), False, 2)))
    (whole, *_) = batches(StoredSource(tmp_path / "s"))
    assert list(batch.features) == [1]
    assert torch.equal(batch.logits[0], whole.logits[0][..., :2])
    with pytest.raises(ParameterError, match="capture again"):
        StoredSource(tmp_path / "s", Captured((2,)))
    with pytest.raises(ParameterError, match="capture again"):
        StoredSource(tmp_path / "s", Captured((1,), False, 6))


def test_text_alone_needs_no_target():
    source = OnlineSource(DATA, None, {})
    (batch, *_) = batches(source)
    assert batch.features == {} and batch.logits is None
    assert sum(len(b.tokens) for b in batches(source)) == len(LENGTHS)


def test_a_stopped_capture_goes_on_and_writes_the_same(fast, tmp_path):
    capture(plan_for(fast, tmp_path / "whole", shard_bytes=20_000), fast)
    seen = []
    folder = tmp_path / "cut"
    assert not capture(
        plan_for(fast, folder, shard_bytes=20_000), fast, report=seen.append, stopped=lambda: len(seen) >= 4
    )
    there = {p.name: p.stat().st_mtime_ns for p in folder.glob("*.safetensors")}
    assert 0 < len(there) < len(list((tmp_path / "whole").glob("*.safetensors")))
    whole = [s for s in plan_for(fast, folder, shard_bytes=20_000).shards if s.name in there]
    assert seen[-1].stored_tokens == sum(s.tokens for s in whole) <= seen[-1].done_tokens
    first: list = []  # of one large shard, which is not written yet
    large = plan_for(fast, tmp_path / "large")
    assert not capture(large, fast, report=first.append, stopped=lambda: len(first) >= 2)
    assert first[-1].stored_tokens == 0 < first[-1].done_tokens
    with pytest.raises(ParameterError, match="it resumes"):
        StoredSource(folder)
    victim = folder / min(there)
    os.truncate(victim, victim.stat().st_size - 10)
    (folder / ".train-00099.safetensors.partial").write_bytes(b"killed while it wrote")
    plan = plan_for(fast, folder, shard_bytes=20_000)
    assert min(there) in {s.name for s in plan.missing}
    assert capture(plan, fast)
    assert {p.name for p in folder.iterdir()} == {p.name for p in (tmp_path / "whole").iterdir()}
    for a, b in zip(batches(StoredSource(folder)), batches(StoredSource(tmp_path / "whole")), strict=True):
        equal(a, b)
    kept = [name for name in there if name != min(there)]
    assert all((folder / name).stat().st_mtime_ns == there[name] for name in kept)
    assert plan_for(fast, folder, shard_bytes=20_000).missing == ()
    assert not list(folder.glob(".*"))


def test_more_data_adds_shards_and_computes_only_what_is_new(fast, tmp_path):
    few = DataSet({"target": fast.target}, DATA.train[:4], DATA.heldout)
    capture(plan_for(fast, tmp_path / "s", few, shard_bytes=20_000), fast)
    plan = plan_for(fast, tmp_path / "s", shard_bytes=20_000)
    assert 0 < len(plan.missing) < len(plan.shards)
    capture(plan, fast)
    assert StoredSource(tmp_path / "s").size("train") == len(LENGTHS)


def test_less_data_does_not_shrink_what_is_there(fast, tmp_path):
    """A limit typed by mistake would delete hours of states."""
    capture(plan_for(fast, tmp_path / "s", shard_bytes=20_000), fast)
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "s").iterdir()}
    few = DataSet({"target": fast.target}, DATA.train[:4], DATA.heldout)
    with pytest.raises(ParameterError, match=r"the states of \d+ tokens, more than the \d+ that are asked"):
        plan_for(fast, tmp_path / "s", few, shard_bytes=20_000)
    # of a run that was killed less is there, and less may be asked for
    max((tmp_path / "s").glob("*.safetensors"), key=lambda p: p.stat().st_size).unlink()
    short = tuple(Sample(s.tokens[:300], s.loss[:300]) for s in DATA.train)
    assert plan_for(fast, tmp_path / "s", DataSet({"target": fast.target}, short, DATA.heldout)).missing
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "s").iterdir()}.items() <= before.items()
    with pytest.raises(ParameterError, match="no stream after layer 99"):
        plan_capture(tmp_path / "n", fast.target, few, Captured((0, 99)))
    for wrong in ("file", "file/below"):
        (tmp_path / "file").touch()
        with pytest.raises(ParameterError, match="cannot be used"):
            plan_for(fast, tmp_path / wrong, shard_bytes=20_000)


def test_shards_of_another_target_are_never_mixed_in(fast, other_folder, tmp_path):
    capture(plan_for(fast, tmp_path / "s", shard_bytes=20_000), fast)
    loaded = load(str(other_folder))
    other = identity(loaded.model, loaded.tokenizer, "tiny")
    assert other["tokenizer"] == fast.target["tokenizer"]
    data = DataSet({"target": other}, DATA.train, DATA.heldout)
    with pytest.raises(ParameterError, match="states of another target"):
        plan_capture(tmp_path / "s", other, data, ALL)
    with pytest.raises(ParameterError, match="states of another target"):
        StoredSource(tmp_path / "s", target=other)
    with pytest.raises(ParameterError, match="holds other states"):
        plan_capture(tmp_path / "s", fast.target, data, Captured((1,)))
    runner = Runner(loaded.model, pack=True)
    stranger = Captor(runner, VOCAB, ALL)
    stranger.target = other
    capture(plan_for(stranger, tmp_path / "o", shard_bytes=20_000), stranger)
    runner.close()
    (tmp_path / "s" / "train-00001.safetensors").write_bytes(
        (tmp_path / "o" / "train-00001.safetensors").read_bytes()
    )
    with pytest.raises(ParameterError, match="train-00001.*of another target"):
        StoredSource(tmp_path / "s")
    assert [s.name for s in plan_for(fast, tmp_path / "s", shard_bytes=20_000).missing] == [
        "train-00001.safetensors"
    ]


def test_answers_of_another_tokenizer_are_refused(fast, tmp_path):
    data = DataSet({"target": {**fast.target, "tokenizer": "0"}}, DATA.train, ())
    with pytest.raises(ParameterError, match="answers of another target"):
        plan_for(fast, tmp_path / "s", data)


def test_the_disk_is_computed_before_and_a_full_one_is_resumed(fast, tmp_path, monkeypatch):
    plan = plan_for(fast, tmp_path / "s", shard_bytes=20_000)
    with monkeypatch.context() as small:
        small.setattr(disk, "free_bytes", lambda folder: plan.needed_bytes - 1)
        with pytest.raises(CapacityError, match="needs .* of disk .* are free"):
            capture(plan, fast)
        assert not (tmp_path / "s").exists()
    sync, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    with monkeypatch.context() as filling:
        filling.setattr(os, "fsync", full)
        with pytest.raises(CapacityError, match="the disk is full .*it resumes"):
            capture(plan, fast)
    assert len(list((tmp_path / "s").glob("*.safetensors"))) == 1 and not list((tmp_path / "s").glob(".*"))
    again = plan_for(fast, tmp_path / "s", shard_bytes=20_000)
    assert again.needed_bytes < plan.needed_bytes == plan.total_bytes
    assert capture(again, fast)
    written = sum(p.stat().st_size for p in (tmp_path / "s").glob("*.safetensors"))
    overhead = 1500 * len(plan.shards)  # headers and offsets
    assert plan.total_bytes <= written <= plan.total_bytes + overhead
    assert json.loads((tmp_path / "s" / "manifest.json").read_text())["captured"]["hidden_layers"] == [
        0,
        1,
        3,
    ]


def test_what_cannot_be_captured_is_refused(fast, tmp_path):
    for captured, told in ((Captured(), "nothing is to be captured"), (ALL, "dtype must be")):
        with pytest.raises(ParameterError, match=told):
            plan_capture(
                tmp_path,
                fast.target,
                DataSet({"target": fast.target}, DATA.train, ()),
                captured,
                dtype="x" if captured else "auto",
            )
    with pytest.raises(ParameterError, match="distinct"):
        Captured((1, 1))
    with pytest.raises(ParameterError, match="top_k is 300"):
        Captor(fast.runner, VOCAB, Captured(top_k=300))
    with pytest.raises(ParameterError, match="context is 2048"):
        fast(sample(2049, 0))
