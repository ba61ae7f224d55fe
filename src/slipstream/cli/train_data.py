"""`slipstream train prompts|data|vocab|capture`: what a drafter learns from."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.request import DeviceOption, DtypeOption, ThreadsOption, TrustOption
from slipstream.cli.train_capture import capture
from slipstream.cli.train_shared import (
    Guard,
    JsonOption,
    ModelArgument,
    StatusLine,
    leave,
    loaded_target,
    parse_time,
    require_file,
    span,
)
from slipstream.cli.train_vocab import vocab
from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from slipstream.model.load import LoadedModel


def register(app: typer.Typer, guarded: Guard) -> None:
    """Puts `prompts`, `data`, `vocab` and `capture` into the `train` application."""
    for name, command in (("prompts", prompts), ("data", data), ("vocab", vocab), ("capture", capture)):
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
    from slipstream.model import disk
    from slipstream.train.prompts import make_prompts, variety

    require_file(output, "prompts.jsonl")
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
            help="A .jsonl file (messages, conversations, turns, prompt or question), a text file with a"
            " prompt a line, a folder of these, or hf:NAME of a Hugging Face data set; may be repeated.",
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
    limit_prompts: Annotated[int | None, typer.Option(help="Use only so many prompts, the first.")] = None,
    limit_tokens: Annotated[
        int | None, typer.Option(help="Stop at so many answer tokens in the folder.")
    ] = None,
    limit_time: Annotated[
        str | None, typer.Option(metavar="TIME", help="Stop this run after 90s, 30m or 2h.")
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            metavar="plain|int8",
            help="int8 lets the int8 model answer, nearly the same one and faster; the folder is the plain"
            " model's all the same.",
        ),
    ] = "plain",
    split: Annotated[str, typer.Option(help="Split of a Hugging Face data set.")] = "train",
    config: Annotated[str | None, typer.Option(help="Configuration of a Hugging Face data set.")] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
    json_: JsonOption = False,
    trust_remote_code: TrustOption = False,
) -> None:
    """Let a model answer prompts: the text its drafter will learn from.

    Finished answers are kept one by one. A run that was stopped goes on where it was with the same
    command, and the answers are the same as if it had not been stopped.
    """
    from slipstream.core.params import SamplingParams
    from slipstream.core.precision import check_precision
    from slipstream.prompts.rows import HUB, read_rows

    check_precision(weights, "plain")
    sampling: dict[str, Any] = {
        name: value
        for name, value in (("temperature", temperature), ("top_p", top_p), ("top_k", top_k))
        if value is not None
    }
    SamplingParams(max_tokens=max_tokens, **sampling)  # mistakes are told before torch is imported
    if not 0 <= held_out < 1:
        raise ParameterError(f"--held-out must be a share from 0 to below 1, not {held_out}")
    if batch is not None and batch < 1:
        raise ParameterError(f"--batch must be at least 1, not {batch}")
    if keep_answers:
        given = {**sampling, "batch": batch, "drafter": drafter != "none", "weights": weights != "plain"}
        for name in (name for name, value in given.items() if value is not None and value is not False):
            raise ParameterError(f"--keep-answers generates nothing: leave out --{name.replace('_', '-')}")
    if (config is not None or split != "train") and not any(s.startswith(HUB) for s in sources):
        raise ParameterError(
            f"--split and --config are for Hugging Face data sets ({HUB}NAME): leave them out"
        )
    seconds = None if limit_time is None else parse_time(limit_time)
    rows = [r.with_system(system) for r in read_rows(sources, split=split, config=config)]
    if no_chat_template:
        for row in (r for r in rows if len(r.questions) > 1):
            raise ParameterError(
                f"{row.where}: without a chat template only single prompts can be continued: no system"
                " message, no further turns"
            )
    from slipstream.train.data import AnswerSettings, Limits

    limits = Limits(limit_prompts, limit_tokens, seconds)

    def settings_of(params: SamplingParams) -> AnswerSettings:
        params = params.with_(max_tokens=max_tokens, **sampling)
        return AnswerSettings(params, seed, max_length, not no_chat_template, keep_answers)

    settings_of(SamplingParams())  # mistakes are told before a model is loaded
    with loaded_target(model, dtype, device, threads, trust_remote_code, drafter) as loaded:
        from slipstream.model import disk
        from slipstream.model.identity import identity
        from slipstream.train.dataset import DataWriter

        settings = settings_of(_default_params(loaded))
        if settings.template:
            from slipstream.train.template import check_mask, check_template

            check_template(loaded.tokenizer)
            if keep_answers:
                check_mask(loaded.tokenizer, loaded.generation_config.eos_ids)
        target = identity(loaded.model, loaded.tokenizer, loaded.name)
        arguments = {**settings.to_json(), "system": system}
        if weights != "plain":
            from slipstream.model.load import load

            arguments["weights"] = weights
            options: dict[str, Any] = {"device": device, "trust_remote_code": trust_remote_code}
            loaded = load(model, dtype=dtype, weights=weights, **options)
        with disk.alone(output):
            writer = DataWriter(output, target, arguments, held_out)
            told, status = _answer(loaded, rows, settings, limits, writer, drafter, batch)
            manifest = writer.save(complete=told["ended"] == "done", sources=sources, **told)
    if json_:
        from slipstream.cli.output import print_json

        print_json(manifest)
    last = told["run"]
    typer.echo(
        f"{manifest['conversations']} conversations, {manifest['answer_tokens']} answer tokens in {output};"
        f" this run: {last['answer_tokens']} tokens in {span(last['seconds'])},"
        f" {last['tokens_per_second']:.1f} tokens/s ({told['ended']})",
        err=True,
    )
    if told["duplicates"] or told["too_long"]:
        typer.echo(f"left out: {told['duplicates']} duplicates, {told['too_long']} too long", err=True)
    leave(status)


def _answer(
    loaded: LoadedModel, rows: Any, settings: Any, limits: Any, writer: Any, drafter: str, batch: int | None
) -> tuple[dict[str, Any], int]:
    """What this run adds to the manifest, and the exit status."""
    import slipstream
    from slipstream.cli.generation import Interrupts
    from slipstream.train.data import Answerer, Tally, describe, keep_answers, rows_that_fit

    line = StatusLine()
    turns = max(sum(m["role"] == "user" for m in row.messages) for row in rows)
    longest = min(settings.max_length, turns * settings.params.max_tokens)
    most = "" if limits.tokens is None else f" of {limits.tokens}"

    def report(tally: Tally) -> None:
        left = tally.left(limits, len(writer.done), writer.answer_tokens, longest)
        done = tally.resumed + tally.answers + tally.too_long
        line(
            f"{done} of {tally.total} conversations, {writer.answer_tokens}{most} answer tokens and"
            f" {tally.running} unfinished, {tally.rate:.1f} tokens/s"
            + (f", {span(left)} left" if left is not None else "")
        )

    with Interrupts() as interrupts, line:

        def stopped() -> bool:
            return interrupts.number is not None

        if settings.keep_answers:
            eos_ids = loaded.generation_config.eos_ids
            args = (loaded.tokenizer, rows, eos_ids, settings, writer, limits, report, stopped)
            return dict(describe(keep_answers(*args), "none", 1, None)), interrupts.status
        weight = next(loaded.model.parameters())
        config = loaded.model.config.get_text_config()
        wanted = None if batch is None else min(batch, len(rows))
        count = rows_that_fit(config, weight.dtype, weight.device, settings.max_length, wanted)
        options = {"weights": loaded.weights, "device": weight.device, "max_rows": count}
        with slipstream.load(loaded, drafter, **options) as session:
            line.note(f"answering with {drafter}, {count} at once")
            tally = Answerer(session, settings, writer, limits).run(
                rows, batch=count, report=report, stopped=stopped
            )
            counts = session.engine.counts
            tau = counts.tau if counts.passes else None
            return dict(describe(tally, drafter, count, tau)), interrupts.status


def _default_params(loaded: LoadedModel) -> Any:
    from slipstream.api import default_params

    return default_params(loaded)
