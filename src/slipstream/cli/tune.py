"""What the commands of `slipstream tune` share: their options, prompts, and the model that answers them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from slipstream.cli.output import TerminalProgress
    from slipstream.engine.session import Completion, Session

ModelName = Annotated[
    str,
    typer.Option("--model", help="Catalogue name (see `slipstream models`), folder, .gguf file or hub id."),
]
PromptFile = Annotated[
    Path,
    typer.Option(
        "--prompts",
        help="What people ask the model: a text file with a prompt a line, or .jsonl with objects that"
        ' hold "prompt", "messages", "turns" or "question".',
    ),
]
Limit = Annotated[int, typer.Option("--limit", help="Prompts used, the first ones.")]
Tokens = Annotated[int, typer.Option("--tokens", help="Tokens of each answer that are measured.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@dataclass(frozen=True)
class Tuning:
    """A loaded model, the prompts as it reads them, and where progress is told."""

    session: Session
    prompts: list[list[int]]
    progress: TerminalProgress

    def answer(self, tokens: int) -> list[Completion]:
        """Its greedy answers, of at most so many tokens."""
        from slipstream.core.params import SamplingParams

        self.progress.stage(f"answering {len(self.prompts)} prompts", 0)
        answers: list[Completion] = self.session.generate(self.prompts, SamplingParams(max_tokens=tokens))
        return answers


@contextmanager
def opened(
    model: str, prompts: Path, limit: int, *, dtype: str, device: str, trust_remote_code: bool
) -> Iterator[Tuning]:
    """Read the prompts, then load the model; mistakes in the file are told before anything is loaded."""
    from slipstream.cli.output import progress
    from slipstream.prompts.rows import read_prompts

    rows = read_prompts(prompts, limit)
    with progress() as drawn:
        drawn.stage(f"looking for {model}", 0)
        from slipstream.api import load
        from slipstream.engine.inputs import question_ids

        options: dict[str, Any] = {"dtype": dtype, "device": device, "progress": drawn}
        with load(model, trust_remote_code=trust_remote_code, **options) as session:
            asked = [question_ids(session.tokenizer, row.asked) for row in rows]
            yield Tuning(session, asked, drawn)


def require_least(least: int, **numbers: int) -> None:
    """Refuse options below `least`."""
    for name, value in numbers.items():
        if value < least:
            raise ParameterError(f"--{name} must be at least {least}, not {value}")
