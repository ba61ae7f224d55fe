"""`slipstream tune`: measure what a drafter needs to know about a model, once, and keep it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.errors import ParameterError
from slipstream.plan.prompts import read_prompts

if TYPE_CHECKING:
    from slipstream.drafters._tuned import Tuned

METHODS = ("selfspec",)


def tune(
    method: Annotated[str, typer.Argument(help="What to tune: selfspec.", show_default=False)],
    model: Annotated[
        str, typer.Option(help="Catalogue name (see `slipstream models`), folder, .gguf file or hub id.")
    ],
    prompts: Annotated[
        Path,
        typer.Option(
            help="What people ask the model: a text file with a prompt a line, or .jsonl with objects that"
            ' hold "prompt", "messages", "turns" or "question".'
        ),
    ],
    limit: Annotated[int, typer.Option(help="Prompts used, the first ones.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer that are measured.")] = 64,
    depth: Annotated[int, typer.Option(help="Longest draft considered.")] = 8,
    trials: Annotated[int, typer.Option(help="Sets of sublayers measured.")] = 150,
    seed: Annotated[int, typer.Option(help="Of the random part of the search.")] = 0,
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16 or float32; auto is the checkpoint's own.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the model's own Python code.")
    ] = False,
) -> None:
    """Find which sublayers `selfspec` leaves out of a model. Kept in the cache, used from then on.

    The model answers the prompts greedily, then sets of sublayers are measured on these answers.
    """
    if method not in METHODS:
        raise ParameterError(f"{method!r} cannot be tuned; there is {', '.join(METHODS)}")
    for name, value, least in (
        ("limit", limit, 1),
        ("depth", depth, 1),
        ("tokens", tokens, depth),
        ("trials", trials, 2),
    ):
        if value < least:
            raise ParameterError(f"--{name} must be at least {least}, not {value}")
    questions = [p.prompt for p in read_prompts(prompts)][:limit]

    from slipstream.cli.output import print_json, progress

    with progress() as drawn:
        drawn.stage(f"looking for {model}", 0)
        import slipstream
        from slipstream.drafters._skip_search import Measure, Text, search
        from slipstream.drafters._tuned import save_tuned
        from slipstream.engine.inputs import encode

        options: dict[str, Any] = {"dtype": dtype, "device": device, "progress": drawn}
        with slipstream.load(model, trust_remote_code=trust_remote_code, **options) as session:
            chat = session.tokenizer.chat_template is not None
            asked = [
                encode(
                    session.tokenizer, [{"role": "user", "content": q}] if chat and isinstance(q, str) else q
                )
                for q in questions
            ]
            drawn.stage(f"answering {len(asked)} prompts", 0)
            answers = session.generate(asked, slipstream.SamplingParams(max_tokens=tokens))
            texts = [Text(tuple(p), a.tokens) for p, a in zip(asked, answers, strict=True)]
            runner = session.engine.runner
            measure = Measure(runner, texts, depth)
            if not len(measure):
                raise ParameterError(
                    f"every answer is shorter than {depth} tokens: give other prompts or a smaller --depth"
                )
            drawn.stage(f"measuring {trials} sets on {len(measure)} drafts", 0)
            told: list[Tuned] = []

            def report(count: int, best: Tuned) -> None:
                if not told or told[-1] != best:
                    told.append(best)
                    drawn.note(f"set {count}: predicted {best.speedup:.2f} times as fast, skip={best.skip}")

            found = search(measure, trials, seed, report)
            measure.close()
            path = save_tuned(runner.model, found, model)
    if json_:
        print_json({"model": model, "path": str(path), **found.to_json()})
        return
    typer.echo(
        f"skip={found.skip}: reads {found.cost:.0%} of the weights, {found.acceptance:.0%} of drafted tokens"
        f" accepted, {found.num_speculative_tokens} tokens a draft, min_confidence {found.min_confidence:g};"
        f" predicted {found.speedup:.2f} times as fast as plain decoding"
    )
    if found.speedup <= 1.0:
        typer.echo("no set is predicted to pay on these prompts: use another drafter", err=True)
    typer.echo(f"kept in {path}; use it with --drafter selfspec", err=True)
