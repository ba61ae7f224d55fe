"""`slipstream tune medusa`: how often Medusa's heads are right, which says what tree they should draft."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.request import DeviceOption, DtypeOption, TrustOption
from slipstream.cli.tune import Json, Limit, ModelName, PromptFile, Tokens, opened, require_least
from slipstream.core.places import expanded
from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from slipstream.drafters._head_accuracy import HeadCounts

SIZES = (7, 15, 31, 63)  # with the root, multiples of the rows that a step is padded to
SHOWN = 5  # ranks of each head


def tune_medusa(
    model: ModelName,
    heads: Annotated[Path, typer.Option(help="Folder of the trained heads.")],
    prompts: PromptFile,
    limit: Limit = 32,
    tokens: Tokens = 64,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write. Default: accuracies.json beside the heads, where medusa looks for it.",
            show_default=False,
        ),
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    json_: Json = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Measure how often each choice of each Medusa head is right, for the best draft tree.

    The model answers the prompts greedily; every guess of every head is compared with what it then said.
    Nothing is random: the same prompts give the same numbers.
    """
    require_least(1, limit=limit)
    require_least(2, tokens=tokens)
    with opened(
        model, prompts, limit, dtype=dtype, device=device, trust_remote_code=trust_remote_code
    ) as tuning:
        from slipstream.drafters._head_accuracy import HeadProbe, check_place, save_accuracies
        from slipstream.drafters.medusa import ACCURACIES, MedusaDrafter, MedusaDrafterConfig

        # The smallest tree, which reads no accuracies: those there are may be damaged.
        medusa = MedusaDrafter(MedusaDrafterConfig(str(heads), topk="1"), tuning.session.info)
        file = expanded(out or heads / ACCURACIES)
        check_place(file)
        probe = HeadProbe(medusa)
        tuning.session.use(probe)
        tuning.answer(tokens)
        counts = probe.counts
        if not all(counts.guesses):
            raise ParameterError(
                f"every answer is too short for {len(counts.guesses)} heads: give other prompts or more"
                " --tokens"
            )
        save_accuracies(file, counts, model)
    if json_:
        from slipstream.cli.output import print_json

        found = {"accuracies": counts.accuracies, "right": counts.right, "guesses": counts.guesses}
        print_json({"model": model, "heads": str(heads), "path": str(file), **found, "trees": trees(counts)})
        return
    _print(counts)
    option = "" if out is None else f",accuracies={file}"
    typer.echo(f"kept in {file}; use it with --drafter medusa:heads={heads}{option},nodes=N", err=True)


def trees(counts: HeadCounts) -> list[dict[str, Any]]:
    """The best tree of each size, and the tau that these accuracies promise."""
    from slipstream.core.choices import best_tree

    shapes = [best_tree(counts.accuracies, size) for size in SIZES]
    return [
        {"nodes": len(s), "depth": s.depth, "expected_tau": round(s.expected_tau(counts.accuracies), 4)}
        for s in shapes
    ]


def _print(counts: HeadCounts) -> None:
    from slipstream.cli.output import plain_table, stdout

    console = stdout()
    ranks = range(min(SHOWN, len(counts.right[0])))
    table = plain_table("HEAD", "GUESSES", *(f"RANK {r} RIGHT" for r in ranks))
    for head, (guesses, row) in enumerate(zip(counts.guesses, counts.accuracies, strict=True)):
        table.add_row(str(head), str(guesses), *(f"{row[r]:.1%}" for r in ranks))
    console.print(table)
    table = plain_table("\nBEST TREE OF", "\nDEPTH", "\nEXPECTED TAU")
    for tree in trees(counts):
        table.add_row(f"{tree['nodes']} nodes", str(tree["depth"]), f"{tree['expected_tau']:.2f}")
    console.print(table)
