"""The selector's loss: what it asks for, and where it leaves things alone."""

from __future__ import annotations

import torch

from cast_ray.drafters.checkpoint import DFlash2Config
from cast_ray.drafters.dflash2 import CandidateSelector
from cast_ray.training.loss import Targets
from cast_ray.training.selector import selector_loss


def test_it_learns_a_successor_that_the_network_alone_cannot_know() -> None:
    torch.manual_seed(0)
    selector = CandidateSelector(6, 20, DFlash2Config(2, 2, 4, 3))
    hidden = torch.randn(1, 6).expand(2, 6)  # the same state, two predecessors, two successors
    head, vocabulary = torch.randn(5, 6), torch.tensor([3, 4, 8, 11, 19])
    candidates = torch.tensor([[0, 2, 4], [0, 2, 4]])
    targets = Targets(torch.tensor([[2], [4]]), torch.ones(2, 1), torch.tensor([2, 4]), torch.ones(2))
    optimiser = torch.optim.Adam(selector.parameters(), lr=0.05)
    for _ in range(200):
        optimiser.zero_grad()
        loss, best, probabilities = selector_loss(
            selector, hidden, head, vocabulary, torch.tensor([5, 6]), candidates, targets
        )
        loss.backward()
        optimiser.step()
    assert best.tolist() == [2, 4]
    assert probabilities[0, 1] > 0.9
    assert probabilities[1, 2] > 0.9


def test_a_target_that_is_no_candidate_teaches_nothing() -> None:
    selector = CandidateSelector(6, 20, DFlash2Config(2, 2, 4, 3))
    hidden = torch.randn(1, 6, requires_grad=True)
    targets = Targets(torch.tensor([[1]]), torch.ones(1, 1), torch.tensor([1]), torch.ones(1))
    loss, _, _ = selector_loss(
        selector, hidden, torch.randn(5, 6), torch.arange(5), torch.tensor([0]), torch.tensor([[0, 2, 4]]), targets
    )
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert hidden.grad is not None
    assert not hidden.grad.any()
