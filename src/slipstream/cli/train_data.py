"""`slipstream train prompts|data|capture`: what a drafter learns from."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from slipstream.model.load import LoadedModel
    from slipstream.train.capture import Captured

METHODS = ("draft", "medusa", "eagle", "eagle3")
QUIET_SECONDS = 30.0  # between two lines of progress where there is no terminal

Guard = Callable[[Callable[..., None]], Callable[..., None]]

ModelArgument = Annotated[
    str, typer.Argument(help="The target: catalogue name, folder, .gguf file or hub id.", show_default=False)
]
DtypeOption = Annotated[str, typer.Option(help="bfloat16, float16 or float32; auto is the checkpoint's own.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
ThreadsOption = Annotated[int | None, typer.Option(help="Threads of torch. Default: torch's choice.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")]
TrustOption = Annotated[bool, typer.Option("--trust-remote-code", help="Run the model's own Python code.")]


def register(app: typer.Typer, guarded: Guard) -> None:
    """Puts the commands of this file into the `train` application."""
    for name, command in (("prompts", prompts), ("data", data), ("capture", capture)):
        app.command(name)(guarded(command))


def prompts(
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The .jsonl file to write.", show_default=False)
    ],
    count: Annotated[int, typer.Option("-n", "--count", help="How many.")] = 2400,
    seed: Annotated[int, typer.Option(help="Another seed gives other prompts.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Print what was made as JSON.")] = False,
) -> None:
    """Write varied training prompts: code, editing, explanation, questions, translation, summaries, maths,
    retrieval.

    They are put together from word lists and from the sources of this Python's standard library; the same
    seed and Python version give the same file. No benchmark's text is in them.
    """
    from slipstream.cli.output import plain_table, print_json, stdout
    from slipstream.train import disk
    from slipstream.train.prompts import make_prompts, variety

    made = make_prompts(count, seed)
    lines = "".join(json.dumps(p.to_json(), ensure_ascii=False) + "\n" for p in made)
    with disk.writing(output.parent):
        output.parent.mkdir(parents=True, exist_ok=True)
    disk.write_whole(output, lines.encode())
    told = variety(made)
    if json_:
        print_json({"path": str(output), "seed": seed, "python": sys.version.split()[0], **told})
        return
    table = plain_table("CATEGORY", "PROMPTS", "FIRST WORDS", "WORDS (10 %, MIDDLE, 90 %)")
    for name, facts in told["categories"].items():
        spread = ", ".join(str(n) for n in facts["words"])
        table.add_row(name, str(facts["prompts"]), str(facts["first_words"]), spread)
    stdout().print(table)
    typer.echo(f"{len(made)} prompts in {output}", err=True)


def data(
    model: ModelArgument,
    sources: Annotated[
        list[str],
        typer.Option(
            "--prompts",
            help="A .jsonl file (messages, conversations or prompt), a text file with a prompt a line, a folder of"
            " these, or hf:NAME of a Hugging Face data set; may be repeated.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The folder to write or to go on with.", show_default=False)
    ],
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    max_length: Annotated[int, typer.Option(help="Most tokens of question and answer.")] = 2048,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 is greedy. Default, here and below: the model's generation_config."),
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this mass.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep so many of the likeliest tokens; 0 is all.")] = None,
    seed: Annotated[int, typer.Option(help="For sampling; each prompt gets its own noise from it.")] = 0,
    system: Annotated[str | None, typer.Option(help="System message of the rows that have none.")] = None,
    keep_answers: Annotated[
        bool, typer.Option("--keep-answers", help="Learn from the answers in the rows; generate nothing.")
    ] = False,
    no_chat_template: Annotated[
        bool, typer.Option("--no-chat-template", help="Continue the prompts as plain text.")
    ] = False,
    drafter: Annotated[
        str, typer.Option(metavar="NAME[:KEY=VALUE,...]", help="How to draft; none is plain decoding.")
    ] = "none",
    batch: Annotated[
        int | None, typer.Option(help="Answers that grow at once. Default: by memory, at most 16 on a CPU.")
    ] = None,
    held_out: Annotated[float, typer.Option(help="Share of conversations kept out of training.")] = 0.05,
    limit_prompts: Annotated[int | None, typer.Option(help="Most conversations in the folder.")] = None,
    limit_tokens: Annotated[
        int | None, typer.Option(help="Stop at so many answer tokens in the folder.")
    ] = None,
    limit_time: Annotated[
        str | None, typer.Option(metavar="TIME", help="Stop this run after 90s, 30m or 2h.")
    ] = None,
    split: Annotated[str, typer.Option(help="Split of a Hugging Face data set.")] = "train",
    config: Annotated[str | None, typer.Option(help="Configuration of a Hugging Face data set.")] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    json_: JsonOption = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Let a model answer prompts: the text its drafter will learn from.

    Finished answers are kept one by one. A run that was stopped goes on where it was with the same command, and
    the answers are the same as if it had not been stopped.
    """
    from slipstream.core.params import SamplingParams
    from slipstream.train.rows import read_rows

    sampling = {
        name: value
        for name, value in (("temperature", temperature), ("top_p", top_p), ("top_k", top_k))
        if value is not None
    }
    SamplingParams(max_tokens=max_tokens, **sampling)  # mistakes are told before torch is imported
    if not 0 <= held_out < 1:
        raise ParameterError(f"--held-out must be a share from 0 to below 1, not {held_out}")
    if batch is not None and batch < 1:
        raise ParameterError(f"--batch must be at least 1, not {batch}")
    seconds = None if limit_time is None else parse_time(limit_time)
    rows = [r.with_system(system) for r in read_rows(sources, split=split, config=config)]
    with loaded_target(model, dtype, device, threads, trust_remote_code, drafter) as loaded:
        from slipstream.train.data import AnswerSettings, Limits
        from slipstream.train.dataset import DataWriter
        from slipstream.train.identity import identity

        limits = Limits(limit_prompts, limit_tokens, seconds)
        params = _default_params(loaded).with_(max_tokens=max_tokens, **sampling)
        settings = AnswerSettings(params, seed, max_length, not no_chat_template, keep_answers)
        if settings.template:
            from slipstream.train.template import check_template

            check_template(loaded.tokenizer, loaded.generation_config.eos_ids)
        target = identity(loaded.model, loaded.tokenizer, loaded.name)
        arguments = {**settings.to_json(), "system": system}
        writer = DataWriter(output, target, arguments, held_out)
        told = _answer(loaded, rows, settings, limits, writer, drafter, batch)
        manifest = writer.save(complete=told["ended"] == "done", sources=sources, **told)
    if json_:
        from slipstream.cli.output import print_json

        print_json(manifest)
    last = manifest["last_run"]
    typer.echo(
        f"{manifest['conversations']} conversations, {manifest['answer_tokens']} answer tokens in {output};"
        f" this run: {last['answer_tokens']} tokens in {span(last['seconds'])},"
        f" {last['tokens_per_second']:.1f} tokens/s ({told['ended']})",
        err=True,
    )
    if told["duplicates"] or told["too_long"]:
        typer.echo(f"left out: {told['duplicates']} duplicates, {told['too_long']} too long", err=True)
    _leave(told["ended"] == "interrupted")


def _answer(
    loaded: LoadedModel, rows: Any, settings: Any, limits: Any, writer: Any, drafter: str, batch: int | None
) -> dict[str, Any]:
    import slipstream
    from slipstream.cli.generation import Interrupts
    from slipstream.train.data import Answerer, Tally, describe, keep_answers, rows_that_fit

    line = StatusLine()

    def report(tally: Tally) -> None:
        left = tally.left(limits, writer.answer_tokens)
        done = tally.resumed + tally.answers + tally.too_long
        line(
            f"{done} of {tally.total} conversations, {writer.answer_tokens} answer tokens,"
            f" {tally.rate:.1f} tokens/s" + (f", {span(left)} left" if left is not None else "")
        )

    with Interrupts() as interrupts, line:

        def stopped() -> bool:
            return interrupts.number is not None

        if settings.keep_answers:
            eos_ids = loaded.generation_config.eos_ids
            args = (loaded.tokenizer, rows, eos_ids, settings, writer, limits, report, stopped)
            return dict(describe(keep_answers(*args), "none", 1, None))
        weight = next(loaded.model.parameters())
        config = loaded.model.config.get_text_config()
        fit = rows_that_fit(config, weight.dtype, weight.device, settings.max_length)
        count = fit if batch is None else batch
        with slipstream.load(loaded, drafter, device=weight.device, max_rows=count) as session:
            line.note(f"answering with {drafter}, {count} at once")
            tally = Answerer(session, settings, writer, limits).run(
                rows, batch=count, report=report, stopped=stopped
            )
            counts = session.engine.counts
            return dict(describe(tally, drafter, count, counts.tau if counts.passes else None))


def capture(
    model: ModelArgument,
    folder: Annotated[
        Path, typer.Option("--data", help="The folder that train data made.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The folder to write or to go on with.", show_default=False)
    ],
    method: Annotated[
        str | None,
        typer.Option(
            "--for", help=f"What it is for, which sets the three options below: {', '.join(METHODS)}."
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(metavar="K,K,...", help="Residual streams after so many layers; 0: embeddings."),
    ] = None,
    last: Annotated[bool, typer.Option("--last", help="The state that enters the LM head.")] = False,
    top_k: Annotated[int | None, typer.Option(help="The best logits of each token; 0: none.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Cut samples to so many tokens.")] = None,
    limit_tokens: Annotated[int | None, typer.Option(help="Use about so many tokens of the data.")] = None,
    store: Annotated[
        str, typer.Option(help="dtype on disk; auto is the target's, which keeps every bit.")
    ] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it would need.")] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    json_: JsonOption = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Store what a model computes on training text: hidden states and its best logits.

    Says how much disk it needs before it begins. A run that was stopped goes on with the same command.
    Training with --online needs no stored states.
    """
    if method is not None and method not in METHODS:
        raise ParameterError(f"--for must be {', '.join(METHODS[:-1])} or {METHODS[-1]}, not {method!r}")
    chosen = None if layers is None else parse_layers(layers)
    if method is None and chosen is None and not last and not top_k:
        raise ParameterError(f"say what to store: --for {'|'.join(METHODS)}, or --layers, --last, --top-k")
    for name, value in (("max-length", max_length), ("limit-tokens", limit_tokens)):
        if value is not None and value < 2:
            raise ParameterError(f"--{name} must be at least 2, not {value}")
    from slipstream.train.dataset import load_data

    found = load_data(folder, max_length=max_length, limit_tokens=limit_tokens)
    with loaded_target(model, dtype, device, threads, trust_remote_code) as loaded:
        from slipstream.model.progress import size
        from slipstream.model.runner import Runner
        from slipstream.train import disk
        from slipstream.train.capture import Captor
        from slipstream.train.identity import identity
        from slipstream.train.shards import capture as run
        from slipstream.train.shards import plan_capture

        target = identity(loaded.model, loaded.tokenizer, loaded.name)
        wanted = needed(method, int(target["num_layers"]), chosen, last, top_k)
        plan = plan_capture(output, target, found, wanted, dtype=store)
        typer.echo(
            f"{sum(s.tokens for s in plan.shards)} tokens in {len(plan.shards)} shards of {size(plan.total_bytes)};"
            f" {size(plan.needed_bytes)} are still to be written, {size(disk.free_bytes(output))} are free",
            err=True,
        )
        complete = dry_run or _capture(loaded, Runner, Captor, plan, wanted, run)
    if json_:
        from slipstream.cli.output import print_json

        print_json({**plan.manifest, "needed_bytes": plan.needed_bytes, "total_bytes": plan.total_bytes})
    _leave(not complete)


def _capture(
    loaded: LoadedModel, runner_type: Any, captor_type: Any, plan: Any, wanted: Captured, run: Any
) -> bool:
    from slipstream.cli.generation import Interrupts

    line = StatusLine()

    def report(progress: Any) -> None:
        rate = progress.tokens / progress.seconds if progress.seconds else 0.0
        left = (progress.total_tokens - progress.done_tokens) / rate if rate else 0.0
        line(
            f"{progress.done_tokens} of {progress.total_tokens} tokens, {rate:.0f} tokens/s, {span(left)} left"
        )

    runner = runner_type(loaded.model, pack=True)
    try:
        captor = captor_type(runner, min(runner.vocab_size, len(loaded.tokenizer)), wanted)
        with Interrupts() as interrupts, line:
            return bool(run(plan, captor, report=report, stopped=lambda: interrupts.number is not None))
    finally:
        runner.close()


def needed(
    method: str | None, num_layers: int, layers: tuple[int, ...] | None, last: bool, top_k: int | None
) -> Captured:
    """What a method learns from, where the options do not say otherwise.

    EAGLE-3 taps the streams that enter layers 2, L // 2 and L - 3 (Li et al., arXiv 2503.01840).
    """
    from slipstream.train.capture import Captured

    usual = {
        "draft": Captured(top_k=64),
        "medusa": Captured(last_hidden=True),
        "eagle": Captured(last_hidden=True, top_k=64),
        "eagle3": Captured(tuple(sorted({2, num_layers // 2, num_layers - 3})), top_k=64),
        None: Captured(),
    }[method]
    chosen = usual.hidden_layers if layers is None else layers
    return Captured(chosen, last or usual.last_hidden, usual.top_k if top_k is None else top_k)


@contextmanager
def loaded_target(
    model: str,
    dtype: str,
    device: str,
    threads: int | None,
    trust_remote_code: bool,
    drafter: str | None = None,
) -> Iterator[LoadedModel]:
    """The target, loaded; memory is checked before."""
    from slipstream.cli.output import progress

    if threads is not None and threads < 1:
        raise ParameterError(f"threads must be at least 1, not {threads}")
    with progress(transient=True) as drawn:
        drawn.stage(f"looking for {model}", 0)
        import torch

        from slipstream.core.spec import make_config, parse_spec
        from slipstream.drafters import find_drafter
        from slipstream.model.load import load

        if threads is not None:
            torch.set_num_threads(threads)
        if drafter is not None:  # a mistyped drafter is told before gigabytes are loaded for it
            name, values = parse_spec(drafter)
            make_config(find_drafter(name).Config, name, values)  # type: ignore[attr-defined]
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "progress": drawn}
        loaded = load(model, dtype=dtype, device=device, **options)
    yield loaded


def _default_params(loaded: LoadedModel) -> Any:
    from slipstream.api import default_params

    return default_params(loaded.generation_config)


def _leave(interrupted: bool) -> None:
    if interrupted:
        typer.echo("slipstream: stopped; the same command goes on from here", err=True)
        raise typer.Exit(130)


class StatusLine:
    """One line on stderr that is written over on a terminal, and a line now and then elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = time.monotonic()
        self._open = False

    def __enter__(self) -> StatusLine:
        return self

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now - self._last < (0.2 if self._terminal else QUIET_SECONDS):
            return
        self._last = now
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{text}")
            self._open = True
        else:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def note(self, text: str) -> None:
        self._end()
        sys.stderr.write(text + "\n")

    def _end(self) -> None:
        if self._open:
            sys.stderr.write("\n")
            self._open = False

    def __exit__(self, *_: object) -> None:
        self._end()


def parse_time(text: str) -> float:
    """Seconds of "90", "90s", "30m" or "2h"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if match is None or not float(match[1]):
        raise ParameterError(f"--limit-time must be like 90s, 30m or 2h, not {text!r}")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def parse_layers(text: str) -> tuple[int, ...]:
    """Layer numbers of "2,14,25"."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ParameterError(f"--layers must be numbers with commas, like 2,14,25, not {text!r}") from None


def span(seconds: float) -> str:
    """Seconds as people read them: 45 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
