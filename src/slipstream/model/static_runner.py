"""`StaticRunner`: a `Runner` for GPUs, whose steps have few shapes, so that each is recorded once.

On a GPU a step of a large model is a thousand small launches, and the host may need longer for them than
the memory for the weights. Steps of one shape launch the same kernels on the same addresses, so they are
recorded as a CUDA graph and launched at once. Long pieces of prompts and huge trees go row by row as in
`Runner`, over the same cache. Without a recorder all is computed the same way, unrecorded: that is how it
is tested on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from transformers import PreTrainedModel

from slipstream.core.draft import Needs
from slipstream.model.cache import WIDTH
from slipstream.model.graphs import CudaGraphs, Recorder, RecordError
from slipstream.model.pack import Pack, PackRow
from slipstream.model.runner import Runner
from slipstream.model.static import Inputs, Shape, StaticStep, bucket, fits
from slipstream.model.static_cache import StaticCache, power_of_two
from slipstream.model.support import probe
from slipstream.model.taps import Features
from slipstream.model.transfer import put

_Step = Callable[[], tuple[torch.Tensor | None, Features]]
MOST = 128  # recorded steps that are kept


class StaticRunner(Runner):
    """rows and tokens: what the cache has room for at first. recorder: None computes every step anew.

    not_recorded: why steps are not recorded although there is a recorder; None if they are.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pack: bool,
        check: bool = True,
        rows: int = 1,
        tokens: int = WIDTH,
        recorder: Recorder | None = None,
    ) -> None:
        self._static: StaticCache | None = None
        self._steps: dict[Shape, _Step] = {}  # least recently used first
        self._inputs: dict[tuple[int, int], Inputs] = {}
        self._logits: dict[int, torch.Tensor] = {}  # by their number: what recorded steps give, held once
        self._seen: Features = {}
        self._wanted: Needs | None = None
        self._recorder = recorder
        self._epoch = 0
        self.not_recorded: str | None = None
        super().__init__(model, pack=pack, check=check)
        try:
            self.cache = self._static = StaticCache(self._columns(), rows, tokens)
            if check:
                probe(self, self._original)
        except BaseException:
            self.close()
            raise

    def _columns(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """One column of every layer."""
        slot = -1
        self.cache.open(slot)
        self.forward([PackRow(slot, [0])], logits="none", taps=False)
        return self.cache.release(slot, [range(1)])[0]

    @property
    def _packs_on(self) -> torch.device:
        return torch.device("cpu")

    @contextmanager
    def _capture(self, taps: bool) -> Iterator[Features]:
        """Hooks do not run where a step is replayed: then `_compute` fills in what they saw."""
        self._wanted = self.needs if taps and self._taps is not None else None
        with super()._capture(taps) as self._seen:
            yield self._seen

    @torch.inference_mode()
    def _compute(self, pack: Pack, logits: str) -> torch.Tensor | None:
        cache = self._static
        if cache is None or not fits(pack):
            ids, positions = (put(t, self.device) for t in (pack.input_ids, pack.position_ids))
            return super()._compute(replace(pack, input_ids=ids, position_ids=positions), logits)
        first, rows = cache.settle([span.slot for span in pack.spans])
        width = power_of_two(max(span.count for span in pack.spans))
        columns = bucket(max(span.width for span in pack.spans))
        shape = Shape(first, rows, width, columns, logits, self._wanted, self.variant)
        if (rows, width) not in self._inputs:
            self._inputs[rows, width] = Inputs(rows, width, self.device)
        inputs = self._inputs[rows, width]
        inputs.fill(pack, cache, first)
        out, features = self._step(shape, inputs, cache)()
        # Copies: the next step of this shape overwrites what this one gave.
        order = inputs.order[: pack.count]
        picked = {key: value.index_select(0, order) for key, value in features.items()}
        self._seen.clear()
        self._seen.update(picked)
        if out is None:
            return None
        return out[: len(pack.spans)].clone() if logits == "last" else out.index_select(0, order)

    def _step(self, shape: Shape, inputs: Inputs, cache: StaticCache) -> _Step:
        if cache.epoch != self._epoch:  # what was recorded reads where the cache was
            self._forget_steps()
            self._epoch = cache.epoch
        step = self._steps.pop(shape, None)
        if step is None:
            work = partial(self._work, shape, inputs, cache)
            if self._recorder is None or self.variant is None:
                return work
            try:
                step = self._recorder.record(work)
            except RecordError as error:
                self._recorder, self.not_recorded = None, str(error)
                return work
            while len(self._steps) >= MOST:
                del self._steps[next(iter(self._steps))]
        self._steps[shape] = step
        return step

    def _work(self, shape: Shape, inputs: Inputs, cache: StaticCache) -> tuple[torch.Tensor | None, Features]:
        """logits of all T tokens, or [rows, V] of the last ones; features [T, hidden]."""
        step = StaticStep(shape, inputs, cache)
        keep = inputs.last if shape.logits == "last" else None
        out = self._call(step, inputs.ids, inputs.positions, shape.logits, keep)
        if out is not None:
            if len(out) not in self._logits:
                self._logits[len(out)] = torch.empty_like(out)
            out = self._logits[len(out)].copy_(out)
        return out, dict(self._seen)

    def _forget_steps(self) -> None:
        self._steps.clear()
        if self._recorder is not None:
            self._recorder.forget()

    def parts_replaced(self) -> None:
        self._forget_steps()
        self._logits.clear()

    def close(self) -> None:
        super().close()
        self._steps.clear()
        self._inputs.clear()
        self._logits.clear()
        self._static = None


def open_runner(model: PreTrainedModel, *, rows: int = 1) -> Runner:
    """The runner for where the model lies, with room for so many rows at first; its weights are packed in
    place where that gains."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return Runner(model, pack=True)
    return StaticRunner(model, pack=True, rows=rows, recorder=CudaGraphs(device))
