"""`slipstream train vocab`: the tokens of a model's answers, for a draft model to draft only these."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.train_shared import require_file
from slipstream.errors import ParameterError


def vocab(
    folder: Annotated[Path, typer.Argument(help="The folder that train data made.", show_default=False)],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The .json file to write.", show_default=False)
    ],
    count: Annotated[int, typer.Option("-n", "--count", help="Only so many of the commonest; 0: all.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> None:
    """List the tokens that come in a model's answers, the commonest first.

    A draft model takes the file: --drafter draft_model:model=DRAFT,draft_vocab=FILE drafts these tokens only.
    """
    from slipstream.cli.output import print_json
    from slipstream.model import disk
    from slipstream.train.build import answer_counts, coverage, ranked_tokens
    from slipstream.train.dataset import load_data
    from slipstream.train.samples import Batch, Split
    from slipstream.train.sources import OnlineSource

    require_file(output, "vocab.json")
    if count < 0:
        raise ParameterError(f"--count must be 0 or more, not {count}")
    data = load_data(folder)
    target = data.manifest["target"]
    source = OnlineSource(data, None, target)

    def batches(split: Split) -> Iterator[Batch]:
        return source.batches(split, epoch=0, batch_size=64, seed=0)

    counts = answer_counts(batches("train"), int(target["vocab_size"]))
    came = int((counts > 0).sum())
    ids = ranked_tokens(counts)[: min(count or came, came)]
    told = {
        "kind": "draft vocabulary",
        "target": target["name"],
        "tokenizer": target["tokenizer"],
        "ids": ids.tolist(),
        "counts": counts[ids].tolist(),
    }
    with disk.writing(output.parent):
        output.parent.mkdir(parents=True, exist_ok=True)
    disk.write_whole(output, (json.dumps(told) + "\n").encode())
    if json_:
        print_json(told)
    typer.echo(
        f"{len(ids)} of the {came} tokens that came, {coverage(batches('heldout'), ids):.1%} of the held-out"
        f" answers, in {output}",
        err=True,
    )
