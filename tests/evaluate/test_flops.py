"""The FLOPs that are documented are those that torch counts on the real architecture."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from morph.config import ModelConfig, SSMConfig
from morph.evaluate.flops import (
    CHUNK,
    attention_decode,
    decode_flops,
    inverse_macs,
    prefill_flops,
    recurrence_macs,
    request_flops,
    tflops_per_token,
)
from morph.kernels.gated_delta.reference import chunk_gated_delta_rule
from morph.model.model import MorphModel
from tests.tiny import tiny_config

SMOLLM2 = ModelConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_blocks=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_context=8192,
)


def counted(config: ModelConfig, layout: str, n: int) -> float:
    """What torch counts in a forward pass of the reference model over all logits; scores as plain products."""
    with torch.device("meta"):
        model = MorphModel(config)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    bits = torch.tensor([bit == "1" for bit in layout])
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(torch.zeros(1, n, dtype=torch.long), bits)
    return float(counter.get_total_flops())


def elementwise_conv(config: ModelConfig, layout: str, n: int) -> float:
    """The conv's part, which the reference does by multiplying elements, so that torch does not count it."""
    assert config.ssm is not None
    return 2.0 * layout.count("0") * n * config.ssm.conv_width * config.qkv_size


@pytest.mark.parametrize("layout", ["1111", "0000", "0110"])
@pytest.mark.parametrize("n", [1, 64, 100])
def test_the_count_equals_torchs_on_a_tiny_model(layout: str, n: int) -> None:
    config = tiny_config()
    ours = prefill_flops(config, [c == "1" for c in layout], n, "chunk", head="all", causal=False)
    assert ours.total - elementwise_conv(config, layout, n) == counted(config, layout, n)


@pytest.mark.parametrize("layout", ["1" * 30, "0" * 30, "10" * 15])
def test_the_count_equals_torchs_on_the_shapes_of_smollm2(layout: str) -> None:
    ours = prefill_flops(SMOLLM2, [c == "1" for c in layout], 128, "chunk", head="all", causal=False)
    assert ours.total - elementwise_conv(SMOLLM2, layout, 128) == counted(SMOLLM2, layout, 128)


def test_the_chunk_form_counts_its_products() -> None:
    config = tiny_config()
    heads, d, n = config.num_heads, config.head_dim, 3 * CHUNK
    x = torch.randn(1, n, heads, d)
    counter = FlopCounterMode(display=False)
    with counter:
        chunk_gated_delta_rule(
            x, x / x.norm(dim=-1, keepdim=True), x, -torch.rand(1, n, heads), torch.rand(1, n, heads)
        )
    assert 2 * recurrence_macs(config, n, "chunk") == counter.get_total_flops()


def test_a_decode_step_is_the_difference_of_two_causal_prefills_in_the_recurrent_form() -> None:
    config = tiny_config(window=16)
    for layout in ([True] * 4, [False] * 4, [True, False, False, True]):
        more = prefill_flops(config, layout, 41, "recurrent", head="none")
        less = prefill_flops(config, layout, 40, "recurrent", head="none")
        step = decode_flops(config, layout, 41)
        assert step.mixer == pytest.approx(more.mixer - less.mixer)
        assert step.mlp == pytest.approx(more.mlp - less.mlp)


def test_a_requests_decode_is_the_sum_of_its_steps() -> None:
    layout = [True, False] * 15
    whole = request_flops(SMOLLM2, layout, 200, 11)
    steps = [decode_flops(SMOLLM2, layout, 200 + i) for i in range(1, 11)]
    assert whole.total == pytest.approx(prefill_flops(SMOLLM2, layout, 200).total + sum(s.total for s in steps))


def test_the_inverse_of_a_chunk_costs_what_its_merges_cost() -> None:
    assert [inverse_macs(n) for n in (1, 2, 4, 8)] == [0, 0, 16, 160]
    with pytest.raises(ValueError, match="48"):
        inverse_macs(48)


def test_attention_grows_with_the_context_and_the_ssm_does_not() -> None:
    attention, ssm = [True] * 30, [False] * 30
    assert attention_decode(SMOLLM2, 4096) > 2 * attention_decode(SMOLLM2, 1024)
    assert decode_flops(SMOLLM2, ssm, 4096) == decode_flops(SMOLLM2, ssm, 1024)
    saved = [1 - decode_flops(SMOLLM2, ssm, n).total / decode_flops(SMOLLM2, attention, n).total for n in (1024, 4096)]
    # The shares that the counts of the design give for decode: about 17 % at 1k, 49 % at 4k.
    assert saved == pytest.approx([0.17, 0.49], abs=0.02)
    assert tflops_per_token(SMOLLM2, attention, 4096, 64) > tflops_per_token(SMOLLM2, ssm, 4096, 64)


def test_a_layout_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="4 blocks, the model has 30"):
        prefill_flops(SMOLLM2, [True] * 4, 10)


def test_shared_states_cost_less() -> None:
    shared = tiny_config(state_heads="kv")
    assert shared.ssm == SSMConfig(state_heads="kv", gate_rank=32)
    for form in ("chunk", "recurrent"):
        assert recurrence_macs(shared, 256, form) < recurrence_macs(tiny_config(), 256, form)  # type: ignore[arg-type]
