"""KL(base ‖ model) over the vocabulary, in chunks of tokens, for a frozen head.

Logits are the largest tensors of distillation: at 49152 entries one token's are 192 KiB in float32. Here they live for
one chunk only. The gradient with respect to the hidden states is formed in the same pass (softmax minus softmax, times
the head), so that backward is one multiplication; the head is frozen and has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

Core = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def kl_and_gradient(student: torch.Tensor, teacher: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KL per token, float32 `[layouts, tokens]`, and its gradient with respect to the student's logits.

    Args:
        student: logits `[layouts, tokens, vocab]`. teacher: `[tokens, vocab]`.
    """
    log_p = F.log_softmax(teacher.float(), dim=-1)
    p = log_p.exp()
    log_q = F.log_softmax(student.float(), dim=-1)
    loss = (p * (log_p - log_q)).sum(-1)
    return loss, (log_q.exp() - p).to(student.dtype)


class _ChunkedKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        student: torch.Tensor,
        teacher: torch.Tensor,
        head: torch.Tensor,
        chunk: int,
        core: Core,
    ) -> torch.Tensor:
        layouts, tokens, _ = student.shape
        losses = torch.empty(layouts, tokens, dtype=torch.float32, device=student.device)
        gradient = torch.empty_like(student) if ctx.needs_input_grad[0] else None
        for begin in range(0, tokens, chunk):
            part = slice(begin, begin + chunk)
            logits = F.linear(student[:, part], head)
            losses[:, part], slope = core(logits, F.linear(teacher[part], head))
            del logits
            if gradient is not None:
                gradient[:, part] = slope @ head
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0].unsqueeze(-1).to(gradient.dtype), None, None, None, None


def chunked_kl(
    student: torch.Tensor,
    teacher: torch.Tensor,
    head: torch.Tensor,
    chunk: int,
    core: Core = kl_and_gradient,
) -> torch.Tensor:
    """KL(teacher ‖ student) per token in nats, float32 `[layouts, tokens]`; differentiable in `student` alone.

    Args:
        student: normed hidden states `[layouts, tokens, hidden]`. teacher: the base's, `[tokens, hidden]`.
        head: frozen `[vocab, hidden]`, in the dtype of the hidden states.
        chunk: tokens whose logits exist at the same time (times `layouts` + 1).
        core: `kl_and_gradient`, or a compiled version of it.
    """
    out: torch.Tensor = _ChunkedKL.apply(student, teacher, head, chunk, core)
    return out
