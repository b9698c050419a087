"""One step of each stage on one device: losses, with gradients added to the parameters' `.grad`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from morph.train.kl import chunked_kl
from morph.train.trunk import Trunk


def align(trunk: Trunk, tokens: torch.Tensor, share: float, train: bool = True) -> torch.Tensor:
    """Alignment: every mixer on the base's own input of its block, against the base's attention output.

    Each block's gradient is formed at once and its activations freed, so memory does not grow with the depth. The
    base's path has no backward at all.

    Args:
        tokens: `[batch, tokens]`.
        share: of these rows in the whole step; gradients of all calls add up to that of the mean.

    Returns:
        Relative squared error per block, mean over the rows, float32 `[blocks]`; 0 where a block has no ssm.
    """
    losses = torch.zeros(trunk.config.num_blocks, device=trunk.device)
    trained = sum(mixer is not None for mixer in trunk.mixers)
    rope = trunk.rope(tokens.shape[1])
    with torch.no_grad():
        hidden, normed = trunk.embed(tokens)
        for index, mixer in enumerate(trunk.mixers):
            target = trunk.attention(index, normed, rope)
            if mixer is not None:
                with torch.set_grad_enabled(train):
                    loss = trunk.sequence_error(trunk.ssm(index, normed, rope), target).mean()
                    if train:
                        (loss * (share / trained)).backward()
                losses[index] = loss.detach()
            hidden, normed = trunk.finish(index, hidden, target)
    return losses


@dataclass
class DistillLoss:
    """Figures of one call: KL per layout in nats per token `[layouts]`, and the hidden-state term (0 when off)."""

    kl: torch.Tensor
    hidden: torch.Tensor


def distill(
    trunk: Trunk,
    tokens: torch.Tensor,
    weights: torch.Tensor | None,
    layouts: Sequence[Sequence[bool]],
    share: float,
    chunk: int,
    hidden_weight: float = 0.0,
    hidden_every: int = 1,
    train: bool = True,
) -> DistillLoss:
    """Distillation: KL(base ‖ model) of the tokens under each layout; the layouts share one run of the base.

    Args:
        tokens: `[batch, tokens]`.
        weights: per token, mean 1 in each row, `[batch, tokens]`; None = all alike.
        share: of these rows in the whole step.
        chunk: tokens whose logits exist at a time, see `chunked_kl`.
        hidden_weight: of the relative squared error of the stream after every `hidden_every`-th block.
    """
    blocks = trunk.config.num_blocks
    kept = range(hidden_every - 1, blocks, hidden_every) if hidden_weight else ()
    teacher, streams = trunk.teacher(tokens, kept)
    errors: list[torch.Tensor] = []

    def observe(index: int, hidden: torch.Tensor) -> None:
        if index in streams:
            errors.append(trunk.token_error(hidden, streams.pop(index)))

    with torch.set_grad_enabled(train):
        student = trunk.student(tokens, layouts, observe if hidden_weight else None)
        flat = student.flatten(1, 2)
        kl = chunked_kl(flat, teacher.flatten(0, 1), trunk.head, chunk, trunk.kl_core)
        if weights is not None:
            kl = kl * weights.flatten()
        per_layout = kl.mean(1)
        loss = per_layout.mean()
        stream = torch.stack(errors).mean() if errors else loss.new_zeros(())
        if hidden_weight:
            loss = loss + hidden_weight * stream
        if train and loss.requires_grad:
            (loss * share).backward()
    return DistillLoss(per_layout.detach(), stream.detach())
