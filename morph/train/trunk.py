"""The forward pass of training: the frozen base as plain functions over fused weights, the mixers beside it.

It computes what `MorphModel` does, in a form that is fast to train with: frozen projections that share an input are
one matrix, everything between two matrix products is one function for the compiler, and only the mixers' parameters
(float32, cast to the base's dtype on the way) can get gradients, so no weight gradient is formed for the base.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from morph.config import ModelConfig
from morph.errors import InvalidRequest
from morph.kernels.causal_conv import causal_conv, has_causal_conv
from morph.kernels.flash_window import flash_window, has_flash_window
from morph.kernels.gated_delta import chunk_gated_delta_rule
from morph.model.attention import Rope
from morph.model.model import MorphModel
from morph.model.ssm.gated_delta_net import GatedDeltaNet, causal_depthwise, mixer_output, window_attention
from morph.train.kl import kl_and_gradient
from morph.train.packed import normalised_heads, project, rotate_heads, rotated_heads, spread_heads


@dataclass(frozen=True)
class FrozenBlock:
    """Weights of one block of the base; q, k, v and gate, up are concatenated."""

    input_norm: torch.Tensor
    qkv: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `morph.model.attention.RMSNorm`."""
    x = x.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return weight * x.to(weight.dtype)


def attend(
    x: torch.Tensor,
    rope: Rope,
    qkv: torch.Tensor,
    out: torch.Tensor,
    norms: tuple[torch.Tensor | None, torch.Tensor | None],
    heads: tuple[int, int, int],
    eps: float,
) -> torch.Tensor:
    """Causal attention with its output projection, `[batch, tokens, hidden]`.

    Args:
        heads: query heads, kv heads, width of a head.
    """
    query, keys, width = heads
    packed = F.linear(x, qkv).unflatten(-1, (-1, width))
    if norms[0] is not None and norms[1] is not None:
        q, k, v = packed.split([query, keys, keys], dim=-2)
        packed = torch.cat([rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps), v], dim=-2)
    q, k, v = rotate_heads(packed, rope, query + keys).split([query, keys, keys], dim=-2)
    if not x.is_cuda:  # the CUDA kernels read each kv head where it lies
        k, v = (t.repeat_interleave(query // keys, dim=2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=x.is_cuda)
    return F.linear(mixed.transpose(1, 2).flatten(2), out)


def finish(
    hidden: torch.Tensor,
    mixed: torch.Tensor,
    post_norm: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    next_norm: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Residual, MLP, residual, and the norm that comes next: float32 stream and normed input of the next block."""
    hidden = hidden + mixed.float()
    gate, up = F.linear(rms_norm(hidden, post_norm, eps), gate_up).chunk(2, dim=-1)
    hidden = hidden + F.linear(F.silu(gate) * up, down).float()
    return hidden, rms_norm(hidden, next_norm, eps)


def squared_error_ratio(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Per sequence: squared error over squared norm of the target, `[batch]` from `[batch, tokens, hidden]`.

    Each sequence has its own denominator, so that the mean over sequences is the same however a batch is split.
    """
    error = (y.float() - target.float()).square().sum((1, 2))
    return error / target.float().square().sum((1, 2)).clamp_min(1e-12)


def token_error_ratio(hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean over all tokens of r / (1 + r), r = squared error over squared norm; `target` broadcasts over layouts.

    Per token, because a few tokens of the stream are hundreds of times larger than all others; bounded, because a
    model without attention may grow such a token where the base has none, and that one must not be all of the loss.
    """
    target = target.float()
    error = (hidden - target).square().sum(-1)
    ratio = error / target.square().sum(-1).clamp_min(1e-12)
    return (ratio / (1 + ratio)).mean()


def _joined(*layers: nn.Linear) -> torch.Tensor:
    """Weights of several layers as one matrix, of which the layers become views: nothing is stored twice."""
    joined = torch.cat([layer.weight.detach() for layer in layers])
    for layer, part in zip(layers, joined.split([layer.weight.shape[0] for layer in layers]), strict=True):
        layer.weight.data = part
    return joined


class Trunk:
    """Base and mixers of a model for training, and for measurements of whole sequences.

    Args:
        model: base in the compute dtype and frozen; mixers float32. Every block needs its attention, the teacher.
        compiled: compile the functions between the kernels with torch.compile.
        layouts: shape whose static blocks bind the layouts; None = the model's own.
        teacher: every block needs its attention; False takes blocks as they are, for measurements.

    Raises:
        InvalidRequest: a block has no attention.
    """

    def __init__(
        self,
        model: MorphModel,
        compiled: bool = False,
        layouts: ModelConfig | None = None,
        teacher: bool = True,
    ) -> None:
        self.teaches = teacher
        self.model, self.config = model, model.config
        self.layout_config = layouts or model.config
        self.device, self.dtype = model.embedding.weight.device, model.embedding.weight.dtype
        self.eps = self.config.rms_norm_eps
        self.blocks = [self._frozen(index) for index in range(self.config.num_blocks)]
        if compiled:
            # Shapes: with and without gradients, per length of the schedule, per number of layouts on a path.
            torch._dynamo.config.recompile_limit = 64
        self.mixers = [block.ssm for block in model.layers]
        wrap: Callable[[Any], Any] = torch.compile if compiled else lambda function: function
        self._attend, self._finish, self._norm = wrap(attend), wrap(finish), wrap(rms_norm)
        self._project, self._heads, self._output = wrap(project), wrap(normalised_heads), wrap(mixer_output)
        self._window, self._rotated = wrap(window_attention), wrap(rotated_heads)
        self._conv = causal_conv if has_causal_conv(self.device) else wrap(causal_depthwise)
        self._flash_window = has_flash_window(self.device, self.dtype)
        self.compiled = compiled
        self.sequence_error, self.token_error = wrap(squared_error_ratio), wrap(token_error_ratio)
        self.kl_core = wrap(kl_and_gradient)

    def _frozen(self, index: int) -> FrozenBlock:
        block = self.model.layers[index]
        attention = block.attention
        if attention is None and self.teaches:
            raise InvalidRequest(f"block {index} has no attention to learn from; name the base model as the teacher")
        qkv = q_norm = k_norm = out = None
        if attention is not None:
            qkv = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
            out = attention.o_proj.weight
            if self.config.qk_norm:
                q_norm, k_norm = attention.q_norm.weight, attention.k_norm.weight
        gate_up = _joined(block.mlp.gate_proj, block.mlp.up_proj)
        return FrozenBlock(
            block.input_norm.weight, qkv, q_norm, k_norm, out, block.post_norm.weight, gate_up,
            block.mlp.down_proj.weight,
        )  # fmt: skip

    @property
    def head(self) -> torch.Tensor:
        """The frozen output head `[vocab, hidden]`."""
        return self.model.embedding.weight if self.model.head is None else self.model.head.weight

    def embed(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stream and normed input of block 0, `[batch, tokens, hidden]`."""
        hidden = F.embedding(tokens, self.model.embedding.weight).float()
        return hidden, self._norm(hidden, self.blocks[0].input_norm, self.eps)

    def rope(self, length: int) -> Rope:
        """Rotary tables of the first `length` positions."""
        cos, sin = self.model.rope(length, self.device)
        if self.compiled:
            for table in (cos, sin):
                torch._dynamo.maybe_mark_dynamic(table, 0)
        return cos, sin

    def _any_size(self, x: torch.Tensor) -> None:
        """Compile once for all numbers of rows and all lengths: both change from block to block and in the schedule."""
        if self.compiled:
            torch._dynamo.maybe_mark_dynamic(x, 0)
            torch._dynamo.maybe_mark_dynamic(x, 1)

    def attention(self, index: int, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        """The base's mixer of a block: `[batch, tokens, hidden]`."""
        block, config = self.blocks[index], self.config
        assert block.qkv is not None, "a layout asks for the attention of a block that has none"
        self._any_size(x)
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        out: torch.Tensor = self._attend(x, rope, block.qkv, block.out, (block.q_norm, block.k_norm), heads, self.eps)
        return out

    def ssm(self, index: int, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        """The trained mixer of a block: `[batch, tokens, hidden]`."""
        mixer = self.mixers[index]
        assert mixer is not None, "a layout asks for the ssm of a block that has none"
        self._any_size(x)
        qkv, conv, ab, ab_bias = mixer.input_weights()
        projected, logits = self._project(x, (qkv, ab, ab_bias))
        self._any_size(projected)
        self._any_size(logits)
        convolved = self._conv(projected, conv)
        self._any_size(convolved)
        heads, g, beta = self._heads(convolved, logits, mixer.sizes)
        recurrent, _ = chunk_gated_delta_rule(*spread_heads(heads, mixer.sizes), g, beta)
        window = self._attend_near(projected, rope, mixer) if mixer.ssm.window else None
        self._any_size(recurrent)
        out: torch.Tensor = self._output(x, recurrent, window, mixer.output_weights())
        return out

    def _attend_near(self, projected: torch.Tensor, rope: Rope, mixer: GatedDeltaNet) -> torch.Tensor:
        """Window attention `[batch, tokens, heads, head_dim]` from projected q, k, v."""
        sizes, window = mixer.sizes, mixer.ssm.window
        if self._flash_window:
            counts = [width // sizes.head_dim for width in (sizes.q, sizes.kv, sizes.kv)]
            q, k, v = self._rotated(projected, rope, sizes).split(counts, dim=-2)
            near = flash_window(q, k, v, window)
        else:
            near = self._window(projected, rope, sizes, window)
        self._any_size(near)
        return near

    def finish(self, index: int, hidden: torch.Tensor, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rest of a block; returns the stream and the normed input of the next block, or of the head."""
        block = self.blocks[index]
        last = index + 1 == len(self.blocks)
        following = self.model.norm.weight if last else self.blocks[index + 1].input_norm
        # Flat rows: one compiled shape for the base and for any number of layouts of as many tokens.
        rows = [t.reshape(-1, t.shape[-1]) for t in (hidden, mixed)]
        if self.compiled:
            for tensor in rows:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        stream, normed = self._finish(*rows, block.post_norm, block.gate_up, block.down, following, self.eps)
        return stream.view(hidden.shape), normed.view(hidden.shape)

    @torch.no_grad()
    def teacher(self, tokens: torch.Tensor, keep: Sequence[int] = ()) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Normed output of the base `[batch, tokens, hidden]` and its stream after the blocks `keep`."""
        rope = self.rope(tokens.shape[1])
        hidden, normed = self.embed(tokens)
        kept = {}
        for index in range(len(self.blocks)):
            hidden, normed = self.finish(index, hidden, self.attention(index, normed, rope))
            if index in keep:
                kept[index] = hidden.to(self.dtype)
        return normed, kept

    def student(
        self,
        tokens: torch.Tensor,
        layouts: Sequence[Sequence[bool]],
        observe: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Normed output `[layouts, batch, tokens, hidden]` of the same tokens under several layouts.

        Args:
            layouts: one choice per block each, True = attention.
            observe: called with each block's number and stream after it, `[layouts, batch, tokens, hidden]`.
        """
        count, rope = len(layouts), self.rope(tokens.shape[1])
        hidden, normed = (t.expand(count, *t.shape) for t in self.embed(tokens))
        if torch.is_grad_enabled():
            # So that block 0 is like all others, which spares the compiler a second version of everything.
            hidden, normed = hidden.detach().requires_grad_(), normed.detach().requires_grad_()
        for index in range(len(self.blocks)):
            bits = [bool(layout[index]) for layout in layouts]
            hidden, normed = self.finish(index, hidden, self._mix(index, normed, bits, rope))
            if observe is not None:
                observe(index, hidden)
        return normed

    def _mix(self, index: int, x: torch.Tensor, bits: Sequence[bool], rope: Rope) -> torch.Tensor:
        """Mixer outputs of `x` `[layouts, batch, tokens, hidden]`, each layout by its own path."""
        if all(bits):
            return self.attention(index, x.flatten(0, 1), rope).view(x.shape)
        if not any(bits):
            return self.ssm(index, x.flatten(0, 1), rope).view(x.shape)
        # Unbound and stacked, not indexed: the backward of both is a plain copy.
        rows, batch = x.unbind(0), x.shape[1]
        parts: list[torch.Tensor | None] = [None] * len(bits)
        for path, wanted in ((self.attention, True), (self.ssm, False)):
            chosen = [row for row, bit in enumerate(bits) if bit == wanted]
            mixed = path(index, torch.cat([rows[row] for row in chosen]), rope)
            for row, part in zip(chosen, mixed.split(batch), strict=True):
                parts[row] = part
        return torch.stack([part for part in parts if part is not None])
