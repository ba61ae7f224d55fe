"""`slipstream export`: a drafter in the layout that another engine loads."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from slipstream.errors import ParameterError


class To(str, Enum):
    """Where to."""

    vllm = "vllm"
    sglang = "sglang"
    hf = "hf"


class Layout(str, Enum):
    """EAGLE-3's two layouts."""

    published = "published"
    speculators = "speculators"


class Aux(str, Enum):
    """How a list of tapped layers counts."""

    auto = "auto"
    after = "after"
    output = "output"


def export(
    to: Annotated[To, typer.Argument(help="vllm, sglang or hf.", show_default=False)],
    drafter: Annotated[
        str,
        typer.Argument(
            help="A draft model, a folder of trained heads, or what --drafter takes: medusa and eagle are the"
            " heads that come with Slipstream for the target.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="A new folder.", show_default=False)],
    target: Annotated[
        str | None,
        typer.Option(
            help="The target, to check that the drafter fits; hf takes a draft model without.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="How the server names the target; default: its folder.", show_default=False),
    ] = None,
    layout: Annotated[Layout, typer.Option(help="For EAGLE-3 on vLLM.")] = Layout.published,
    aux: Annotated[
        Aux,
        typer.Option(help="How a foreign head counts tapped layers: after k layers, or output of layer k."),
    ] = Aux.auto,
    tokens: Annotated[
        int, typer.Option(min=1, help="Drafted tokens a step, in the command that is shown.")
    ] = 3,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write a drafter as vLLM, SGLang or its authors lay it out, tensor for tensor, and say which versions
    take it.
    """
    from slipstream.cli.output import print_json
    from slipstream.export.hf import export_hf
    from slipstream.export.sglang import export_sglang
    from slipstream.export.vllm import export_vllm
    from slipstream.model.load import resolve

    if target is None and to is not To.hf:
        raise ParameterError(
            "name the target with --target: what does not fit it is found before a server starts"
        )
    base = None if target is None else resolve(target)
    source = _source(drafter, base)
    if to is To.hf or base is None:
        report = export_hf(source, output, base, aux=aux.value)
    elif to is To.vllm:
        report = export_vllm(
            source,
            output,
            base,
            target_name=name,
            layout=layout.value,
            aux=aux.value,
            num_speculative_tokens=tokens,
        )
    else:
        report = export_sglang(
            source, output, base, target_name=name, aux=aux.value, num_speculative_tokens=tokens
        )
    if json_:
        print_json(report.as_dict())
        return
    typer.echo(f"{report.folder}: {report.kind}, layout {report.layout}")
    typer.echo(f"taken by: {report.takes}")
    for change in report.changes:
        typer.echo(f"changed: {change}")
    typer.echo(f"start it: {report.start}")


def _source(drafter: str, base: Path | None) -> Path:
    """The folder of a drafter, named by itself or as `--drafter` takes it."""
    from slipstream.export.target import read_parts
    from slipstream.model.house import house_drafter
    from slipstream.model.load import resolve

    kind, _, options = drafter.partition(":")
    if kind in ("none", "ngram", "suffix", "recycle", "selfspec", "cascade") and not Path(drafter).exists():
        raise ParameterError(
            f"{kind} has no weights of its own to export: n-grams and suffix are in the engines (`slipstream"
            " config vllm --target MODEL --drafter ngram`)"
        )
    where = {"draft_model": "model", "medusa": "heads", "eagle": "heads"}.get(kind)
    if where is None or Path(drafter).exists():
        return resolve(drafter)
    named = [part.removeprefix(f"{where}=") for part in options.split(",") if part.startswith(f"{where}=")]
    if named:
        return resolve(named[0])
    if base is None:
        raise ParameterError(f"which {kind} it is depends on the target: name it with --target")
    return house_drafter(kind.removesuffix("_model"), read_parts(base).fingerprint)
