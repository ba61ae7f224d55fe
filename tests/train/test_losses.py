"""The losses by hand: sums over every token, whole and cut to the top, in one piece and in many."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.train import losses
from slipstream.train.losses import DISTANCES, IGNORE, Law, in_pieces, sft, soft_cross_entropy

P = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.1, 0.1, 0.7]])
Q = torch.tensor([[0.25, 0.25, 0.25, 0.25], [0.4, 0.3, 0.2, 0.1]])


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def test_distances_are_their_formulas() -> None:
    law = Law(P.log())
    for name, row in (
        ("forward_kl", kl),
        ("tv", lambda p, q: 0.5 * sum(abs(a - b) for a, b in zip(p, q, strict=True))),
    ):
        expected = [row(p, q) for p, q in zip(P.tolist(), Q.tolist(), strict=True)]
        found = DISTANCES[name](Q.log(), law, 1.0)  # type: ignore[index]
        assert found.tolist() == pytest.approx(expected, abs=1e-6), name
    back = DISTANCES["reverse_kl"](P.clamp(min=1e-9).log(), Law(Q.log()), 1.0)
    assert back.tolist() == pytest.approx(
        [kl(p, q) for p, q in zip(P.tolist(), Q.tolist(), strict=True)], abs=1e-5
    )
    entropy = [-sum(a * math.log(a) for a in p if a) for p in P.tolist()]
    forward = DISTANCES["forward_kl"](Q.log(), law, 1.0)
    assert soft_cross_entropy(Q.log(), law).tolist() == pytest.approx(
        [f + e for f, e in zip(forward.tolist(), entropy, strict=True)], abs=1e-6
    )


def test_temperature_flattens_both_laws() -> None:
    for distance in DISTANCES.values():
        logits, law = torch.randn(3, 5), torch.randn(3, 5)
        found = distance(logits, Law(law), 2.0)
        assert torch.allclose(found, distance(logits / 2, Law(law / 2), 1.0))


def test_top_logits_are_the_law_cut_to_them() -> None:
    logits, target = torch.randn(4, 6), torch.randn(4, 6)
    values, ids = target.topk(6)
    for name in ("forward_kl", "tv"):
        whole = DISTANCES[name](logits, Law(target), 1.0)  # type: ignore[index]
        assert torch.allclose(DISTANCES[name](logits, Law(values, ids), 1.0), whole, atol=1e-6)  # type: ignore[index]
    p = torch.zeros(4, 6).scatter(1, ids[:, :2], values[:, :2].softmax(-1))
    found = DISTANCES["tv"](logits, Law(values[:, :2], ids[:, :2]), 1.0)
    assert torch.allclose(found, 0.5 * (p - logits.softmax(-1)).abs().sum(-1), atol=1e-6)


@pytest.mark.parametrize("name", list(DISTANCES))
def test_every_distance_is_smallest_at_the_law_itself(name: str) -> None:
    """Gradient descent ends at p, and gradients are finite where p is 0."""
    target = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    logits = torch.zeros(1, 4, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.02)
    for _ in range(600):
        optimizer.zero_grad()
        DISTANCES[name](logits, Law(target), 1.0).sum().backward()  # type: ignore[index]
        optimizer.step()
    assert torch.allclose(logits.softmax(-1), target.softmax(-1), atol=0.02)
    if name != "reverse_kl":
        DISTANCES[name](logits, Law(P[:1].log()), 1.0).sum().backward()  # type: ignore[index]
        assert logits.grad is not None and logits.grad.isfinite().all()


def test_ignored_labels_cost_nothing() -> None:
    logits = torch.randn(3, 5)
    found = sft(logits, torch.tensor([1, IGNORE, 4]))
    assert found[1] == 0 and torch.allclose(found[0], -logits.log_softmax(-1)[0, 1])


def test_pieces_give_the_same_loss_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(5, 7, requires_grad=True)
    x, y = torch.randn(20, 7), torch.randint(0, 5, (20,))

    def compute(states: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return sft(states @ weight.T, wanted).sum()

    in_pieces(compute, 5, x, y).backward()
    whole, weight.grad = weight.grad, None
    monkeypatch.setattr(losses, "PIECE", 15)
    in_pieces(compute, 5, x, y).backward()
    assert whole is not None and weight.grad is not None
    torch.testing.assert_close(weight.grad, whole)
