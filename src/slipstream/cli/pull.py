"""`slipstream pull`: fetch a model so that later commands start at once."""

from __future__ import annotations

from typing import Annotated

import typer


def pull(
    names: Annotated[
        list[str], typer.Argument(help="Catalogue names, hub ids, or .gguf files.", show_default=False)
    ],
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Also fetch the model's own Python code.")
    ] = False,
) -> None:
    """Fetch models into the cache and check them. Prints their folders. An interrupted pull resumes."""
    from slipstream.cli.output import progress
    from slipstream.model.progress import size

    for name in names:
        # torch and transformers take seconds to import: say something first
        with progress() as drawn:
            drawn.stage(f"looking for {name}", 0)
            from slipstream.model.checkpoint import inspect
            from slipstream.model.load import resolve

            folder = resolve(name, progress=drawn, trust_remote_code=trust_remote_code)
            checkpoint = inspect(folder)
        typer.echo(
            f"{name} is ready: {size(checkpoint.stored_bytes)} of {checkpoint.dtype} weights", err=True
        )
        typer.echo(str(folder))
