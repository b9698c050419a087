"""Configuration of the model and of the engine, as frozen dataclasses that need neither torch nor transformers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from morph.errors import UnsupportedModel

FORMAT_VERSION = 1
"""Version of the model folder; raised when an older reader would misread a newer folder."""

BlockKind = Literal["adaptive", "attention", "ssm"]


@dataclass(frozen=True)
class SSMConfig:
    """Shape of the SSM mixers of a model.

    Attributes:
        kind: module name in `morph.model.ssm`.
        window: tokens of sliding-window attention inside the mixer; 0 = none.
        state_heads: one recurrent state per `q` head, or one per `kv` head shared by its q heads.
        conv_width: taps of the depthwise causal conv over q, k, v.
        gate_rank: rank of the SiLU output gate.
    """

    kind: str = "gated_delta_net"
    window: int = 0
    state_heads: Literal["q", "kv"] = "q"
    conv_width: int = 4
    gate_rank: int = 64


@dataclass(frozen=True)
class ModelConfig:
    """Everything that the forward pass needs to know about a model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_blocks: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    tie_embeddings: bool = True
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    block_kinds: tuple[BlockKind, ...] = ()
    ssm: SSMConfig | None = field(default_factory=SSMConfig)

    def __post_init__(self) -> None:
        if not self.block_kinds:
            kind: BlockKind = "adaptive" if self.ssm is not None else "attention"
            object.__setattr__(self, "block_kinds", (kind,) * self.num_blocks)
        if len(self.block_kinds) != self.num_blocks:
            raise UnsupportedModel(
                f"block_kinds has {len(self.block_kinds)} entries, num_blocks is {self.num_blocks}; give one each"
            )
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.ssm is None and any(kind != "attention" for kind in self.block_kinds):
            raise UnsupportedModel("a model with ssm or adaptive blocks needs an ssm config")

    @property
    def group_size(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.num_kv_heads

    @property
    def q_size(self) -> int:
        """Width of the query projection."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the key (and of the value) projection."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Width of q, k and v concatenated."""
        return self.q_size + 2 * self.kv_size

    @property
    def num_state_heads(self) -> int:
        """Recurrent states per SSM block."""
        if self.ssm is None:
            return 0
        return self.num_heads if self.ssm.state_heads == "q" else self.num_kv_heads

    @property
    def has_ssm(self) -> bool:
        """True when any block holds an SSM mixer."""
        return any(kind != "attention" for kind in self.block_kinds)

    @property
    def is_adaptive(self) -> bool:
        """True when the layout can depend on the request."""
        return "adaptive" in self.block_kinds

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelConfig:
        """Read what `to_dict` wrote; unknown keys are refused so that nothing is silently dropped."""
        known = {f.name for f in fields(cls)}
        unknown = set(data) - known
        if unknown:
            raise UnsupportedModel(f"unknown model config keys {sorted(unknown)}; update Morph or the folder")
        values = dict(data)
        if values.get("ssm") is not None:
            values["ssm"] = SSMConfig(**values["ssm"])
        for key in ("block_kinds", "eos_token_ids"):
            if key in values:
                values[key] = tuple(values[key])
        return cls(**values)


@dataclass(frozen=True)
class EngineConfig:
    """Limits and defaults of one engine.

    Attributes:
        dtype: `float32` or `bfloat16`: weights and KV; states are float32 always.
        max_requests: requests that hold memory at the same time (slots).
        memory_bytes: size of the unit-page pool; None = from `max_requests` full contexts, capped by free memory.
        max_context: longest prompt + answer in tokens; None = the model's.
        prefill_tokens: prompt tokens (times all blocks) worth of prefill work per engine iteration, the bound
            on how long a decode step waits.
        decode_stall_ms: on an accelerator, the longest that decoding requests wait for prefill between two steps;
            replaces `prefill_tokens` there once the pace of prefill is known.
        cohort_tokens: most prompt tokens prefilled together.
        token_tile: rows per tile of the MLP in prefill, bounds its activation memory.
        attention_budget: default budget of requests that name none, 0…1.
        cache_share: share of the pool that the context cache may hold, 0…1; 0 = no cache, None = by device. Requests
            that need the memory get it back.
        cache_policy: who leaves the cache first: `greedy_dual` (FLOPs saved per byte, hits, age), `lru` or `marconi`.
        layout_boundary: what the gates see of a request that names no `gate_tokens`: the whole `prompt`, or the
            `first_message` that is long, so that all questions about it and all turns after it have one layout.
        poison: fill freed pages with NaN (tests).
    """

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    max_requests: int = 16
    memory_bytes: int | None = None
    max_context: int | None = None
    prefill_tokens: int = 1024
    decode_stall_ms: float = 50.0
    cohort_tokens: int = 4096
    token_tile: int = 1024
    max_waiting: int = 1024
    attention_budget: float = 0.5
    cache_share: float | None = None
    layout_boundary: Literal["prompt", "first_message"] = "prompt"
    cache_policy: Literal["greedy_dual", "lru", "marconi"] = "greedy_dual"
    poison: bool = False
