"""How a command leaves when something is wrong: one line on stderr, and an exit status."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress

import typer

PIPE_CLOSED = 141  # what a shell reports for a program ended by SIGPIPE
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def fail(message: str) -> None:
    """Prints an error as one line on stderr."""
    typer.echo(f"slipstream: error: {' '.join(message.split())}", err=True)


def without_output(error: OSError) -> int | None:
    """The exit status where output could not be written: its reader is gone, or a device is full, which is
    said. None for any other error."""
    if isinstance(error, BrokenPipeError):
        status = PIPE_CLOSED
    elif error.errno in _NO_ROOM and error.filename is None:
        with suppress(OSError):  # stderr may be no better
            fail(f"the output cannot be written: {error.strerror}; make room, or send it elsewhere")
        status = 2
    else:
        return None
    for stream in (sys.stdout, sys.stderr):  # what is still buffered must not raise again at exit
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return status
