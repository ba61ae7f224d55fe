"""Run a model that belongs to somebody else, and give it back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from slipstream.errors import ModelError, SlipstreamError
from slipstream.model import attention
from slipstream.model.runner import Runner


@contextmanager
def borrowed(model: PreTrainedModel, *, check: bool = True) -> Iterator[Runner]:
    """A runner on the model, in evaluation mode; weights are not packed.

    Whatever happens inside, the model gets back its attention and every module its own training flag.
    check: compare tree with path logits first (`support.probe`). Raises ModelError, saying why, for a
    model that cannot be run.
    """
    refuse_unusable(model)
    training = [m for m in model.modules() if m.training]
    configs = _configs(model)
    attentions = [config._attn_implementation_internal for config in configs]
    try:
        # The flags themselves, not model.eval(): a model may do more than that in its own `train`.
        for module in training:
            module.training = False
        runner = _open(model, check)
        try:
            yield runner
        finally:
            runner.close()
    finally:
        for module in training:
            module.training = True
        for config, implementation in zip(configs, attentions, strict=True):
            config._attn_implementation_internal = implementation


def refuse_unusable(model: object) -> None:
    """Raise ModelError, naming the way out, for what cannot be borrowed."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        inner = " (unwrap it: model.merge_and_unload() of PEFT, model._orig_mod of torch.compile)"
        raise ModelError(
            f"{name} is not a transformers model; give a loaded AutoModelForCausalLM"
            + (inner if isinstance(model, nn.Module) else "")
        )
    if not model.can_generate():
        raise ModelError(f"{name} has no language modelling head; load it with AutoModelForCausalLM")
    if model.config._attn_implementation == attention.NAME:
        raise ModelError(
            f"this {name} is held by a Slipstream engine or by a call that is still running; close it first"
        )
    devices = {p.device for p in model.parameters()}
    if any(d.type == "meta" for d in devices):
        raise ModelError(
            f"weights of this {name} are offloaded to disk or CPU; load it without device_map, on one device"
        )
    if len(devices) != 1:
        where = ", ".join(sorted(map(str, devices))) or "no device"
        raise ModelError(f"this {name} lies on {where}; load it on one device (device_map='cuda:0' or 'cpu')")


def _open(model: PreTrainedModel, check: bool) -> Runner:
    try:
        return Runner(model, pack=False, check=check)
    except SlipstreamError:
        raise
    except Exception as error:  # whatever a model's, a quantiser's or a wrapper's own code raises
        reason = (str(error).splitlines() or [""])[0]
        raise ModelError(
            f"{type(model).__name__} cannot be run by Slipstream ({type(error).__name__}: {reason}); load it"
            " unquantised, on one device, or use model.generate"
        ) from error


def _configs(model: PreTrainedModel) -> list[Any]:
    """Every configuration that says which attention to use, each once."""
    found: dict[int, Any] = {}
    waiting = [m.config for m in model.modules() if isinstance(m, PreTrainedModel)]
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in found:
            found[id(config)] = config
            waiting.extend(getattr(config, key, None) for key in config.sub_configs)
    return list(found.values())
