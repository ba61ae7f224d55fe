"""`Runner`: an unmodified Hugging Face causal LM that computes packed rows over slots.

Used for the target, for a draft model, and for anything else that is a causal LM. It owns the slot
cache. A forward leaves the cache's lengths alone: the caller commits what it keeps.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from slipstream.core.draft import Needs
from slipstream.errors import CapacityError, ModelError
from slipstream.model import attention
from slipstream.model.cache import SlotCache
from slipstream.model.int8 import block_of
from slipstream.model.pack import ROWS, Pack, PackRow, build_pack
from slipstream.model.packed import can_pack, pack_linears, weight_bytes
from slipstream.model.siblings import find_siblings
from slipstream.model.support import check_declared, probe
from slipstream.model.taps import Features, Taps, decoder
from slipstream.model.transfer import put

CHUNK = 512  # prompt tokens a forward; a multiple of the cache's width keeps chunks block-aligned


@dataclass(frozen=True)
class Output:
    """logits [n, V] in the model's dtype, for the asked tokens in pack order; features [T, hidden]."""

    pack: Pack
    logits: torch.Tensor | None
    features: Features = field(default_factory=dict)

    def features_of(self, tokens: Sequence[int]) -> Features:
        """Of these tokens of the pack, copies."""
        if not self.features:
            return {}
        device = next(iter(self.features.values())).device
        index = put(torch.tensor(tokens, dtype=torch.int64), device)
        return {key: value.index_select(0, index) for key, value in self.features.items()}


class Runner:
    """Computes rows of tokens. `pack` says whether the weights are ours to pack (see `packed`)."""

    def __init__(self, model: PreTrainedModel, *, pack: bool, check: bool = True) -> None:
        check_declared(model)
        attention.register()
        self.model = model
        self.config = model.config.get_text_config()
        self.cache = SlotCache()
        self.device: torch.device = next(model.parameters()).device
        self.variant: Hashable | None = "whole"  # see `altered`
        self._original = model.config._attn_implementation
        self._taps: Taps | None = None
        self.needs = Needs()
        self.block = ROWS  # steps are computed in multiples of so many tokens
        model.set_attn_implementation(attention.NAME)
        try:
            if pack and can_pack(model):
                pack_linears(model, self.siblings())
            self.block = block_of(model)
            if check:
                probe(self, self._original)
        except BaseException:
            self.close()
            raise

    @property
    def vocab_size(self) -> int:
        """Width of a logit row, padding included."""
        return int(self.config.vocab_size)

    @property
    def context(self) -> int:
        """Most positions the model was made for."""
        return int(getattr(self.config, "max_position_embeddings", 1 << 30))

    @property
    def weight_bytes(self) -> int:
        return weight_bytes(self.model)

    @property
    def memory_bytes(self) -> int:
        return self.weight_bytes + self.cache.memory_bytes

    def siblings(self) -> list[tuple[str, ...]]:
        """Groups of the model's plain linear layers that read one tensor in turn, by name (`siblings`)."""

        def few_tokens() -> None:
            slot = -1
            self.cache.open(slot)
            try:
                with self.altered(None):
                    self.forward([PackRow(slot, [1, 2, 3])], logits="none", taps=False)
            finally:
                self.cache.close(slot)

        return find_siblings(self.model, few_tokens)

    def tap(self, needs: Needs) -> None:
        """Declare the features every forward must give from now on."""
        self.needs = needs
        self._taps = Taps(self.model, needs) if needs.hidden_layers or needs.last_hidden else None

    def forward(self, rows: Sequence[PackRow], *, logits: str = "all", taps: bool = True) -> Output:
        """Compute rows. logits: "all" tokens, the "last" of each row, or "none" (skips the LM head)."""
        prepared = []
        for row in rows:
            length = self.cache.length(row.slot)
            if length + len(row.tokens) > self.context and row.parents is None:
                raise CapacityError(
                    f"{length + len(row.tokens)} tokens do not fit the model's context of {self.context}"
                )
            prepared.append((row, length, self.cache.reserve(row.slot, len(row.tokens))))
        pack = build_pack(prepared, self._packs_on, self.block)
        with self._capture(taps) as features:
            out = self._compute(pack, logits)
        return Output(pack, out, {k: v[: pack.count] for k, v in features.items()})

    @property
    def _packs_on(self) -> torch.device:
        """Where a pack is made."""
        return self.device

    def _capture(self, taps: bool) -> AbstractContextManager[Features]:
        """What was declared with `tap` is collected inside the block."""
        return nullcontext({}) if self._taps is None or not taps else self._taps.capture()

    @torch.inference_mode()
    def _compute(self, pack: Pack, logits: str) -> torch.Tensor | None:
        """[n, V], as `Output.logits`."""
        step = attention.AttentionStep(pack, self.cache)
        keep, count = None, pack.count
        if logits == "last":
            last, count = [span.end - 1 for span in pack.spans], len(pack.spans)
            keep = put(torch.tensor(last + last[:1] * (-count % self.block)), self.device)
        out = self._call(step, pack.input_ids, pack.position_ids, logits, keep)
        return None if out is None else out[:count]

    def _call(
        self,
        step: attention.Step,
        ids: torch.Tensor,
        positions: torch.Tensor,
        logits: str,
        keep: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """The model on one line of tokens [1, T]; logits of all, or of the kept ones [n] alone."""
        arguments: dict[str, Any] = {
            "input_ids": ids,
            "position_ids": positions,
            "use_cache": False,
            "slipstream": step,
        }
        self.layers_seen = step.layers_seen
        if logits == "none":
            decoder(self.model)(**arguments)
            return None
        if keep is not None:
            arguments["logits_to_keep"] = keep
        return self.model(**arguments).logits[0]  # type: ignore[no-any-return]

    @contextmanager
    def altered(self, variant: Hashable | None) -> Iterator[None]:
        """Say that the model computes something else inside the block, as its parts or hooks are changed.

        Steps that were recorded elsewhere (`StaticRunner`) are not those of another variant. None: nothing
        is to be recorded, because it will not be asked for again, or hooks must run.
        """
        before, self.variant = self.variant, variant
        try:
            yield
        finally:
            self.variant = before

    def parts_replaced(self) -> None:
        """Say that parts of the model were replaced for good: steps that were recorded are not its own."""
        self.block = block_of(self.model)

    def extend(self, slot: int, tokens: Sequence[int], chunk: int = CHUNK) -> None:
        """Put tokens into the slot for good, in chunks; computes no logits."""
        while tokens:
            part, tokens = tokens[:chunk], tokens[chunk:]
            self.forward([PackRow(slot, part)], logits="none", taps=False)
            self.cache.commit(slot, range(len(part)))

    def close(self) -> None:
        """Give the model its own attention back and free the cache."""
        self.model.set_attn_implementation(self._original)
        self.cache = SlotCache()


def siblings(model: PreTrainedModel) -> list[tuple[str, ...]]:
    """`Runner.siblings` of a model that nobody runs yet, which is left as it is; none if it cannot be run."""
    try:
        runner = Runner(model, pack=False, check=False)
    except ModelError:
        return []
    try:
        return runner.siblings()
    finally:
        runner.close()
