"""KL in chunks equals KL over all logits at once, gradient included, and forms nothing for the frozen head."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from morph.train.kl import chunked_kl


@pytest.mark.parametrize("chunk", [1, 7, 20, 64])
def test_chunked_kl_equals_the_plain_one_with_its_gradient(chunk: int) -> None:
    rng = torch.Generator().manual_seed(chunk)
    student = torch.randn(3, 20, 16, generator=rng, dtype=torch.float64).requires_grad_()
    teacher, head = torch.randn(20, 16, generator=rng).double(), torch.randn(50, 16, generator=rng).double()
    weights = torch.rand(20, generator=rng).double()

    plain = F.kl_div(
        F.log_softmax(student @ head.T, -1), F.log_softmax(teacher @ head.T, -1), log_target=True, reduction="none"
    ).sum(-1)
    (want,) = torch.autograd.grad((plain * weights).mean(), student)
    got = chunked_kl(student, teacher, head, chunk)
    (gradient,) = torch.autograd.grad((got * weights).mean(), student)
    # The softmax itself is float32 in both halves of the chunked one.
    torch.testing.assert_close(got.double(), plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, want, atol=1e-7, rtol=1e-4)


def test_equal_models_have_no_loss_and_the_head_gets_no_gradient() -> None:
    hidden, head = torch.randn(1, 5, 8), torch.randn(30, 8).requires_grad_()
    student = hidden.clone().requires_grad_()
    loss = chunked_kl(student, hidden[0], head, 2).sum()
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-5) and head.grad is None
    assert student.grad is not None and student.grad.abs().max() < 1e-5


def test_without_gradients_none_are_formed() -> None:
    with torch.no_grad():
        loss = chunked_kl(torch.randn(2, 6, 8), torch.randn(6, 8), torch.randn(30, 8), 4)
    assert not loss.requires_grad and (loss > 0).all()
