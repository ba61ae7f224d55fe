"""Every error a person can cause. Each message names what was wrong, where, and what to do.

The command line prints `str(error)` on one line and exits with status 2; a library user catches
`SlipstreamError` or the narrower class.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class SlipstreamError(Exception):
    """Base of all errors that the user can mend. The message is complete by itself.

    seq_id: the one sequence of a step that met it, whose end lets the others go on; None where it is not
    one sequence's own.
    """

    seq_id: int | None = None


@contextmanager
def met_by(seq_id: int) -> Iterator[None]:
    """Marks errors that pass with the sequence whose own they are."""
    try:
        yield
    except SlipstreamError as error:
        error.seq_id = seq_id
        raise


class ParameterError(SlipstreamError, ValueError):
    """A sampling parameter or option has a value that cannot be used."""


class ModelError(SlipstreamError):
    """A model cannot be found, read, or run exactly."""


class DrafterError(SlipstreamError):
    """A drafter is unknown, misconfigured, does not fit the target, or broke its contract."""


class CapacityError(SlipstreamError):
    """Memory, disk or context room does not suffice; the message says how much is needed."""


class TrainingError(SlipstreamError):
    """Training cannot begin or go on; what is good so far is kept, and the message says where."""
