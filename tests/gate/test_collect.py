"""Measured losses and features are those of each layout run alone."""

from __future__ import annotations

import gc
import math
import weakref

import torch

from morph.config import ModelConfig, SSMConfig
from morph.gate.answers import Requests, sample_answers
from morph.gate.collect import fixed_rules, measure, with_log_length
from morph.gate.fit import GateStack
from morph.model.model import MorphModel


def tiny_model(blocks: int = 3) -> MorphModel:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=61, hidden_size=24, intermediate_size=32, num_blocks=blocks, num_heads=4, num_kv_heads=2,
        head_dim=8, max_context=256, eos_token_ids=(2,), ssm=SSMConfig(gate_rank=4),
    )  # fmt: skip
    model = MorphModel(config)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.requires_grad_(False)


def tiny_requests(model: MorphModel, lengths: list[int], splits: list[str] | None = None) -> Requests:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 61, (n,), generator=generator).tolist() for n in lengths]
    answers = sample_answers(model, prompts, 6)
    return Requests(prompts, ["x"] * len(prompts), splits or ["train"] * len(prompts), answers)


def random_gates(blocks: int, hidden: int) -> GateStack:
    generator = torch.Generator().manual_seed(2)
    inputs = 2 * hidden + 1
    return GateStack(
        torch.randn(blocks, 4, inputs, generator=generator) / math.sqrt(inputs),
        torch.randn(blocks, 4, generator=generator),
        torch.randn(blocks, 4, generator=generator),
        torch.randn(blocks, generator=generator) * 0.1,
    )


def direct_loss(model: MorphModel, prompt: list[int], answer: list[int], layout: torch.Tensor) -> float:
    tokens = torch.tensor([prompt + answer])
    span = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
    base, other = (model(tokens, rows)[0, span].log_softmax(-1) for rows in (None, layout))
    return float((base.exp() * (base - other)).sum(-1).mean())


def test_greedy_answers_are_those_of_full_forward_passes() -> None:
    model = tiny_model()
    prompts = [[5, 6, 7], [8] * 20, [9, 10]]
    answers = sample_answers(model, prompts, 5, greedy_share=1.0)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = list(prompt)
        for token in answer:
            assert int(model(torch.tensor([tokens]))[0, -1].argmax()) == token
            tokens.append(token)


def test_losses_equal_each_layout_alone_and_the_base_costs_nothing() -> None:
    model = tiny_model()
    requests = tiny_requests(model, [5, 40, 7])
    layouts = torch.tensor([[1, 1, 1], [0, 0, 0], [1, 0, 1], [1, 0, 0]], dtype=torch.bool)
    found = measure(model, requests, [(r, fixed_rules(layouts)) for r in (2, 0, 1)], batch_tokens=200)
    assert found.request.tolist() == [2] * 4 + [0] * 4 + [1] * 4
    assert torch.equal(found.layouts, layouts.repeat(3, 1))
    for row in range(len(found)):
        r = int(found.request[row])
        expected = direct_loss(model, requests.prompts[r], requests.answers[r], found.layouts[row])
        assert abs(float(found.loss[row]) - expected) < 1e-5
    assert found.loss[::4].abs().max() < 1e-6


def test_features_are_mean_and_last_normed_input_under_the_layout() -> None:
    model = tiny_model()
    requests = tiny_requests(model, [9, 33])
    layouts = torch.tensor([[0, 1, 0], [0, 0, 1]], dtype=torch.bool)
    found = measure(model, requests, [(r, fixed_rules(layouts)) for r in (0, 1)], keep_features=True)
    assert found.features is not None
    for row in range(4):
        prompt = requests.prompts[int(found.request[row])]
        seen: list[torch.Tensor] = []
        model.hidden_states(
            torch.tensor([prompt]), found.layouts[row], observe=lambda _, x, seen=seen: seen.append(x[0])
        )
        for block, normed in enumerate(seen):
            expected = torch.cat([normed.mean(0), normed[-1]])
            torch.testing.assert_close(found.features[row, block].float(), expected, atol=2e-3, rtol=2e-3)


def test_gates_decide_in_block_order_from_their_own_features() -> None:
    model = tiny_model()
    requests = tiny_requests(model, [12, 50])
    gates = random_gates(3, 24)
    rules = torch.tensor([[0.0, 0.0, 0.0], [-math.inf, 0.1, 0.1], [math.inf, -0.2, 0.3]])
    found = measure(model, requests, [(0, rules), (1, rules)], gates, keep_features=True)
    again = measure(model, requests, [(0, rules), (1, rules)], gates, losses=False)
    assert torch.equal(found.layouts, again.layouts)
    assert found.features is not None and found.utilities is not None
    lengths = torch.tensor(requests.lengths)[found.request]
    for block in range(3):
        value = gates(block, with_log_length(found.features[:, block], lengths))
        torch.testing.assert_close(value, found.utilities[:, block], atol=5e-3, rtol=5e-3)
        assert torch.equal(found.layouts[:, block], found.utilities[:, block] > rules.repeat(2, 1)[:, block])
    fixed = measure(
        model, requests, [(int(r), fixed_rules(b[None])) for r, b in zip(found.request, found.layouts, strict=True)]
    )
    torch.testing.assert_close(fixed.loss, found.loss, atol=1e-5, rtol=1e-4)


def test_a_measured_model_is_freed_with_its_trunk() -> None:
    model = tiny_model()
    measure(model, tiny_requests(model, [5]), [(0, fixed_rules(torch.ones(1, 3, dtype=torch.bool)))])
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None
