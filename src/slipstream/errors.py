"""Every error a person can cause. Each message names what was wrong, where, and what to do.

The command line prints `str(error)` on one line and exits with status 2; a library user catches
`SlipstreamError` or the narrower class.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class SlipstreamError(Exception):
    """Base of all errors that the user can mend. The message is complete by itself.

    seq_ids: those sequences of a step that met it, whose end lets the others go on; None where it is not
    their own.
    """

    seq_ids: frozenset[int] | None = None


@contextmanager
def met_by(*seq_ids: int) -> Iterator[None]:
    """Marks errors that pass with the sequences whose own they are, unless that was told more closely."""
    try:
        yield
    except SlipstreamError as error:
        error.seq_ids = error.seq_ids or frozenset(seq_ids)
        raise


class ParameterError(SlipstreamError, ValueError):
    """A sampling parameter or option has a value that cannot be used."""


class ModelError(SlipstreamError):
    """A model cannot be found, read, or run exactly."""


class DrafterError(SlipstreamError):
    """A drafter is unknown, misconfigured or does not fit the target; or it, or a controller, broke its
    contract."""


class CapacityError(SlipstreamError):
    """Memory, disk or context room does not suffice; the message says how much is needed."""


class TrainingError(SlipstreamError):
    """Training cannot begin or go on; what is good so far is kept, and the message says where."""
