"""Targets and draft heads small enough for tests: random ones, and ones that are always right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from slipstream.heads.eagle import EagleConfig, EagleHead
from slipstream.heads.io import save_eagle, save_medusa
from slipstream.heads.medusa import MedusaConfig, MedusaHeads
from slipstream.model.parts import ModelParts
from slipstream.model.taps import decoder
from slipstream.testing.tiny import tiny_model


def randomise(module: torch.nn.Module, seed: int = 0, scale: float = 0.3) -> None:
    """Fill every parameter with noise that depends on the seed and the parameter's place only."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def memoryless_model(
    kind: str = "llama", vocab_size: int = 24, seed: int = 0, **config: Any
) -> PreTrainedModel:
    """A target whose next token depends on the last one alone, and greedily runs through all tokens in turn.

    Its layers add nothing to the embedding. With fewer tokens than hidden units its states are
    linearly independent, so a linear map can send each of them anywhere.
    """
    model = tiny_model(kind, vocab_size=vocab_size, seed=seed, **config)
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))
    following = torch.empty_like(order).index_copy(0, order, order.roll(-1))  # one cycle
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.zero_()
        wanted = 4.0 * torch.nn.functional.one_hot(following, vocab_size)
        model.get_output_embeddings().weight.copy_(_map(_states(model), wanted))  # type: ignore[union-attr]
    return model


@torch.inference_mode()
def _states(model: PreTrainedModel) -> torch.Tensor:
    """Every token's last hidden state [V, H] in a memoryless model."""
    every = torch.arange(int(model.config.vocab_size))[:, None]  # [V, 1]
    hidden: torch.Tensor = decoder(model)(input_ids=every, use_cache=False).last_hidden_state[:, 0]
    return hidden


def _map(states: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The linear weight [n, H] that sends states [V, H] to wanted [V, n]."""
    weight: torch.Tensor = (torch.linalg.pinv(states.double()) @ wanted.double()).T.float().contiguous()
    return weight


def greedy_next(model: PreTrainedModel) -> torch.Tensor:
    """What a memoryless model greedily says after each token, [V]."""
    return model.get_output_embeddings()(_states(model)).argmax(-1)  # type: ignore[no-any-return,misc]


def random_medusa(
    model: PreTrainedModel,
    num_heads: int = 3,
    *,
    num_layers: int = 1,
    output: str = "own",
    draft_vocab_size: int | None = None,
    seed: int = 0,
) -> MedusaHeads:
    """Heads that fit the model and know nothing."""
    parts = ModelParts.of(model)
    config = MedusaConfig(
        parts.hidden_size,
        parts.vocab_size,
        num_heads,
        num_layers,
        "own" if output == "own" else "target",
        draft_vocab_size,
    )
    heads = MedusaHeads(config)
    randomise(heads, seed)
    if heads.vocab.reduced:
        heads.vocab.set_ids(random_ids(parts.vocab_size, heads.vocab.size, seed))
    return heads.eval().requires_grad_(False)


def random_ids(vocab_size: int, count: int, seed: int = 0) -> torch.Tensor:
    """`count` distinct token ids, ascending."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(vocab_size, generator=generator)[:count].sort().values


def perfect_medusa(model: PreTrainedModel, num_heads: int = 3) -> MedusaHeads:
    """Heads that are right about a greedy `memoryless_model`: head k maps the state of x to next^(k+2)(x)."""
    states, following = _states(model), greedy_next(model)
    vocab, size = states.shape
    heads = MedusaHeads(MedusaConfig(size, vocab, num_heads)).start(torch.zeros(vocab, size))
    reached = following
    for head in heads.heads:
        reached = following[reached]
        output: torch.nn.Linear = head[-1]  # type: ignore[index]
        output.weight.data = _map(states, torch.nn.functional.one_hot(reached, vocab))
    return heads.eval().requires_grad_(False)


def random_eagle(
    model: PreTrainedModel,
    version: int = 3,
    *,
    aux_layers: tuple[int, ...] = (0, 1, 2),
    seed: int = 0,
    scale: float = 0.3,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> EagleHead:
    """A head of another shape than the target's layers, bound to the model, that knows nothing.

    scale: of its weights; large ones make its laws peaked, and magnify rounding.
    """
    parts = ModelParts.of(model)
    settings: dict[str, Any] = {
        "version": 3 if version == 3 else 1,
        "hidden_size": parts.hidden_size,
        "intermediate_size": 3 * parts.hidden_size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": parts.vocab_size,
        "target_hidden_size": parts.hidden_size,
        "aux_layers": aux_layers if version == 3 else (),
        **config,
    }
    head = EagleHead(EagleConfig(**settings), dtype)
    randomise(head, seed, scale)
    if head.vocab.reduced:
        head.vocab.set_ids(random_ids(parts.vocab_size, head.vocab.size, seed))
    head.target = parts
    return head.eval().requires_grad_(False)


def perfect_eagle(model: PreTrainedModel, version: int = 3, **config: Any) -> EagleHead:
    """A head that is right about a greedy `memoryless_model`.

    EAGLE-1 at every depth: its output is the embedding it read. EAGLE-3 one token deep: fc turns the
    last residual stream of x into the embedding of next(x).
    """
    layers = int(model.config.num_hidden_layers)
    head = random_eagle(model, version, **{"aux_layers": (layers,), **config})
    body, table = head.body, model.get_input_embeddings().weight  # [V, H]
    size = table.shape[1]
    for name, parameter in head.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            parameter.data.zero_()
        elif "norm" in name:
            parameter.data.fill_(1.0)
    fc: Any = body["fc"]
    if version == 1:
        fc.weight.data = torch.cat((torch.eye(size), torch.zeros(size, size)), 1)
    else:
        every = torch.arange(len(table))[:, None]
        # what enters the layers: a model may scale its embedding
        stream = decoder(model)(input_ids=every, use_cache=False, output_hidden_states=True).hidden_states[0]
        fc.weight.data = _map(stream[:, 0].detach(), table.detach()[greedy_next(model)])
        body["lm_head"].weight.data = model.get_output_embeddings().weight.detach().clone()  # type: ignore[union-attr]
    return head


def save_random_heads(model: PreTrainedModel, folder: Path) -> Path:
    """One folder of random heads of each kind: medusa, medusa_reduced, eagle1, eagle3."""
    reduced = int(model.config.vocab_size) // 4
    save_medusa(random_medusa(model), folder / "medusa")
    save_medusa(random_medusa(model, output="target", draft_vocab_size=reduced), folder / "medusa_reduced")
    save_eagle(random_eagle(model, 1), folder / "eagle1")
    save_eagle(random_eagle(model, 3, draft_vocab_size=reduced), folder / "eagle3")
    return folder
