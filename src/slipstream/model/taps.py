"""Hidden states out of an unmodified model, by forward hooks.

Layer k means the residual stream after k decoder layers: 0 is the embeddings, the number of layers
is what enters the final norm. "last" is what enters the LM head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from slipstream.core.draft import Needs
from slipstream.errors import ModelError

Features = dict[int | str, torch.Tensor]


def decoder(model: nn.Module) -> nn.Module:
    """The model without its LM head."""
    found = model.get_decoder()  # type: ignore[operator]
    if not isinstance(getattr(found, "layers", None), nn.ModuleList):
        raise ModelError(f"{type(model).__name__} has no list of decoder layers that Slipstream can find")
    return found  # type: ignore[no-any-return]


class Taps:
    """Collects what `Needs` declares during a forward, each [T, hidden]."""

    def __init__(self, model: nn.Module, needs: Needs) -> None:
        self._decoder = decoder(model)
        self._needs = needs
        count = len(self._decoder.layers)  # type: ignore[arg-type]
        for layer in needs.hidden_layers:
            if not 0 <= layer <= count:
                raise ModelError(
                    f"a drafter wants hidden states after layer {layer}; the target has {count} layers"
                )
        self._layers = count

    @contextmanager
    def capture(self) -> Iterator[Features]:
        """Hooks live only inside the block, so the model is left as it was."""
        features: Features = {}
        handles = []
        layers: Any = self._decoder.layers
        for layer in self._needs.hidden_layers:
            if layer < self._layers:

                def entering(
                    _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], key: int = layer
                ) -> None:
                    hidden = args[0] if args else kwargs["hidden_states"]
                    features[key] = hidden[0]

                handles.append(layers[layer].register_forward_pre_hook(entering, with_kwargs=True))
            else:

                def leaving(_module: nn.Module, _args: Any, output: Any, key: int = layer) -> None:
                    features[key] = (output[0] if isinstance(output, tuple) else output)[0]

                handles.append(layers[layer - 1].register_forward_hook(leaving))
        if self._needs.last_hidden:

            def last(_module: nn.Module, _args: Any, output: Any) -> None:
                features["last"] = output[0][0] if isinstance(output, tuple) else output.last_hidden_state[0]

            handles.append(self._decoder.register_forward_hook(last))
        try:
            yield features
        finally:
            for handle in handles:
                handle.remove()
