"""`slipstream lint`: is this configuration of vLLM, SGLang or llama.cpp right, and how would it be?"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from slipstream.core.places import expanded
from slipstream.errors import ParameterError


def lint(
    config: Annotated[
        str,
        typer.Argument(
            help="A file, the text itself (in quotes), or - for standard input.", show_default=False
        ),
    ],
    engine: Annotated[
        str | None,
        typer.Option(
            help="vllm==0.32.0, sglang, llama.cpp; default: what the text names.", show_default=False
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="The target model, where the text does not say.", show_default=False)
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="A draft model that --fix may fill in.", show_default=False)
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Write the repaired file; a text is printed repaired.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as faults.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Name every fault of a speculative-decoding configuration, with the fix. Exit status 1 with faults, 0
    without, 2 for what cannot be read.
    """
    from slipstream.cli.output import print_json
    from slipstream.export.engines import beyond
    from slipstream.export.lint import lint as check
    from slipstream.model.store import write_atomic

    file, text = _text(config)
    try:
        report = check(text, engine, target=target, draft=draft, repair=fix)
    except ParameterError as error:
        raise ParameterError(f"{file}: {error}" if file else str(error)) from error
    if file is not None and report.fixed not in (None, text):
        try:
            mode, real = file.stat().st_mode, file.resolve()  # a link stays one
            write_atomic(real, str(report.fixed))
            real.chmod(mode)
        except OSError as error:
            raise ParameterError(
                f"{file} cannot be written ({error.strerror}): print it with --fix -"
            ) from error
    shown = report.left if fix else report.faults
    if json_:
        found = report.as_dict()
        if fix:
            found |= {"fixed": report.fixed, "left": [fault.as_dict() for fault in report.left]}
        print_json(found)
    else:
        where = str(file) if file is not None else report.kind
        for fault in report.faults:
            mark = "warning" if fault.severity == "warning" else "error"
            state = (
                "" if not fix else " (fixed)" if fault.rule not in {f.rule for f in shown} else " (not fixed)"
            )
            typer.echo(
                f"{where}: {fault.where}: {mark} [{fault.rule}]{state}: {fault.message}",
                err=fix and file is None,
            )
            typer.echo(f"  fix: {fault.fix}", err=fix and file is None)
        newer = beyond(report.engine)
        if newer is not None:
            typer.echo(f"note: {newer}", err=True)
        if not report.faults:
            typer.echo(f"{where}: no faults for {report.engine}", err=fix and file is None)
        if fix and file is None and report.fixed is not None:
            typer.echo(report.fixed.rstrip("\n"))
    if any(fault.severity == "error" or strict for fault in shown):
        raise typer.Exit(1)


def _text(config: str) -> tuple[Path | None, str]:
    """The file, if it is one, and the text."""
    if config == "-":
        try:
            return None, sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ParameterError(f"standard input cannot be read as text ({error})") from None
    looks = "\n" not in config and len(config) < 4096
    path = expanded(config) if looks else Path(config)
    try:
        there = looks and path.is_file()
    except OSError:
        there = False
    if not there:
        if looks and re.fullmatch(r"[\w./~-]+", config):  # no configuration is one word
            what = f"{config} is a folder" if os.path.isdir(path) else f"there is no file {config}"
            raise ParameterError(f"{what}: give a configuration's file, or its text in quotes")
        return None, config
    try:
        return path, path.read_bytes().decode("utf-8")  # with its line ends
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"{path} cannot be read as text ({error}): give a configuration file") from error
