"""What `slipstream run` was asked for, and the mistakes that show without a model."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from slipstream.errors import ParameterError

MOST_THREADS = 1024  # more would not start, or only wait for each other
DEFAULT_MODEL = "qwen2.5-coder-1.5b"
COLOURS = ("drafts", "always", "never")
DtypeOption = Annotated[
    str, typer.Option(help="bfloat16, float16 or float32; auto: the checkpoint's, where that is fast here.")
]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
ThreadsOption = Annotated[int | None, typer.Option(help="Threads of torch. Default: torch's choice.")]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own Python code.")]
WeightsOption = Annotated[
    str,
    typer.Option(
        metavar="plain|int8",
        help="int8 halves the target's weights and what a step reads; the output is then the int8 model's"
        " own, nearly the same. plain is as --dtype says.",
    ),
]
EmbeddingOption = Annotated[
    str, typer.Option(metavar="plain|int8", help="int8 for the table of input embeddings, too.")
]


@dataclass(frozen=True)
class Request:
    """What was asked for, checked as far as that goes without a model."""

    model: str
    drafter: str
    controller: str | None
    prompt: str | None  # None: a chat
    piped: bool  # the prompt came from standard input
    system: str | None
    template: bool
    sampling: dict[str, Any]  # the options that were given; the others are the checkpoint's
    json: bool
    compare: bool
    colour: bool
    load: dict[str, Any]
    threads: int | None


def one_prompt(words: list[str] | None) -> str | None:
    """The prompt that was typed. ParameterError for several, which is one without its quotes."""
    if words is not None and len(words) > 1:
        quoted = shlex.quote(" ".join(words))
        raise ParameterError(
            f"the prompt is {len(words)} arguments, put it in quotes: slipstream run {quoted}"
        )
    return words[0] if words else None


def checked(sampling: dict[str, Any]) -> dict[str, Any]:
    from slipstream.core.params import SamplingParams

    SamplingParams(**sampling)
    return sampling


def use_colour(wanted: str | None) -> bool:
    if wanted is not None and wanted not in COLOURS:
        raise ParameterError(f"--colour must be {', '.join(COLOURS[:-1])} or {COLOURS[-1]}, not {wanted!r}")
    if wanted in ("always", "never"):
        return wanted == "always"
    able = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return able and (wanted == "drafts" or not os.environ.get("NO_COLOR"))


def require_chat(*, json_: bool, compare: bool, plain: bool, n: int) -> None:
    """ParameterError for what makes no sense without a prompt."""
    if not sys.stdout.isatty():
        raise ParameterError("no prompt: give one as an argument or on standard input")
    clash = {"--json": json_, "--compare": compare, "--no-chat-template": plain, "--n": n > 1}
    for option, given in clash.items():
        if given:
            raise ParameterError(f"{option} needs a prompt, a chat cannot have it: give a PROMPT")


def read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise ParameterError("standard input is not UTF-8 text: convert it first") from None
