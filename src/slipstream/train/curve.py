"""What a run shows while it goes and leaves behind: a watcher, the learning curve, TensorBoard scalars."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from slipstream.model.store import write_atomic
from slipstream.train.acceptance import Acceptance


def installed(name: str) -> bool:
    """Whether an optional package is there (extra `train`)."""
    return find_spec(name) is not None


@dataclass(frozen=True, slots=True)
class Seen:
    """After one step. parts: the loss's parts a label; rate: the learning rate; speed: tokens a second of
    this call; seconds_left: at that speed; tau: the last one measured."""

    step: int
    total: int
    loss: float
    parts: Mapping[str, float]
    rate: float
    tokens: int
    speed: float
    seconds_left: float
    tau: float | None


class Watch(Protocol):
    """Is told what happens."""

    def begin(self, step: int, total: int) -> None: ...

    def step(self, seen: Seen) -> None: ...

    def measured(self, step: int, found: Acceptance) -> None: ...

    def note(self, text: str) -> None: ...


class Unwatched:
    """Shows nothing."""

    def begin(self, step: int, total: int) -> None:
        pass

    def step(self, seen: Seen) -> None:
        pass

    def measured(self, step: int, found: Acceptance) -> None:
        pass

    def note(self, text: str) -> None:
        pass


@dataclass
class Curve:
    """The run so far: the loss of every step, and every measurement on held-out answers."""

    losses: list[float] = field(default_factory=list)  # of step 1, 2, …
    measured: list[dict[str, Any]] = field(default_factory=list)  # {"step": …, "tau": …, counts}

    def to_json(self) -> dict[str, Any]:
        return {"losses": self.losses, "measured": self.measured}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Curve:
        return cls([float(x) for x in value["losses"]], list(value["measured"]))

    def write(self, folder: Path, draw: bool = True) -> None:
        """curve.json, and with `draw` curve.png where matplotlib is installed."""
        write_atomic(folder / "curve.json", json.dumps(self.to_json()) + "\n")
        if not (draw and installed("matplotlib")):
            return
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        loss = figure.subplots()
        loss.plot(range(1, len(self.losses) + 1), _smooth(self.losses), color="tab:blue")
        loss.set_xlabel("step")
        loss.set_ylabel("loss a label (smoothed)", color="tab:blue")
        if self.measured:
            tau = loss.twinx()
            tau.plot(
                [m["step"] for m in self.measured], [m["tau"] for m in self.measured], "o-", color="tab:red"
            )
            tau.set_ylabel("expected tau, held-out", color="tab:red")
        partial = folder / "curve.partial.png"
        figure.savefig(partial, dpi=110)
        partial.replace(folder / "curve.png")


def _smooth(values: list[float]) -> list[float]:
    """Exponential mean over about 20 steps, so that a curve can be read."""
    shown: list[float] = []
    for value in values:
        shown.append(value if not shown else 0.95 * shown[-1] + 0.05 * value)
    return shown


class Scalars:
    """TensorBoard scalars in a folder; nothing without one, or where tensorboard is not installed.

    They are a convenience: where they cannot be written (a full disk, say) they end, and the run goes on.
    """

    def __init__(self, folder: Path | None, step: int) -> None:
        self._writer: Any = None
        self._hook = threading.excepthook
        if folder is None or not installed("tensorboard"):
            return
        from torch.utils.tensorboard import SummaryWriter

        threading.excepthook = self._in_thread
        try:
            self._writer = SummaryWriter(str(folder), purge_step=step + 1)
        except OSError:
            self.close()

    def _in_thread(self, told: threading.ExceptHookArgs) -> None:
        """TensorBoard writes in a thread of its own, where a full disk would be shown as a traceback."""
        if not isinstance(told.exc_value, OSError):
            self._hook(told)

    def step(self, seen: Seen) -> None:
        named = {"loss": seen.loss, "rate": seen.rate, "tokens_per_second": seen.speed}
        self._add(seen.step, {**named, **{f"part/{k}": v for k, v in seen.parts.items()}})

    def measured(self, step: int, found: Acceptance) -> None:
        rates = {f"heldout/acceptance_{depth}": r for depth, r in enumerate(found.conditional, start=1)}
        self._add(step, {"heldout/tau": found.tau, **rates})

    def _add(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            return
        try:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        except OSError:
            self.close()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with suppress(OSError):
                writer.close()
        threading.excepthook = self._hook
