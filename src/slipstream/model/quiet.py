"""Keeps other libraries from printing while they load, and puts their settings back."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator

import huggingface_hub.utils as hub
from transformers.utils import logging


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, log lines or warnings of transformers and huggingface_hub inside the body.

    transformers has bars that follow no setting (GGUF), hence the redirection of stderr.
    """
    verbosity, bars, hub_silent = (
        logging.get_verbosity(),
        logging.is_progress_bar_enabled(),
        hub.are_progress_bars_disabled(),
    )
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.set_verbosity(logging.CRITICAL)
        logging.disable_progress_bar()
        hub.disable_progress_bars()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()
            # the two of transformers switch the hub's bars as well, so those are put back last
            if hub_silent:
                hub.disable_progress_bars()
            else:
                hub.enable_progress_bars()


def first_line(error: BaseException) -> str:
    """An exception as one short line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."
