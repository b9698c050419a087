"""The whole model over right-padded batches, every row with its own layout. Reference and training path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
from torch import nn
from torch.nn import functional as F

from morph.config import ModelConfig
from morph.errors import CorruptFile, InvalidRequest
from morph.model.attention import RMSNorm
from morph.model.block import Block
from morph.model.rope import rope_tables

Choose = Callable[[int, torch.Tensor], Sequence[bool]]
"""Called in block order with the block and its normed input `[batch, tokens, hidden]`; one choice per row."""

Layouts = torch.Tensor | Choose | None
"""Bool `[batch, blocks]` or `[blocks]`, True = attention; a function that chooses as the blocks run; None = base."""

HF_NAMES = {
    "input_norm": "input_layernorm",
    "attention": "self_attn",
    "post_norm": "post_attention_layernorm",
    "mlp": "mlp",
}


class TensorSource(Protocol):
    """Where weights come from, one tensor at a time."""

    def get(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The tensor of that name, dequantised to `dtype`."""
        ...

    def has(self, name: str) -> bool:
        """True when there is a tensor of that name."""
        ...


def source_name(parameter: str) -> str:
    """Name in the model's files of a parameter of `MorphModel`: Hugging Face's for the base, Morph's for the delta."""
    if parameter == "embedding.weight":
        return "model.embed_tokens.weight"
    if parameter == "norm.weight":
        return "model.norm.weight"
    if parameter == "head.weight":
        return "lm_head.weight"
    _, block, part, rest = parameter.split(".", 3)
    return f"model.layers.{block}.{HF_NAMES[part]}.{rest}" if part in HF_NAMES else parameter


class MorphModel(nn.Module):
    """Embedding, blocks, norm, head. The head is the embedding where they are tied."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config, kind) for kind in config.block_kinds)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = None
        if not config.tie_embeddings:
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._rope: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def layers(self) -> list[Block]:
        """The blocks in order."""
        return [cast(Block, block) for block in self.blocks]

    def forward(self, tokens: torch.Tensor, layouts: Layouts = None) -> torch.Tensor:
        """Logits `[batch, tokens, vocab]` of `tokens` `[batch, tokens]`, padded on the right with any id."""
        return self.logits(self.hidden_states(tokens, layouts))

    def hidden_states(
        self,
        tokens: torch.Tensor,
        layouts: Layouts = None,
        observe: Callable[[int, torch.Tensor], None] | None = None,
    ) -> torch.Tensor:
        """Normed output of the last block `[batch, tokens, hidden]`.

        Args:
            tokens: `[batch, tokens]`; everything is causal, so right padding changes no token before it.
            layouts: see `Layouts`.
            observe: called with each block's number and normed input, e.g. to take the gates' features.
        """
        rope = self.rope(tokens.shape[1], tokens.device)
        hidden = self.embedding(tokens).float()
        for index, block in enumerate(self.layers):
            normed = block.input_norm(hidden)
            if observe is not None:
                observe(index, normed)
            hidden = block.finish(hidden, block.mix(normed, self._bits(layouts, index, normed), rope))
        return self.norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Head over normed hidden states `[..., hidden]`."""
        return F.linear(hidden, self.embedding.weight) if self.head is None else self.head(hidden)

    def rope(self, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotary tables of the first `length` positions, kept between calls.

        Raises:
            InvalidRequest: more tokens than the model's context.
        """
        if length > self.config.max_context:
            raise InvalidRequest(f"{length} tokens exceed the model's context of {self.config.max_context}")
        if self._rope is None or self._rope[0].device != device:
            self._rope = rope_tables(self.config, self.config.max_context, device)
        return self._rope[0][:length], self._rope[1][:length]

    def _bits(self, layouts: Layouts, block: int, normed: torch.Tensor) -> list[bool]:
        batch = normed.shape[0]
        if layouts is None:
            return [self.config.block_kinds[block] != "ssm"] * batch
        if not isinstance(layouts, torch.Tensor):
            return [bool(bit) for bit in layouts(block, normed)]
        rows = layouts.expand(batch, -1) if layouts.dim() == 1 else layouts
        if rows.shape != (batch, self.config.num_blocks):
            raise InvalidRequest(
                f"layouts have shape {tuple(layouts.shape)}, want ({batch}, {self.config.num_blocks}): "
                "one row per sequence, one bit per block",
                "layout",
            )
        return [bool(bit) for bit in rows[:, block].tolist()]

    # ---- weights

    @classmethod
    def from_source(
        cls,
        source: TensorSource,
        config: ModelConfig,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> MorphModel:
        """Build on the device and read all weights, frozen."""
        with torch.device("meta"):
            model = cls(config)
        model = model.to_empty(device=device).to(dtype)
        model.load_source(source)
        return model.requires_grad_(False)

    @torch.no_grad()
    def load_source(self, source: TensorSource) -> None:
        """Read every parameter by its name in the model's files.

        Raises:
            CorruptFile: a tensor is missing or has another shape.
        """
        for name, parameter in self.named_parameters():
            stored = source_name(name)
            if not source.has(stored):
                raise CorruptFile(f"model has no tensor {stored!r}; restore the folder or convert it again")
            value = source.get(stored, parameter.dtype)
            if value.shape != parameter.shape:
                raise CorruptFile(
                    f"tensor {stored!r} has shape {tuple(value.shape)}, the config wants {tuple(parameter.shape)}"
                )
            parameter.copy_(value)

    def init_ssm_from_attention(self) -> None:
        """Start of a conversion: every ssm mixer becomes a copy of its block's attention.

        Raises:
            InvalidRequest: a block has an ssm mixer but no attention to start from.
        """
        for index, block in enumerate(self.layers):
            if block.ssm is None:
                continue
            if block.attention is None:
                raise InvalidRequest(f"block {index} has no attention to start its ssm from; load ssm weights instead")
            block.ssm.init_from_attention(block.attention)
