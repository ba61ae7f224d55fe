"""One training run of the command line: its data, its settings, and what came of it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from slipstream.cli.train_shared import leave, parse_time, span
from slipstream.core.places import expanded
from slipstream.errors import ParameterError

if TYPE_CHECKING:
    from slipstream.model.load import LoadedModel
    from slipstream.model.parts import ModelParts
    from slipstream.train.method import Method
    from slipstream.train.samples import Source
    from slipstream.train.settings import FitSettings


class TrainingRun:
    """A target with its data, from which a method is fed."""

    def __init__(self, loaded: LoadedModel, data: Path, online: bool) -> None:
        from slipstream.model.identity import identity
        from slipstream.model.parts import ModelParts

        self._loaded, self._data, self._online = loaded, data, online
        self.parts: ModelParts = ModelParts.of(
            loaded.model
        )  # before anything is packed: it must be trained through
        self._target: Mapping[str, Any] = identity(loaded.model, loaded.tokenizer, loaded.name)
        self._text = self._text_only()

    def _text_only(self) -> Source:
        """The samples without states. ParameterError for data that cannot be used as asked."""
        from slipstream.train.capture import Captured
        from slipstream.train.feed import data_kind, same_target
        from slipstream.train.sources import OnlineSource, StoredSource

        if data_kind(self._data) == "states":
            if self._online:
                raise ParameterError(f"{self._data} holds captured states: leave --online out")
            return StoredSource(self._data, Captured(), self._target)
        return OnlineSource(same_target(self._data, self._target), None, self._target)

    def draft_ids(self, size: int) -> Any:
        """The draft vocabulary, None for all tokens."""
        from slipstream.train.build import coverage, frequent_tokens

        if not size:
            return None
        if not 1 <= size <= self.parts.vocab_size:
            raise ParameterError(f"--draft-vocab must be from 1 to {self.parts.vocab_size}, not {size}")
        every = {"epoch": 0, "batch_size": 64, "seed": 0}
        ids = frequent_tokens(self._text.batches("train", **every), size, self.parts.vocab_size)  # type: ignore[arg-type]
        share = coverage(self._text.batches("heldout", **every), ids)  # type: ignore[arg-type]
        typer.echo(f"the {size} commonest tokens are {share:.1%} of the held-out answers", err=True)
        return ids

    def fit(
        self,
        method: Method,
        output: Path,
        settings: FitSettings,
        arguments: Mapping[str, Any],
        restart: bool,
        json_: bool,
        use: str,
        begun: Path | None = None,
    ) -> None:
        """Train, and say what came of it. begun: the folder of what training begins with."""
        for read in (self._loaded.path, self._data, begun):
            if read is not None and expanded(read).resolve() == expanded(output).resolve():
                raise ParameterError(f"--output {output} is what the training reads: choose another folder")
        from slipstream.cli.generation import Interrupts
        from slipstream.cli.output import print_json
        from slipstream.cli.train_watch import TrainingWatch
        from slipstream.train.feed import feed
        from slipstream.train.fit import fit
        from slipstream.train.provenance import TargetNote

        note = TargetNote(self._loaded.name, self.parts.fingerprint)
        fed = feed(method.wanted, self._data, self._loaded, self._target, self._online)
        with fed as source, Interrupts() as interrupts, TrainingWatch() as watch:
            fitted = fit(
                method,
                source,
                output,
                settings,
                note,
                arguments=arguments,
                watch=watch,
                restart=restart,
                interrupted=lambda: interrupts.number is not None,
            )
            status = interrupts.status
        leave(status)
        if json_:
            print_json({"output": str(output), "drafter": use, **fitted.to_json()})
        typer.echo(
            f"{fitted.step} of {fitted.total} steps, {fitted.tokens} tokens in {span(fitted.seconds)}"
            f" ({fitted.stopped}); expected tau {fitted.acceptance.tau:.2f}; use it with --drafter"
            f" {shlex.quote(use)}",
            err=True,
        )


def require_temperature(temperature: float) -> None:
    """ParameterError unless laws can be taken at it, there and back in float32."""
    if not 1e-3 <= temperature <= 1e3:
        raise ParameterError(f"--temperature must be from 0.001 to 1000, not {temperature}")


def fit_settings(given: Mapping[str, Any]) -> FitSettings:
    """`FitSettings` of a command's options."""
    from slipstream.train.settings import FitSettings

    if given["precision"] not in ("fp32", "bf16"):
        raise ParameterError(f"--precision must be fp32 or bf16, not {given['precision']!r}")
    limit = given["limit_time"]
    named = (
        "lr", "epochs", "steps", "batch_size", "accumulation", "warmup", "clip", "weight_decay", "seed",
        "precision", "device", "checkpoint_every", "measure_every", "heldout_batches",
    )  # fmt: skip
    return FitSettings(
        **{name: given[name] for name in named},
        max_tokens=given["limit_tokens"],
        minutes=0.0 if limit is None else parse_time(limit) / 60,
    )
