"""What the engine asks of a backend: `Kernels`, `PackedLinear`, `SSMParams`.

Activations are float32 and row-major. Weights, keys and values are in the backend's dtype, recurrent states in
float32. Memory is the unit-page pool: `storage` uint8 `[units, head_dim^2 * 4]`, where a unit is one recurrent state
`[d_k, d_v]` float32 or one page of one kv head: K then V, each `[page_tokens, head_dim]`,
page_tokens = 2 * head_dim / itemsize. A table row of an attention block is `[kv_heads, max_pages]` unit numbers,
flattened; of an ssm block the state units, then the window ring `[kv_heads, ring_pages]`, where token t lies at ring
position t % window.

Results of one row never depend on the other rows of the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from morph.config import ModelConfig


def page_tokens(head_dim: int, dtype: torch.dtype) -> int:
    """Tokens of one kv head's keys and values that fill one unit of head_dim² x 4 bytes."""
    return 2 * head_dim // dtype.itemsize


@dataclass(frozen=True, eq=False)
class SSMParams:
    """The small parameters of one block's Gated DeltaNet mixer, float32.

    Attributes:
        conv_weight: `[qkv, width]`, the last tap meets the current token.
        ab_bias: `[2 * state_heads]`, decay logits then write strength logits.
        gain: `[heads]`.
        mix: `[heads]`, logit of the window's share; None when window is 0.
        cos, sin: `[max_context, head_dim / 2]`, used by the window.
        window: tokens of sliding-window attention, the current one included; 0 = none.
        heads, kv_heads, state_heads, head_dim: state_heads is heads or kv_heads.
    """

    conv_weight: torch.Tensor
    ab_bias: torch.Tensor
    gain: torch.Tensor
    mix: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    window: int
    heads: int
    kv_heads: int
    state_heads: int
    head_dim: int

    @property
    def qkv_size(self) -> int:
        """Columns of q, k and v."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        conv_weight: torch.Tensor,
        ab_bias: torch.Tensor,
        gain: torch.Tensor,
        mix: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> SSMParams:
        """Parameters in the shapes of `config`; tensors become float32 and contiguous.

        Raises:
            ValueError: a tensor's shape is not what the config says.
        """
        assert config.ssm is not None
        want = {
            "conv.weight": (conv_weight, (config.qkv_size, config.ssm.conv_width)),
            "ab.bias": (ab_bias, (2 * config.num_state_heads,)),
            "gain": (gain, (config.num_heads,)),
        }
        if config.ssm.window:
            if mix is None:
                raise ValueError(f"ssm.window is {config.ssm.window} but the model has no ssm.mix; convert it again")
            want["mix"] = (mix, (config.num_heads,))
        for name, (tensor, shape) in want.items():
            if tuple(tensor.shape) != shape:
                raise ValueError(f"ssm {name} has shape {tuple(tensor.shape)}, the config says {shape}")

        def small(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(torch.float32).contiguous()

        return cls(
            conv_weight=small(conv_weight),
            ab_bias=small(ab_bias),
            gain=small(gain),
            mix=small(mix) if mix is not None and config.ssm.window else None,
            cos=small(cos),
            sin=small(sin),
            window=config.ssm.window,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            state_heads=config.num_state_heads,
            head_dim=config.head_dim,
        )


class PackedLinear(Protocol):
    """A projection's weight in the backend's own order: the only copy in memory.

    Attributes:
        n, k: output and input features.
        dtype: of the weight.
    """

    @property
    def n(self) -> int: ...

    @property
    def k(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight (an embedding lookup): int `[count]` -> float32 `[count, k]`."""
        ...

    def unpack(self) -> torch.Tensor:
        """The weight `[n, k]` in its dtype, a copy."""
        ...


class PathRows(Protocol):
    """Rows of a batch that take one path: their indices (None = all rows), int32 slots, and how many they are."""

    rows: torch.Tensor | None
    slots: torch.Tensor
    count: int


class Decoder(Protocol):
    """A backend's own way through a whole decode step: the same operations and the same bits, in one call.

    Attributes:
        embeds: `run` looks the embeddings up itself: it gets token ids int64 `[rows]` in place of `hidden`.
    """

    embeds: bool

    def prepare(self, paths: Sequence[tuple[PathRows | None, PathRows | None]]) -> Any:
        """Row lists of a batch, (attention, ssm) per block, in the backend's form; valid while they are."""
        ...

    def warm_up(self, sizes: Iterable[int]) -> None:
        """Make ready for batches of these sizes, so that no request waits for it."""
        ...

    def run(self, prepared: Any, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """One step: logits float32 `[rows, vocab]`.

        Args:
            prepared: from `prepare`.
            hidden: float32 `[rows, hidden]`, embeddings of the last tokens; overwritten.
            positions, slots: int32 `[rows]`.
        """
        ...


class Kernels(Protocol):
    """Every operation of the forward pass. `out` tensors are contiguous and may be None = allocate.

    Attributes:
        name: `torch`, `native` or `cuda`.
        device, dtype: where, and of weights, keys and values.
        activations: dtype of what passes between operations; the residual stream is float32 in any case.
        num_kv_heads: of the model that the backend serves.
    """

    name: str
    device: torch.device
    dtype: torch.dtype
    activations: torch.dtype
    num_kv_heads: int

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """Weight `[n, k]` and bias `[n]` for `linear`; the weight is rounded to the backend's dtype."""
        ...

    def linear(self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor | None = None) -> torch.Tensor:
        """x `[rows, k]` -> `[rows, n]`. x may be a view with a row stride."""
        ...

    def prefill_linear(self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor | None = None) -> torch.Tensor:
        """`linear` for rows of prompts. May round operands where that is faster, no coarser than bfloat16 does."""
        ...

    def fuses_mlp(self, gate_up: PackedLinear, down: PackedLinear) -> bool:
        """True when `prefill_mlp` is there for these weights."""
        ...

    def prefill_mlp(
        self, x: torch.Tensor, gate_up: PackedLinear, down: PackedLinear, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """SwiGLU of many rows without storing what lies between: float32 `[M, d]` to `[M, n]`."""
        ...

    def decoder(
        self,
        config: ModelConfig,
        weights: Any,
        memory: Any,
        cos: torch.Tensor,
        sin: torch.Tensor,
        sums: torch.Tensor,
    ) -> Decoder | None:
        """Decode steps in one call, or None where the backend has no such thing.

        Args:
            weights: `ModelWeights`, packed by this backend. memory: `PageTables` of the model's requests.
            cos, sin: float32 `[max_context, head_dim / 2]`.
            sums: float64 `[slots, blocks, hidden]`, running sums of the normed inputs, kept where gates read them.
        """
        ...

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dim, `[rows, d]`."""
        ...

    def add_rms_norm_(
        self,
        h: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """h += delta in place, then `rms_norm(h)`. `out` may be `delta` or any other buffer but `h`."""
        ...

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """`[rows, 2 i]` -> `[rows, i]`: silu(first half) * second half."""
        ...

    def gate_silu_mul_(self, o: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """o *= silu(z), both `[rows, n]`, in place."""
        ...

    def sum_tokens_(self, acc: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """acc float64 `[d]` += x `[rows, d]`, row after row, so that any split of the rows gives the same bits."""
        ...

    def rope_write_kv_(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        storage: torch.Tensor,
        table: torch.Tensor,
        slots: torch.Tensor,
        max_pages: int,
    ) -> None:
        """QK-norm (if any) and RoPE on q and k in place; k and v are rounded and written to their pages.

        Args:
            qkv: `[rows, (heads + 2 kv_heads) * head_dim]`, a view with a row stride is fine.
            cos, sin: `[max_context, head_dim / 2]`, rotate-half convention.
            positions, slots: int32 `[rows]`, token position and table row of each row.
            q_norm, k_norm: `[head_dim]` or None.
            table: int32 `[slots, width]`, a view of one block is fine.
        """
        ...

    def prefill_attention(
        self,
        q: torch.Tensor,
        storage: torch.Tensor,
        table_row: torch.Tensor,
        max_pages: int,
        start: int,
        scale: float,
        out: torch.Tensor | None = None,
        exact: bool = False,
    ) -> torch.Tensor:
        """Causal attention of one sequence: row i sits at position start + i and attends to keys 0…start + i.

        Args:
            q: `[rows, heads * head_dim]` rotated, a view with a row stride is fine.
            table_row: int32 `[width]`.
            exact: in float32; else operands may be rounded where that is faster, see `prefill_linear`.

        Returns:
            `[rows, heads * head_dim]`.
        """
        ...

    def decode_attention(
        self,
        q: torch.Tensor,
        storage: torch.Tensor,
        table: torch.Tensor,
        max_pages: int,
        slots: torch.Tensor,
        lens: torch.Tensor,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One query per request over its first `lens` keys (int32 `[rows]`, current token included)."""
        ...

    def gdn_prefill(
        self,
        x_in: torch.Tensor,
        params: SSMParams,
        storage: torch.Tensor,
        table_row: torch.Tensor,
        conv_tail: torch.Tensor,
        has_state: bool,
        start: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Gated DeltaNet over the tokens start…start + rows - 1 of one sequence, before the output gate.

        Args:
            x_in: `[rows, w]`, columns q, k, v | decay logits, write strength logits | anything.
            table_row: int32 `[width]`: state units, then the ring. States, ring and tail are updated.
            conv_tail: `[conv_width - 1, qkv]`, updated in place.
            has_state: False = the sequence starts here: states, ring and tail hold nothing, whatever their bytes.

        Returns:
            `[rows, heads * head_dim]`.
        """
        ...

    def gdn_decode(
        self,
        x_in: torch.Tensor,
        params: SSMParams,
        storage: torch.Tensor,
        table: torch.Tensor,
        slots: torch.Tensor,
        conv_tails: torch.Tensor,
        positions: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One token per request: `[rows, w]` -> `[rows, heads * head_dim]`; states, ring and tails are updated.

        Args:
            table: int32 `[slots, width]` and conv_tails `[slots, conv_width - 1, qkv]`, views of one block.
            slots, positions: int32 `[rows]`. Slots are distinct.
        """
        ...
