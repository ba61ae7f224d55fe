"""`slipstream tune selfspec`: which sublayers a model can draft without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.request import DeviceOption, DtypeOption, TrustOption
from slipstream.cli.tune import Json, Limit, ModelName, PromptFile, Tokens, opened, require_least
from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from slipstream.drafters._tuned import Tuned


def tune_selfspec(
    model: ModelName,
    prompts: PromptFile,
    limit: Limit = 8,
    tokens: Tokens = 64,
    depth: Annotated[int, typer.Option(help="Longest draft considered.")] = 8,
    trials: Annotated[int, typer.Option(help="Sets of sublayers measured.")] = 150,
    seed: Annotated[int, typer.Option(help="Of the random part of the search.")] = 0,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    json_: Json = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Find which sublayers `selfspec` leaves out of a model. Kept in the cache, used from then on.

    The model answers the prompts greedily, then sets of sublayers are measured on these answers.
    """
    require_least(1, limit=limit, depth=depth)
    require_least(depth, tokens=tokens)
    require_least(2, trials=trials)
    with opened(
        model, prompts, limit, dtype=dtype, device=device, trust_remote_code=trust_remote_code
    ) as tuning:
        from slipstream.drafters._skip_search import Measure, Text, search
        from slipstream.drafters._tuned import check_place, save_tuned

        check_place()
        answers, drawn = tuning.answer(tokens), tuning.progress
        texts = [Text(tuple(p), a.tokens) for p, a in zip(tuning.prompts, answers, strict=True)]
        runner = tuning.session.engine.runner
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
        from slipstream.cli.output import print_json

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
