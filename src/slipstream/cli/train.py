"""`slipstream train`: from a target and some prompts to a drafter that the engine loads."""

from __future__ import annotations

import typer

from slipstream.cli import train_data, train_fit
from slipstream.cli.train_shared import Guard


def build(guarded: Guard) -> typer.Typer:
    """The commands under `train`; guarded turns errors into one line and an exit status."""
    app = typer.Typer(
        help="Train a drafter for a model: prompts, data, capture (or vocab), then draft, medusa or eagle.",
        no_args_is_help=True,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    train_data.register(app, guarded)
    train_fit.register(app, guarded)
    return app
