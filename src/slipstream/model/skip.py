"""A model without some of its sublayers: the draft of self-speculation (Draft & Verify, 2309.08168).

A decoder layer computes x + attention(x) and then x + mlp(x). Leaving a sublayer out means that it adds
nothing, so it can be replaced by one that gives zeros: whatever norm stands behind it, of zeros it makes
zeros. Nothing is copied and nothing is changed for good: the replacement lives inside a `with`.

The layers that run read and write the same cache slots. Keys and values of committed tokens are the full
model's own; those of drafted tokens are the thinned model's, lie behind the slot's length after drafting and
are overwritten when the full model verifies.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slipstream.core.draft import Needs
from slipstream.errors import ModelError, ParameterError
from slipstream.model.embedding import first_ids, input_table, original_rows
from slipstream.model.pack import PackRow
from slipstream.model.packed import weight_bytes
from slipstream.model.runner import Runner
from slipstream.model.siblings import replaced
from slipstream.model.taps import Taps, decoder

_RANGE = re.compile(r"([am]?)(\d{1,4})(?:-(\d{1,4}))?")  # no model has more layers than four digits count


@dataclass(frozen=True, slots=True)
class SkipSet:
    """Layers whose attention and whose MLP is left out, from 0."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, text: str) -> SkipSet:
        """`a3-9+m4+12-14`: attention of layers 3 to 9, the MLP of 4, both of 12 to 14."""
        chosen: dict[str, set[int]] = {"a": set(), "m": set()}
        for part in filter(None, text.replace(" ", "").split("+")):
            found = _RANGE.fullmatch(part)
            if found is None:
                raise ParameterError(f"skip must be written like a3-9+m4+12-14, not {text!r} (at {part!r})")
            kind, first, last = found[1], int(found[2]), int(found[3] or found[2])
            if last < first:
                raise ParameterError(f"skip has a range that ends before it begins: {part!r}")
            for k in kind or "am":
                chosen[k].update(range(first, last + 1))
        if text and not any(chosen.values()):
            raise ParameterError(f"skip must be written like a3-9+m4+12-14, {text!r} names no layer")
        return cls(frozenset(chosen["a"]), frozenset(chosen["m"]))

    @classmethod
    def exit_at(cls, layer: int, layers: int) -> SkipSet:
        """Early exit: only the first `layer` of `layers` run, then the final norm and the head."""
        rest = frozenset(range(layer, layers))
        return cls(rest, rest)

    @property
    def both(self) -> frozenset[int]:
        return self.attention & self.mlp

    @property
    def last_layer(self) -> int:
        """The highest layer named, -1 for an empty set."""
        return max((*self.attention, *self.mlp), default=-1)

    def check(self, layers: int) -> SkipSet:
        """The set itself; ParameterError if it names a layer that is not there or leaves nothing."""
        if self.last_layer >= layers:
            raise ParameterError(
                f"skip names layer {self.last_layer}, the model has layers 0 to {layers - 1}"
            )
        if len(self) == 2 * layers:
            raise ParameterError("skip leaves out every sublayer: keep some")
        return self

    def __len__(self) -> int:
        """Sublayers left out."""
        return len(self.attention) + len(self.mlp)

    def __str__(self) -> str:
        parts = (("a", self.attention - self.mlp), ("m", self.mlp - self.attention), ("", self.both))
        return "+".join(piece for kind, layers in parts for piece in _ranges(kind, layers))


def _ranges(kind: str, layers: Iterable[int]) -> Iterator[str]:
    ordered = sorted(layers)
    while ordered:
        end = next((i for i, layer in enumerate(ordered) if layer != ordered[0] + i), len(ordered))
        first, last = ordered[0], ordered[end - 1]
        yield f"{kind}{first}" if first == last else f"{kind}{first}-{last}"
        ordered = ordered[end:]


class Thinnable:
    """A runner's model whose sublayers can be left out. Raises ModelError, with the reason, for others.

    That is tried out, not looked up: with everything left out, the residual stream must come through
    all layers bit for bit as it went in.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._layers: list[nn.Module] = list(decoder(runner.model).layers)  # type: ignore[arg-type]
        name = type(runner.model).__name__
        self._sublayers: list[tuple[nn.Module, nn.Module]] = []
        for layer in self._layers:
            children = dict(layer.named_children())
            if "self_attn" not in children or "mlp" not in children:
                raise ModelError(
                    f"selfspec cannot leave out sublayers of {name}: its layers are not made of self_attn and"
                    " mlp; use a Llama, Qwen, Mistral or Gemma-3 model, or another drafter"
                )
            self._sublayers.append((children["self_attn"], children["mlp"]))
        try:
            faithful = all(self._passes_through(whole) for whole in (False, True))
        except Exception as error:  # whatever a layer does with an output it did not expect
            raise ModelError(
                f"selfspec cannot leave out sublayers of {name} ({type(error).__name__}: {error});"
                " use another drafter"
            ) from error
        if not faithful:
            raise ModelError(
                f"selfspec cannot leave out sublayers of {name}: its layers do more than add attention and"
                " mlp to the residual stream; use another drafter"
            )

    @property
    def layers(self) -> int:
        return len(self._layers)

    def _passes_through(self, whole: bool) -> bool:
        runner, slot = self._runner, -1
        taps = Taps(runner.model, Needs(hidden_layers=(0, self.layers)))
        every = frozenset(range(self.layers))
        runner.cache.open(slot)
        try:
            skip = SkipSet(every, every)
            with self.without(skip, whole=whole), runner.altered(None), taps.capture() as features:
                runner.forward([PackRow(slot, [1, 2, 3])], logits="last", taps=False)
        finally:
            runner.cache.close(slot)
        return torch.equal(features[0], features[self.layers])

    @contextmanager
    def without(self, skip: SkipSet, whole: bool = True) -> Iterator[None]:
        """Forwards inside the block run without these sublayers. whole: leave out the norms around them,
        too, where a layer has neither left."""
        with ExitStack() as stack:
            stack.enter_context(self._runner.altered((skip, whole)))
            for index, (layer, (attention, mlp)) in enumerate(
                zip(self._layers, self._sublayers, strict=True)
            ):
                if whole and index in skip.both:
                    stack.enter_context(replaced(layer, _same))
                    continue
                if index in skip.attention:
                    stack.enter_context(replaced(attention, _no_attention))
                if index in skip.mlp:
                    stack.enter_context(replaced(mlp, _zeros))
            yield

    def cost(self, skip: SkipSet) -> float:
        """Share of the weights that a pass without these sublayers still reads, head included."""
        parts = [(weight_bytes(a), weight_bytes(m)) for a, m in self._sublayers]
        head = self._runner.model.get_output_embeddings()
        total = sum(a + m for a, m in parts) + (weight_bytes(head) if head is not None else 0)
        left_out = sum(parts[i][0] for i in skip.attention) + sum(parts[i][1] for i in skip.mlp)
        return 1.0 - left_out / total


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    found: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return found


def _same(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _input(args, kwargs)


def _zeros(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.zeros_like(_input(args, kwargs))


def _no_attention(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    return _zeros(*args, **kwargs), None


def fingerprint(model: Any) -> str:
    """The same for the same weights, wherever they lie and however they are packed; 16 hex digits.

    Made of the sizes, a few embeddings and all vectors (norms, biases), which no packing touches.
    """
    config = model.config.get_text_config()
    digest = hashlib.sha256(
        f"{config.model_type} {config.num_hidden_layers} {config.hidden_size} {config.vocab_size}".encode()
    )
    vectors = [p for p in model.parameters() if p.ndim == 1]
    table = input_table(model)
    for tensor in (original_rows(table, first_ids(table.shape[0])), *vectors):
        digest.update(tensor.detach().float().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
