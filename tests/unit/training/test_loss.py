"""The training loss against PyTorch's own, and the counts of what would have been accepted."""

from __future__ import annotations

import pytest
import torch

from cast_ray.training import loss as loss_module
from cast_ray.training.loss import accepted_by_depth, depth_weights, frozen_head_loss, mix_targets


@pytest.mark.parametrize("slice_rows", [1, 7, 1000])
def test_loss_and_gradient_are_those_of_cross_entropy(slice_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loss_module.SLICE_BYTES, "cpu", slice_rows * 4 * 13)
    torch.manual_seed(0)
    head = torch.randn(13, 5)
    labels = torch.randint(13, (20,))
    soft_ids = torch.stack([torch.randperm(13)[:3] for _ in range(20)])
    soft_probs = torch.rand(20, 3)
    weights = torch.rand(20)
    hidden = torch.randn(20, 5, requires_grad=True)
    targets = mix_targets(labels, soft_ids, soft_probs, 0.7, weights)
    ours, best, mass = frozen_head_loss(hidden, head, targets, top=2)
    (3 * ours).backward()
    gradient, hidden.grad = hidden.grad, None

    wanted = torch.zeros(20, 13).scatter_add(1, soft_ids, 0.7 * soft_probs / soft_probs.sum(1, keepdim=True))
    wanted = wanted.scatter_add(1, labels[:, None], torch.full((20, 1), 0.3))
    logits = hidden @ head.T
    theirs = (weights * torch.nn.functional.cross_entropy(logits, wanted, reduction="none")).sum()
    (3 * theirs).backward()
    torch.testing.assert_close(ours, theirs.detach())
    torch.testing.assert_close(gradient, hidden.grad)
    assert torch.equal(best, logits.topk(2).indices)
    torch.testing.assert_close(mass, logits.softmax(1).gather(1, labels[:, None])[:, 0].detach())


def test_tokens_outside_the_draft_vocabulary_ask_for_nothing() -> None:
    labels = torch.tensor([-1, 2, -1])
    soft_ids = torch.tensor([[0, -1], [-1, -1], [-1, -1]])
    soft_probs = torch.tensor([[0.2, 0.6], [0.5, 0.1], [0.5, 0.1]])
    targets = mix_targets(labels, soft_ids, soft_probs, 0.75, torch.ones(3))
    assert targets.probs.tolist() == [[0.0, 0.75, 0.0], [0.25, 0.0, 0.0], [0.0, 0.0, 0.0]]
    hidden = torch.randn(3, 4, requires_grad=True)
    loss, _, _ = frozen_head_loss(hidden, torch.randn(6, 4), targets)
    loss.backward()
    assert hidden.grad is not None
    assert not hidden.grad[2].any()


def test_a_depth_is_accepted_only_behind_the_ones_before_it() -> None:
    right = torch.tensor([[True, False, True], [True, True, True]])
    real = torch.tensor([[True, True, True], [True, True, False]])
    accepted, tried = accepted_by_depth(right, real)
    assert accepted.tolist() == [2, 1, 0]
    assert tried.tolist() == [2, 2, 1]


def test_weights_fall_with_depth() -> None:
    weights = depth_weights(3, 2.0, torch.device("cpu"))
    torch.testing.assert_close(weights, torch.tensor([1.0, 0.60653066, 0.36787944]))
