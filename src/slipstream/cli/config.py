"""`slipstream config`: the exact configuration of an engine for a plan."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.plan import write
from slipstream.core import jsontext
from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from slipstream.export.deploy_plan import DeployPlan


class Form(str, Enum):
    """What is printed."""

    command = "command"
    json = "json"
    yaml = "yaml"
    manifest = "manifest"


PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        help="What `slipstream plan --json` printed, or a plan's fields as JSON; options win over it.",
        show_default=False,
    ),
]
Target = Annotated[str | None, typer.Option(help="The target model: folder or hub name.", show_default=False)]
DrafterOption = Annotated[
    str | None,
    typer.Option(help="draft_model, eagle, eagle3, medusa, ngram, suffix, mtp or none.", show_default=False),
]
Model = Annotated[str | None, typer.Option(help="The draft model or head.", show_default=False)]
Tokens = Annotated[int | None, typer.Option(help="Drafted tokens a step. Default: 3.", show_default=False)]
PerBatch = Annotated[
    str | None,
    typer.Option(help="Lengths by running requests: 1-8:4,9-32:2,33-256:0.", show_default=False),
]
OffAbove = Annotated[
    int | None, typer.Option(help="No drafting above so many running requests.", show_default=False)
]
Parallel = Annotated[int | None, typer.Option("--tp", help="Tensor parallel size.", show_default=False)]
DraftParallel = Annotated[
    int | None, typer.Option("--draft-tp", help="The draft's tensor parallel size.", show_default=False)
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Any other field of the plan, as name=value; may be repeated (slipstream config --help names"
        " them).",
        show_default=False,
    ),
]


def config(
    engine: Annotated[
        str,
        typer.Argument(
            help="vllm, sglang or llama.cpp; a version as vllm==0.32.0, else the newest that was read.",
            show_default=False,
        ),
    ],
    plan: PlanFile = None,
    target: Target = None,
    drafter: DrafterOption = None,
    model: Model = None,
    tokens: Tokens = None,
    per_batch: PerBatch = None,
    off_above: OffAbove = None,
    tp: Parallel = None,
    draft_tp: DraftParallel = None,
    set_: Settings = None,
    form: Annotated[
        Form,
        typer.Option(help="json: the speculative config; yaml: the engine's file; manifest: Kubernetes."),
    ] = Form.command,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write to this file.", show_default=False)
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Print an engine's configuration for a plan: what that version lacks is refused, with the reason.

    Fields for --set: dtype, quantization, max_model_len, max_running; of the draft draft_quantization,
    draft_max_model_len, heterogeneous_vocab, probabilistic, prompt_lookup_min, prompt_lookup_max; host, port;
    in a cluster name, replicas, image, volume_claim; predicted_tau, predicted_acceptance, which deploy
    checks; notes; extra, further options of the engine as JSON.
    """
    from slipstream.cli.output import print_json

    wanted = plan_of(engine, plan, target, drafter, model, tokens, per_batch, off_above, tp, draft_tp, set_)
    from slipstream.export.config import settings
    from slipstream.export.manifest import manifest, options_yaml

    made = settings(wanted)
    if json_:
        print_json(
            {
                "engine": made.plan.engine,
                "command": made.command,
                "speculative_config": made.speculative,
                "options": made.options,
                "files": dict(made.files),
                "manifest": manifest(made),
                "notes": list(made.notes),
            }
        )
        return
    if form is Form.json and made.plan.parsed_engine.name != "vllm":
        raise ParameterError(f"{made.plan.engine} has no speculative config; print its command or manifest")
    if form is Form.json and made.speculative is None:
        raise ParameterError("nothing is drafted, so there is no speculative config: name a --drafter")
    forms: dict[Form, Callable[[], str]] = {
        Form.command: made.shell,
        Form.json: made.speculative_json,
        Form.yaml: lambda: options_yaml(made),
        Form.manifest: lambda: manifest(made),
    }
    text = forms[form]()
    if output is not None:
        write(output, text)
    else:
        typer.echo(text.rstrip("\n"))
    for name, content in made.files.items():
        if output is not None:
            write(output.parent / name, content + "\n")
        else:
            typer.echo(f"{name}:\n{content}", err=True)
    if plan is None and drafter is None:
        typer.echo("note: nothing is drafted: name a --drafter", err=True)
    for note in made.notes:
        typer.echo(f"note: {note}", err=True)
    if output is not None:
        written = [output, *(output.parent / name for name in made.files)]
        typer.echo(f"written: {', '.join(map(str, written))}", err=True)


def plan_of(
    engine: str | None,
    file: Path | None,
    target: str | None,
    drafter: str | None,
    model: str | None,
    tokens: int | None,
    per_batch: str | None,
    off_above: int | None,
    tp: int | None,
    draft_tp: int | None,
    settings: list[str] | None,
    *,
    here: bool = False,
) -> DeployPlan:
    """The plan of a file and options; the options win. here: the engine runs on this machine."""
    try:
        from slipstream.export.deploy_plan import make_plan, read_plan
    except ImportError as error:
        raise ParameterError(f"this needs {error.name}: pip install 'slipstream-lm[scale]'") from None
    from slipstream.export.engines import parse_engine

    given: dict[str, Any] = {
        "engine": engine,
        "target": None if target is None else _known_to_engines(target, here),
        "drafter": drafter,
        "model": None if model is None else _known_to_engines(model, here),
        "num_speculative_tokens": tokens,
        "per_batch_size": None if per_batch is None else _rows(per_batch),
        "off_above": off_above,
        "tensor_parallel": tp,
        "draft_tensor_parallel": draft_tp,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    for item in settings or []:
        name, joined, value = item.partition("=")
        if not joined:
            raise ParameterError(f"--set {item}: write it as name=value")
        try:
            changes[name] = jsontext.parse(value) if value[:1] in ("[", "{") else value
        except ValueError:
            raise ParameterError(f"--set {item}: lists and objects are written as JSON") from None
    if file is None and tokens is None and "per_batch_size" in changes:
        changes["num_speculative_tokens"] = max(1, *(length for _, _, length in changes["per_batch_size"]))
    if file is None and "target" not in changes:
        raise ParameterError("give --target MODEL, or --plan FILE")
    if file is None:
        return make_plan(**changes)
    if engine is not None and "==" not in engine:  # the version is the file's
        said = read_plan(file, **{name: value for name, value in changes.items() if name != "engine"})
        if said.parsed_engine.name == parse_engine(engine).name:
            return said
    return read_plan(file, **changes)


def _known_to_engines(name: str, here: bool) -> str:
    """A model as an engine finds it: Slipstream's short names are not known elsewhere."""
    from slipstream.export.from_plan import engine_name

    found = engine_name(name, here)
    if found == name:
        return name
    typer.echo(f"note: {name} is a name of Slipstream's, for engines it is {found}", err=True)
    return found


def _rows(text: str) -> list[tuple[int, int, int]]:
    """1-8:4,9-32:2 -> rows of first, last, length."""
    rows = []
    for part in text.split(","):
        sizes, _, length = part.partition(":")
        first, dash, last = sizes.partition("-")
        try:
            rows.append((int(first), int(last if dash else first), int(length)))
        except ValueError:
            raise ParameterError(
                f"--per-batch {part!r}: write FIRST-LAST:LENGTH, as in 1-8:4,9-32:2"
            ) from None
    return rows
