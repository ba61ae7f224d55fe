"""Which source feeds a method: stored states, the target online, or text alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from slipstream.errors import ParameterError
from slipstream.model.identity import require_same
from slipstream.model.load import LoadedModel
from slipstream.model.runner import Runner
from slipstream.model.store import read_json
from slipstream.train.capture import Captor, Captured
from slipstream.train.dataset import MANIFEST, DataSet, load_data
from slipstream.train.method import Wanted
from slipstream.train.samples import Source
from slipstream.train.sources import OnlineSource, StoredSource

# What decides the tokens of a data set; the weights may be of another dtype.
_DATA_IDENTITY = ("fingerprint", "tokenizer")


def data_kind(folder: Path) -> Literal["data", "states"]:
    """What a folder holds. ParameterError if neither."""
    kind = read_json(folder / MANIFEST).get("kind") if (folder / MANIFEST).is_file() else None
    if kind not in ("data", "states"):
        raise ParameterError(
            f"{folder} holds no training data: make it with slipstream train data, and train capture"
        )
    return kind  # type: ignore[no-any-return]


def same_target(folder: Path, target: Mapping[str, Any]) -> DataSet:
    """A data folder's samples, if this target made them."""
    data = load_data(folder)
    require_same(data.manifest["target"], target, "answers", folder, *_DATA_IDENTITY)
    return data


@contextmanager
def feed(
    wanted: Wanted, folder: Path, loaded: LoadedModel, target: Mapping[str, Any], online: bool
) -> Iterator[Source]:
    """The source of what a method wants. Online, the target's weights are packed while the body runs."""
    needs = wanted.needs
    nothing = not needs.hidden_layers and not needs.last_hidden
    if data_kind(folder) == "states":
        yield StoredSource(folder, _stored(wanted, folder), target)
        return
    data = same_target(folder, target)
    if nothing:
        yield OnlineSource(data, None, target)
        return
    if not online:
        raise ParameterError(
            f"{folder} holds answers without the target's states: capture them (slipstream train capture),"
            " or let the target compute them while it trains (--online)"
        )
    runner = Runner(loaded.model, pack=True)
    captor = Captor(
        runner,
        min(runner.vocab_size, len(loaded.tokenizer)),
        Captured(needs.hidden_layers, needs.last_hidden),
    )
    try:
        yield OnlineSource(data, captor, target)
    finally:
        captor.close()
        runner.close()


def _stored(wanted: Wanted, folder: Path) -> Captured:
    """What to read of stored states: the last states if they are there, else top logits where those do."""
    there = Captured.from_json(read_json(folder / MANIFEST)["captured"])
    needs = wanted.needs
    if needs.last_hidden and not there.last_hidden and wanted.or_top_logits and there.top_k:
        return Captured(needs.hidden_layers, False, there.top_k)
    # a draft vocabulary is checked against the target's own choice, which top logits name
    return Captured(needs.hidden_layers, needs.last_hidden, min(there.top_k, 1))
