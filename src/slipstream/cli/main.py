"""The command `slipstream`: how it begins and how it leaves.

Results go to stdout; progress and messages to stderr. Exit status: 0 fine, 1 for a claim that does not
hold (doctor, verify, --compare), 2 for a mistake that the user can mend (one line says how), 130 after
Ctrl-C, 141 for a closed pipe, 143 after SIGTERM. The commands are in `cli.app`, which is not imported before
somebody listens to Ctrl-C: it takes its time.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def build_app() -> typer.Typer:
    """The application with all commands."""
    from slipstream.cli.app import assemble

    return assemble()


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and leaves with its exit status."""
    _mend_streams()
    try:
        _run(arguments)
    except KeyboardInterrupt:  # while the modules were still loading
        sys.exit(130)
    except OSError as error:
        from slipstream.cli.leaving import without_output

        status = without_output(error)
        if status is None:
            raise
        sys.exit(status)


def _run(arguments: Sequence[str] | None) -> None:
    stdout = sys.stdout
    try:
        build_app()(args=None if arguments is None else list(arguments), prog_name="slipstream")
    except SystemExit:
        if sys.stdout is not stdout:  # typer put another in its place, for the pipe is closed
            raise BrokenPipeError from None
        raise
    finally:
        stdout.flush()  # what cannot be written is told here, not by the interpreter as it ends


def _mend_streams() -> None:
    """A stream that the shell closed (`>&-`) is as good as /dev/null, and what a terminal's encoding lacks is
    shown as a question mark."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif mode == "w" and isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    main()
