"""The reference model equals transformers' models and its own recurrence."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from morph.config import ModelConfig, SSMConfig
from morph.errors import CorruptFile, InvalidRequest
from morph.kernels.gated_delta.reference import chunk_gated_delta_rule, invert_unit_lower
from morph.model.model import MorphModel, source_name
from morph.model.ssm.gated_delta_net import masked_window, rotated

transformers = pytest.importorskip("transformers")


def tiny_config(**changes: object) -> ModelConfig:
    values: dict[str, object] = {
        "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_blocks": 3, "num_heads": 6,
        "num_kv_heads": 2, "head_dim": 8, "max_context": 256, "ssm": SSMConfig(gate_rank=4),
    }  # fmt: skip
    return ModelConfig(**(values | changes))  # type: ignore[arg-type]


class DictSource:
    """Weights from a mapping of names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def get(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return self.tensors[name].to(dtype)

    def has(self, name: str) -> bool:
        return name in self.tensors


def random_model(config: ModelConfig, seed: int = 0) -> MorphModel:
    torch.manual_seed(seed)
    model = MorphModel(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.requires_grad_(False)


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    "scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3], ids=["plain", "linear", "llama3"]
)
@pytest.mark.parametrize("qk_norm", [False, True], ids=["llama", "qwen3"])
@torch.no_grad()
def test_all_attention_equals_transformers(qk_norm: bool, scaling: dict[str, object] | None) -> None:
    config = tiny_config(qk_norm=qk_norm, rope_scaling=scaling, ssm=None, tie_embeddings=not qk_norm)
    family = "Qwen3" if qk_norm else "Llama"
    hf_config = getattr(transformers, f"{family}Config")(
        vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta} | (scaling or {}),
        tie_word_embeddings=config.tie_embeddings, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    hf = getattr(transformers, f"{family}ForCausalLM")(hf_config).eval().requires_grad_(False)
    for parameter in hf.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model = MorphModel.from_source(DictSource(hf.state_dict()), config)
    tokens = torch.randint(0, 97, (2, 70))
    torch.testing.assert_close(model(tokens), hf(tokens).logits, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("state_heads", ["q", "kv"])
@pytest.mark.parametrize("window", [0, 5])
@torch.no_grad()
def test_ssm_over_chunks_equals_token_by_token(window: int, state_heads: str) -> None:
    config = tiny_config(ssm=SSMConfig(window=window, state_heads=state_heads, gate_rank=4), num_blocks=1)  # type: ignore[arg-type]
    model = random_model(config)
    mixer = model.blocks[0].ssm
    x = torch.randn(2, 83, config.hidden_size)
    cos, sin = model.rope(83, torch.device("cpu"))
    whole = mixer(x, (cos, sin))
    state, rows = None, []
    for t in range(83):
        row, state = mixer.step(x[:, t : t + 1], (cos[t : t + 1], sin[t : t + 1]), state)
        rows.append(row)
    torch.testing.assert_close(whole, torch.cat(rows, dim=1), atol=1e-5, rtol=1e-4)
    assert state is not None and state.recurrent.shape == (2, 6, 8, 8)


def test_a_final_state_continues_a_sequence() -> None:
    torch.manual_seed(0)
    q, k, v = torch.nn.functional.normalize(torch.randn(3, 1, 100, 2, 8), dim=-1)
    g, beta = torch.nn.functional.logsigmoid(torch.randn(1, 100, 2)), torch.rand(1, 100, 2)
    whole, end = chunk_gated_delta_rule(q, k, v, g, beta, chunk=16)
    cut = 37
    first, state = chunk_gated_delta_rule(*(t[:, :cut] for t in (q, k, v, g, beta)), chunk=16)
    second, last = chunk_gated_delta_rule(*(t[:, cut:] for t in (q, k, v, g, beta)), initial_state=state, chunk=64)
    torch.testing.assert_close(torch.cat([first, second], dim=1), whole, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(last, end, atol=1e-5, rtol=1e-4)


def test_inverse_is_stable_for_identical_keys() -> None:
    a = torch.ones(64, 64).tril(-1)
    product = invert_unit_lower(a) @ (torch.eye(64) + a)
    torch.testing.assert_close(product, torch.eye(64), atol=1e-4, rtol=0)


@torch.no_grad()
def test_rows_of_mixed_layouts_equal_rows_alone() -> None:
    config = tiny_config(ssm=SSMConfig(window=5, gate_rank=4))
    model = random_model(config)
    tokens = torch.randint(0, 97, (4, 30))
    layouts = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 1], [0, 1, 0]], dtype=torch.bool)
    together = model(tokens, layouts)
    for row in range(4):
        torch.testing.assert_close(together[row], model(tokens[row : row + 1], layouts[row])[0], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_right_padding_changes_nothing_before_it() -> None:
    model = random_model(tiny_config())
    tokens = torch.randint(0, 97, (1, 40))
    padded = torch.cat([tokens, torch.zeros(1, 9, dtype=torch.long)], dim=1)
    layout = torch.tensor([True, False, False])
    torch.testing.assert_close(model(padded, layout)[:, :40], model(tokens, layout), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_choice_made_on_the_way_sees_the_choices_below() -> None:
    model = random_model(tiny_config())
    tokens = torch.randint(0, 97, (2, 20))
    seen: list[torch.Tensor] = []
    bits = torch.tensor([[1, 0, 0], [0, 0, 1]], dtype=torch.bool)

    def choose(block: int, normed: torch.Tensor) -> list[bool]:
        seen.append(normed)
        return bits[:, block].tolist()

    observed: list[torch.Tensor] = []
    fixed = model.hidden_states(tokens, bits, observe=lambda _, normed: observed.append(normed))
    torch.testing.assert_close(model.hidden_states(tokens, choose), fixed)
    for one, other in zip(seen, observed, strict=True):
        torch.testing.assert_close(one, other)


@torch.no_grad()
def test_a_converted_mixer_starts_from_the_attention() -> None:
    model = random_model(tiny_config(ssm=SSMConfig(window=5, gate_rank=4)))
    model.init_ssm_from_attention()
    block = model.blocks[1]
    assert torch.equal(block.ssm.qkv.weight[:48], block.attention.q_proj.weight)
    assert torch.equal(block.ssm.out.weight, block.attention.o_proj.weight)
    x = torch.randn(1, 7, 48)
    assert torch.equal(block.ssm.conv(x.repeat(1, 1, 2)[..., :80]), x.repeat(1, 1, 2)[..., :80])
    gate = torch.nn.functional.silu(block.ssm.gate_up(block.ssm.gate_down(x)))
    torch.testing.assert_close(gate, torch.ones_like(gate))


def test_gradients_reach_every_ssm_parameter() -> None:
    model = random_model(tiny_config(ssm=SSMConfig(window=5, gate_rank=4)))
    for block in model.blocks:
        block.ssm.requires_grad_(True)
    model(torch.randint(0, 97, (2, 20)), torch.zeros(3, dtype=torch.bool)).square().mean().backward()
    for name, parameter in model.named_parameters():
        if ".ssm." in name:
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_a_missing_tensor_and_a_wrong_shape_are_named() -> None:
    config = tiny_config()
    tensors = {source_name(name): p for name, p in random_model(config).named_parameters()}
    without = {name: t for name, t in tensors.items() if name != "blocks.1.ssm.gain"}
    with pytest.raises(CorruptFile, match=r"blocks\.1\.ssm\.gain"):
        MorphModel.from_source(DictSource(without), config)
    with pytest.raises(CorruptFile, match=r"model\.norm\.weight"):
        MorphModel.from_source(DictSource(tensors | {"model.norm.weight": torch.ones(3)}), config)


@torch.no_grad()
def test_a_static_block_refuses_the_other_mixer() -> None:
    model = random_model(tiny_config(block_kinds=("attention", "ssm", "adaptive")))
    tokens = torch.randint(0, 97, (1, 5))
    model(tokens, torch.tensor([True, False, False]))
    with pytest.raises(InvalidRequest, match="static"):
        model(tokens, torch.tensor([False, False, False]))


@torch.no_grad()
def test_chunked_window_equals_the_masked_one() -> None:
    config = tiny_config(ssm=SSMConfig(gate_rank=4, window=8))
    mixer = random_model(config).layers[0].ssm
    assert mixer is not None
    projected = torch.randn(2, 53, config.qkv_size, generator=torch.Generator().manual_seed(3))
    rope = MorphModel(config).rope(53, torch.device("cpu"))
    want = masked_window(*rotated(projected, rope, mixer.sizes), 8)
    torch.testing.assert_close(mixer.window(projected, rope), want)
