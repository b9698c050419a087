"""FLOPs of a request under a layout: prefill and decode, with mixer, MLP and head apart.

A multiply-add counts as two. Counted are the products of matrices and of vectors: projections, scores and values of
attention, the recurrence, the depthwise conv, the output gate's low-rank map, MLP, head. Not counted are norms,
activations, softmax, RoPE and the embedding, which are linear in the width and below a percent together.

Causal attention counts the keys that a token may see, n (n + 1) / 2 over a prompt; a kernel that computes whole tiles
or masked scores does up to twice that (`causal=False` counts all n² for comparison with such a program).

The Gated DeltaNet has two forms with the same result. The *recurrent* one reads and writes the state token by token
(kᵀS, the rank-one update, qᵀS: 3 · d_k · d_v multiply-adds per head) and is what decode does. The *chunk* one turns a
prompt into products of matrices over chunks of C tokens (Yang et al., 2024, WY form): per head and chunk 5 · C² · d
for the five C×C products with keys, queries and values, 3 · C · d² for reading and writing the state, and the inverse
of a unit lower triangular C×C matrix by merging halves. It does more operations in a form that hardware runs faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from morph.config import ModelConfig
from morph.gate.cost import CPU_RATES, mixer_work
from morph.layout import Layout

CHUNK = 64
"""Tokens per chunk of the chunk form."""

Form = Literal["chunk", "recurrent"]
Head = Literal["last", "all", "none"]


@dataclass(frozen=True)
class Flops:
    """Operations by part; they add up."""

    mixer: float = 0.0
    mlp: float = 0.0
    head: float = 0.0

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.mixer + other.mixer, self.mlp + other.mlp, self.head + other.head)

    @property
    def total(self) -> float:
        """All parts."""
        return self.mixer + self.mlp + self.head


def inverse_macs(size: int) -> int:
    """Multiply-adds of inverting a unit lower triangular `size` × `size` matrix by halves; a power of two.

    Halves of size h are inverted and joined by two h×h products; of size 2 there is nothing to multiply.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"size {size} is not a power of two")
    if size <= 2:
        return 0
    half = size // 2
    return 2 * inverse_macs(half) + 2 * half**3


def attention_prefill(config: ModelConfig, n: int, causal: bool = True) -> float:
    """FLOPs of one attention mixer over a prompt of `n` tokens."""
    attention, _ = mixer_work(config, CPU_RATES)
    keys = n * (n + 1) / 2 if causal else n * n
    return 2 * (n * attention.macs_per_token + keys * attention.macs_per_key)


def attention_decode(config: ModelConfig, keys: int) -> float:
    """FLOPs of one attention mixer for one token that sees `keys` keys, itself included."""
    attention, _ = mixer_work(config, CPU_RATES)
    return 2 * (attention.macs_per_token + keys * attention.macs_per_key)


def _ssm_per_token(config: ModelConfig) -> float:
    """Multiply-adds per token outside the recurrence and the window: projections, conv, decays, output gate."""
    assert config.ssm is not None
    _, ssm = mixer_work(config, CPU_RATES)
    window = min(config.ssm.window, config.max_context)
    recurrence = config.head_dim**2 * (2 * config.num_state_heads + config.num_heads)
    return ssm.macs_per_token - recurrence - 2 * config.q_size * window


def _window_keys(config: ModelConfig, n: int) -> float:
    """Keys that the mixer's window sees over a prompt of `n` tokens."""
    assert config.ssm is not None
    window = min(config.ssm.window, n)
    return window * (window + 1) / 2 + max(n - window, 0) * window


def recurrence_macs(config: ModelConfig, n: int, form: Form, chunk: int = CHUNK) -> float:
    """Multiply-adds of the delta rule over `n` tokens, all heads of one block.

    States shared by the query heads of a group are read and written once per state in the recurrent form; the chunk
    form's products with queries are per query head, those with keys and values per state.
    """
    states, heads, d = config.num_state_heads, config.num_heads, config.head_dim
    if form == "recurrent":
        return float(n * d * d * (2 * states + heads))
    chunks = -(-n // chunk)
    square, state = chunk * chunk * d, chunk * d * d
    # Per state: k kᵀ, the inverse times v and times k; reading the state with k and writing it. Per query head: q kᵀ,
    # its product with the written values, and qᵀS.
    per_state = 3 * square + 2 * state + inverse_macs(chunk)
    return float(chunks * (states * per_state + heads * (2 * square + state)))


def ssm_prefill(config: ModelConfig, n: int, form: Form = "chunk", chunk: int = CHUNK) -> float:
    """FLOPs of one SSM mixer over a prompt of `n` tokens; 0 for a model without."""
    if config.ssm is None:
        return 0.0
    macs = n * _ssm_per_token(config) + recurrence_macs(config, n, form, chunk)
    return 2 * (macs + 2 * config.q_size * _window_keys(config, n))


def ssm_decode(config: ModelConfig, keys: int) -> float:
    """FLOPs of one SSM mixer for one token, the `keys`-th of its sequence."""
    if config.ssm is None:
        return 0.0
    window = min(config.ssm.window, keys)
    return 2 * (_ssm_per_token(config) + recurrence_macs(config, 1, "recurrent") + 2 * config.q_size * window)


def mlp_flops(config: ModelConfig, tokens: int) -> float:
    """FLOPs of one block's SwiGLU over `tokens` tokens."""
    return 2.0 * tokens * 3 * config.hidden_size * config.intermediate_size


def head_flops(config: ModelConfig, rows: int) -> float:
    """FLOPs of the head over `rows` tokens."""
    return 2.0 * rows * config.hidden_size * config.vocab_size


def prefill_flops(
    config: ModelConfig,
    layout: Layout | Sequence[bool],
    n: int,
    form: Form = "chunk",
    head: Head = "last",
    causal: bool = True,
) -> Flops:
    """FLOPs of a prompt of `n` tokens.

    Args:
        layout: one choice per block, True = attention.
        head: logits of the last token (what serving needs), of all (scoring), or none.
    """
    bits = _bits(config, layout)
    attention, ssm = attention_prefill(config, n, causal), ssm_prefill(config, n, form)
    count = sum(bits)
    rows = {"last": 1, "all": n, "none": 0}[head]
    return Flops(
        count * attention + (len(bits) - count) * ssm,
        len(bits) * mlp_flops(config, n),
        head_flops(config, rows),
    )


def decode_flops(config: ModelConfig, layout: Layout | Sequence[bool], keys: int) -> Flops:
    """FLOPs of one decode step whose token is the `keys`-th of its sequence."""
    bits = _bits(config, layout)
    count = sum(bits)
    mixer = count * attention_decode(config, keys) + (len(bits) - count) * ssm_decode(config, keys)
    return Flops(mixer, len(bits) * mlp_flops(config, 1), head_flops(config, 1))


def request_flops(
    config: ModelConfig, layout: Layout | Sequence[bool], prompt: int, answer: int, form: Form = "chunk"
) -> Flops:
    """FLOPs of a whole request: prefill, which gives the first answer token, and a step for each further one.

    Args:
        prompt, answer: tokens.
    """
    total = prefill_flops(config, layout, prompt, form)
    steps = max(answer - 1, 0)
    if steps:
        # Linear in the position once the window is full; the mean position gives the sum exactly there.
        first, last = decode_flops(config, layout, prompt + 1), decode_flops(config, layout, prompt + steps)
        total += Flops(*(steps * (getattr(first, k) + getattr(last, k)) / 2 for k in ("mixer", "mlp", "head")))
    return total


def tflops_per_token(
    config: ModelConfig, layout: Layout | Sequence[bool], prompt: int, answer: int, form: Form = "chunk"
) -> float:
    """10¹² operations per token of a request, prompt and answer tokens counted alike."""
    return request_flops(config, layout, prompt, answer, form).total / (prompt + max(answer, 0)) / 1e12


def _bits(config: ModelConfig, layout: Layout | Sequence[bool]) -> list[bool]:
    bits = [bool(bit) for bit in layout]
    if len(bits) != config.num_blocks:
        raise ValueError(f"layout has {len(bits)} blocks, the model has {config.num_blocks}")
    return bits
