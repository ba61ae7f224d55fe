"""Can this model be run exactly? Asked once a load, by declaration and by experiment.

The experiment computes a small tree of random tokens in one pass over a slot and every path through
it separately, with the model's own attention and no cache at all. If both agree, then masks,
positions, slots and the attention hook are right for this model, whatever its code does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from slipstream.errors import ModelError
from slipstream.model.embedding import input_table
from slipstream.model.int8 import Int8Linear
from slipstream.model.pack import PackRow

if TYPE_CHECKING:
    from slipstream.model.runner import Runner

ROLLS_BACK = frozenset({"full_attention", "sliding_attention"})
_PREFIX = 11
_PARENTS = (-1, 0, 0, 1, 1, 2, 3)
# Largest relative error of a logit row that rounding explains; wrong masks give errors near 1.
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6, torch.float16: 0.03, torch.bfloat16: 0.15}
_INT8_TOLERANCE = 0.15  # rounding of activations to int8 steps makes little differences large ones


def check_declared(model: PreTrainedModel) -> None:
    """Refuse what the configuration already rules out, with the reason."""
    name = type(model).__name__
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder; Slipstream runs causal language models")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    recurrent = sorted(kinds - ROLLS_BACK)
    if recurrent:
        raise ModelError(
            f"{name} has layers of type {', '.join(recurrent)}: their state cannot be rolled back after a"
            " rejected draft; use a model whose layers are full or sliding attention"
        )
    if not model._supports_attention_backend:
        raise ModelError(
            f"{name} does not let its attention be replaced in this transformers version, so drafts cannot"
            " be verified; use a model that supports attention backends (Llama, Qwen, Mistral, Gemma-3, …)"
        )


def probe(runner: Runner, original_attention: str) -> float:
    """Compare tree logits with per-path logits; gives the largest relative error or raises.

    The test must also be able to fail: paths whose logits are all alike would prove nothing, so
    the spread between different nodes must be well above the error.
    """
    model, slot = runner.model, -1
    generator = torch.Generator().manual_seed(0)
    vocab = min(runner.vocab_size, input_table(model).shape[0])
    drawn = torch.randint(0, vocab, (_PREFIX + len(_PARENTS),), generator=generator).tolist()
    prefix, nodes = drawn[:_PREFIX], drawn[_PREFIX:]
    runner.cache.open(slot)
    try:
        runner.extend(slot, prefix)
        tree = runner.forward([PackRow(slot, nodes, _PARENTS)], taps=False).logits
        missing = set(range(int(runner.config.num_hidden_layers))) - runner.layers_seen
    finally:
        runner.cache.close(slot)
    if missing:
        raise ModelError(
            f"layers {sorted(missing)} of {type(model).__name__} did not go through the attention hook;"
            " the model keeps a state of its own and cannot be run exactly"
        )
    assert tree is not None
    expected = _path_logits(runner, original_attention, prefix, nodes)
    error = float(((tree.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).max())
    spread = float(((expected[1:] - expected[:1]).norm(dim=-1) / expected[0].norm()).min())
    tolerance = _TOLERANCE[tree.dtype]
    if any(isinstance(m, Int8Linear) for m in model.modules()):
        tolerance = max(tolerance, _INT8_TOLERANCE)
    if not error <= tolerance:
        raise ModelError(
            f"{type(model).__name__} gives other logits for a tree than for its paths (relative error"
            f" {error:.2g}, allowed {tolerance:.2g}): it ignores the mask or positions it is given, so"
            " speculation would change its output"
        )
    if spread < 2 * error:
        raise ModelError(
            f"the probe of {type(model).__name__} proves nothing: its logits hardly depend on the input"
            f" (spread {spread:.2g}, error {error:.2g}); are the weights untrained or damaged?"
        )
    return error


@torch.inference_mode()
def _path_logits(runner: Runner, implementation: str, prefix: list[int], nodes: list[int]) -> torch.Tensor:
    """Logits [nodes, V] of every node, each computed as the end of its own plain sequence."""
    model = runner.model
    rows = []
    model.set_attn_implementation(implementation)
    try:
        for node in range(len(nodes)):
            path, at = [], node
            while at >= 0:
                path.append(nodes[at])
                at = _PARENTS[at]
            ids = torch.tensor([prefix + path[::-1]], device=runner.device)
            rows.append(model(input_ids=ids, use_cache=False).logits[0, -1].float())
    finally:
        model.set_attn_implementation("slipstream")
    return torch.stack(rows)
