"""The training forward pass is the model's, and only mixers get gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from morph.checkpoint import open_model
from morph.model.model import MorphModel
from morph.train.model import mixer_parameters, open_converted, training_model
from morph.train.steps import align, distill
from morph.train.trunk import Trunk
from tests.convert.bases import tiny_base
from tests.train.conftest import convert_tiny

LAYOUTS = [[False] * 4, [True, False, True, False], [False, True, True, True], [True] * 4]


def trunk_of(folder: Path) -> Trunk:
    source, base = open_converted(folder)
    model = training_model(source, base, torch.float32, torch.device("cpu"))
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in mixer_parameters(model).values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=rng))
    return Trunk(model, layouts=source.config)


@pytest.fixture(scope="module", params=["llama", "qwen3-window-kv"])
def trunk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trunk:
    folder = tmp_path_factory.mktemp("steps")
    qwen = request.param != "llama"
    ssm = {"window": 64, "state_heads": "kv"} if qwen else {}
    return trunk_of(convert_tiny(tiny_base(folder / "base", qk_norm=qwen), folder / "model", **ssm))


def tokens_of(rows: int = 3, length: int = 140) -> torch.Tensor:
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_trunk_equals_the_reference_model(trunk: Trunk) -> None:
    tokens, model = tokens_of(), trunk.model
    teacher, streams = trunk.teacher(tokens, keep=[1])
    torch.testing.assert_close(teacher, model.hidden_states(tokens), atol=2e-5, rtol=1e-4)
    assert streams[1].shape == (3, 140, 64)
    student = trunk.student(tokens, LAYOUTS)
    for layout, got in zip(LAYOUTS, student, strict=True):
        want = model.hidden_states(tokens, torch.tensor(layout))
        torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_distill_losses_are_the_kl_of_the_logits(trunk: Trunk) -> None:
    tokens, model = tokens_of(), trunk.model
    result = distill(trunk, tokens, None, LAYOUTS, 1.0, 37, train=False)
    want = F.log_softmax(model(tokens), -1)
    for layout, got in zip(LAYOUTS, result.kl, strict=True):
        ours = F.log_softmax(model(tokens, torch.tensor(layout)), -1)
        kl = (want.exp() * (want - ours)).sum(-1).mean()
        torch.testing.assert_close(got, kl, atol=1e-5, rtol=1e-3)
    assert result.kl[3].abs() < 1e-6 < result.kl[0]


def test_alignment_gradient_is_that_of_the_plain_loss(trunk: Trunk) -> None:
    tokens, model = tokens_of(), trunk.model
    parameters = mixer_parameters(model)
    losses = align(trunk, tokens, 1.0)
    got = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
    inputs: list[torch.Tensor] = []
    model.hidden_states(tokens, observe=lambda block, x: inputs.append(x.detach()))
    rope, total = model.rope(140, torch.device("cpu")), torch.zeros(())
    for block, x, loss in zip(model.layers, inputs, losses, strict=True):
        assert block.attention is not None and block.ssm is not None
        target = block.attention(x, rope).detach()
        error = (block.ssm(x, rope) - target).square().sum((1, 2)) / target.square().sum((1, 2))
        torch.testing.assert_close(error.mean().detach(), loss, atol=1e-5, rtol=1e-4)
        total = total + error.mean() / 4
    want = torch.autograd.grad(total, list(parameters.values()))
    assert len(got) == len(parameters)
    for (name, gradient), expected in zip(got.items(), want, strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=2e-3, msg=name)
    for parameter in parameters.values():
        parameter.grad = None


def test_rows_and_their_split_give_the_same_gradient(trunk: Trunk) -> None:
    tokens, parameters = tokens_of(4, 48), mixer_parameters(trunk.model)

    def gradient(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
        for parameter in parameters.values():
            parameter.grad = None
        for part in parts:
            distill(trunk, part, None, LAYOUTS[:3], len(part) / 4, 64, hidden_weight=0.3, hidden_every=2)
            align(trunk, part, len(part) / 4)
        return torch.cat([p.grad.flatten() for p in parameters.values() if p.grad is not None])

    whole, split = gradient((tokens,)), gradient(tokens.split([1, 3]))
    assert (whole - split).norm() / whole.norm() < 1e-4
    assert all(p.grad is None for name, p in trunk.model.named_parameters() if name not in parameters)
    for parameter in parameters.values():
        parameter.grad = None


def test_static_ssm_blocks_learn_from_a_named_teacher(tmp_path: Path) -> None:
    from morph.config import SSMConfig
    from morph.convert.base import open_base
    from morph.convert.convert import convert, converted_config
    from morph.errors import UnsupportedModel

    base = tiny_base(tmp_path / "base")
    opened = open_base(str(base))
    config = converted_config(opened.source.config, SSMConfig(gate_rank=8), static_attention=[0], static_ssm=[2])
    folder = convert(opened, tmp_path / "static", config)
    with pytest.raises(UnsupportedModel, match=r"block 2 of .* has no attention to learn from; name --teacher"):
        open_converted(folder)
    source, teacher = open_converted(folder, base)
    model = training_model(source, teacher, torch.float32, torch.device("cpu"))
    assert {name.split(".")[1] for name in mixer_parameters(model)} == {"1", "2", "3"}
    tokens = tokens_of(2, 32)
    plain = MorphModel.from_source(open_model(base), open_model(base).config)
    with torch.no_grad():
        torch.testing.assert_close(Trunk(model).teacher(tokens)[0], plain.hidden_states(tokens), atol=2e-5, rtol=1e-4)
