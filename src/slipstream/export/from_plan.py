"""From what `slipstream plan --json` says to a deployment: drafter, lengths by load, prediction."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.core.places import expanded
from slipstream.errors import ParameterError
from slipstream.model.catalogue import find
from slipstream.model.house import house_model

_SCHEMA = "slipstream-plan/"
# Our drafters that engines have, and what they are called there.
_KINDS = {
    "ngram": ("ngram",),
    "suffix": ("suffix",),
    "draft_model": ("draft_model",),
    "crossvocab": ("draft_model",),
    "medusa": ("medusa",),
    "eagle": ("eagle", "eagle3"),
}
_HEADS = ("medusa", "eagle")
_ONE_LENGTH = ("num_speculative_tokens", "per_batch_size", "off_above")
Lengths = Sequence[tuple[int, int]]


def engine_name(spec: str, here: bool = False) -> str:
    """A model as an engine finds it: the hub id, or the house model's folder, for a name that only Slipstream
    knows. here: the engine runs on this machine, and a copy in the cache will do.
    """
    house, entry = house_model(spec), find(spec)
    if house is not None:
        return str(house)
    if entry is None:
        return spec
    from slipstream.model.store import Store, manifest  # not in an engine's own environment

    copy = Store.default().model(entry.name)
    return str(copy) if here and manifest(copy) is not None else entry.hub_id


def is_advice(values: Mapping[str, Any]) -> bool:
    """Whether `slipstream plan --json` printed this. ParameterError for a file of `slipstream measure`."""
    if values.get("kind") == "slipstream-measure":
        raise ParameterError(
            "it is a measurement: `slipstream plan --measured FILE --batch 1,8,32 --json` makes a plan of it"
        )
    return str(values.get("schema", "")).startswith(_SCHEMA)


def deployment(advice: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `DeployPlan`. changes: fields that are given and win.

    The drafter is the one of the smallest batch that it pays for, or the one that is given. Raises
    ParameterError for what no engine can load or has.
    """
    try:
        return _deployment(advice, changes)
    except ParameterError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ParameterError(
            f"it is not what `slipstream plan --json` of this version prints ({error!r}): make it again"
        ) from None


def _deployment(advice: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    kind = "an estimate" if advice["estimate"] else "measured"
    fields: dict[str, Any] = {"notes": [f"slipstream plan ({kind}): {advice['verdict']}"]}
    if "target" not in changes:
        fields["target"] = _loadable(str(advice["model"]["name"]), "target", "--target")
    gpus = re.match(r"(\d+) × ", str(advice["machine"]["name"]))
    if gpus and "tensor_parallel" not in changes:
        fields["tensor_parallel"] = int(gpus[1])
    batches = sorted(advice["batches"], key=lambda b: int(b["batch"]))
    spec = _drafter(batches, changes.get("drafter"))
    if spec is None:
        if "model" in changes and "drafter" not in changes:
            raise ParameterError(f"it says: {advice['verdict']} Leave --model out, or insist with --drafter")
        return fields
    options = [{o["drafter"]: o for o in b["options"]}[spec] for b in batches]
    lengths = [
        (int(b["batch"]), int(o["num_speculative_tokens"]) if o["pays"] else 0)
        for b, o in zip(batches, options, strict=True)
    ]
    fields |= _draft(spec, changes)
    if not any(length for _, length in lengths):  # it was asked for all the same
        return fields
    off_from = advice["off_from_batch"]
    paying = [b["best"]["drafter"] for b in batches if b["speculate"]]
    rows = _rows(lengths, off_from, own=bool(paying) and paying[-1] == spec)
    fields["num_speculative_tokens"] = max(length for _, length in lengths)
    if len({length for _, _, length in rows}) > 1 and changes.keys().isdisjoint(_ONE_LENGTH):
        fields["per_batch_size"] = rows
        last = max(batch for batch, length in lengths if length)
        until = next((first for first, _, length in rows if not length and first > last), None)
        if until is not None and until > 2 * last:
            fields["notes"].append(
                f"the length for batch {last} is taken up to batch {until - 1}, for the plan was asked for no"
                " more: `slipstream plan --batch` with more sizes is finer"
            )
    first = options[0]
    if first["nodes"] > first["num_speculative_tokens"]:
        fields["notes"].append("the plan drafts trees and engines draft chains: no tau is predicted for them")
    elif lengths[0][1] and changes.keys().isdisjoint(_ONE_LENGTH[:2]):  # it is the tau of that length
        fields["predicted_tau"] = round(float(first["tau"]), 2)
    return fields


def _drafter(batches: Sequence[Mapping[str, Any]], wanted: str | None) -> str | None:
    """The drafter as the plan spells it; None: plain decoding."""
    if wanted == "none":
        return None
    known = [str(o["drafter"]) for o in batches[0]["options"]]
    if wanted is not None:
        fitting = [name for name in known if wanted in _KINDS.get(_kind(name), ())]
        if not fitting:
            raise ParameterError(f"it says nothing about {wanted}: it is about {', '.join(known)}")
        return fitting[0]
    best = next((str(b["best"]["drafter"]) for b in batches if b["speculate"]), None)
    if best is not None and _kind(best) not in _KINDS:
        others = [name for name in known if _kind(name) in _KINDS]
        instead = f"; of the others they have {', '.join(others)} (--drafter)" if others else ""
        raise ParameterError(f"its best drafter is {best}, which engines do not have{instead}")
    return best


def _kind(spec: str) -> str:
    return spec.partition(":")[0]


def _draft(spec: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Kind and model of a drafter that the plan names as `--drafter` takes it."""
    kind, _, options = spec.partition(":")
    named = re.search(r"(?:^|,)(?:model|heads)=([^,]+)", options)
    fields: dict[str, Any] = {"drafter": _KINDS[kind][0]}
    if kind == "crossvocab":
        fields["heterogeneous_vocab"] = True
    with_model = kind in ("draft_model", "crossvocab")
    if (kind in _HEADS or (with_model and named is None)) and "model" not in changes:
        raise ParameterError(
            f"it drafts with {spec}: write that for the engine with `slipstream export`, and name the folder"
            " with --model"
        )
    if kind == "eagle" and "drafter" not in changes:
        fields["drafter"] = _eagle(expanded(str(changes["model"])))
    if with_model and named is not None and "model" not in changes:
        fields["model"] = _loadable(named[1], "draft", "--model")
    return fields


def _eagle(folder: Path) -> str:
    """eagle or eagle3, by what the head's folder holds."""
    if not folder.is_dir():
        raise ParameterError(f"{folder} is not here to be looked into: say --drafter eagle or eagle3")
    from slipstream.export.heads import kind_of

    return kind_of(folder)


def _loadable(name: str, what: str, option: str) -> str:
    found = engine_name(name)
    if found == name and "/" not in name and not expanded(name).is_dir():
        raise ParameterError(
            f"it calls the {what} {name!r}, which no engine can load: name its folder or hub id with {option}"
        )
    return found


def _rows(lengths: Lengths, off_from: int | None, own: bool) -> list[tuple[int, int, int]]:
    """First, last, length.

    Between two batch sizes the larger one's length holds, which is seldom too long; behind the last that
    pays its length holds up to off_from, from where on nothing is drafted. own: off_from is this drafter's.
    """
    rows: list[tuple[int, int, int]] = []

    def add(last: int, length: int) -> None:
        first = rows[-1][1] + 1 if rows else 1
        if first > last:
            return
        if rows and rows[-1][2] == length:
            first = rows.pop()[0]
        rows.append((first, last, length))

    for batch, length in lengths:
        if own and not length and rows and rows[-1][2] and off_from is not None:
            add(min(off_from - 1, batch - 1), rows[-1][2])
        add(batch, length)
    if rows[-1][2] and off_from is not None:
        add(off_from - 1, rows[-1][2])
        add(max(off_from, rows[-1][1] + 1), 0)
    return rows
