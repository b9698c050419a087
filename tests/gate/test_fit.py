"""Loss models, regression and decisions on losses whose truth is known."""

from __future__ import annotations

import math

import pytest
import torch

from morph.gate.calibrate import rules_of, saved_matrix
from morph.gate.cost import CostTable
from morph.gate.evaluate import Decisions, decision_ratios
from morph.gate.fit import FeatureRows, FitConfig, GateFit, GateStack, capped, fit_gates
from morph.gate.labels import LossModel, fit_losses
from morph.gate.layouts import flipped, nested_layouts, random_layouts
from morph.gate.policy import GateWeights, UtilityPolicy, features

BLOCKS, REQUESTS, HIDDEN = 8, 300, 6


def truth(seed: int = 0) -> LossModel:
    """Sensitivities, one strong interaction, scales that vary by a factor of several, small deviations."""
    rng = torch.Generator().manual_seed(seed)
    sensitivity = torch.tensor([0.2, 0.02, 0.1, 0.01, 0.05, 0.03, 0.005, 0.015], dtype=torch.float64)
    interaction = torch.zeros(BLOCKS, BLOCKS, dtype=torch.float64)
    interaction[1, 5] = interaction[5, 1] = 0.2
    scale = torch.randn(REQUESTS, generator=rng, dtype=torch.float64).mul(0.6).exp()
    deviation = 0.01 * torch.randn(REQUESTS, BLOCKS, generator=rng, dtype=torch.float64)
    return LossModel(sensitivity, interaction, scale / scale.mean(), deviation, 0.0, 0.0)


def measured(model: LossModel, rows: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses, layouts and owners of random layouts."""
    generator = torch.Generator().manual_seed(1)
    layouts = torch.stack([random_layouts(list(range(BLOCKS)), rows, generator) for _ in range(REQUESTS)])
    loss = torch.stack([model.loss(layouts[:, i]) for i in range(rows)], dim=1)
    return loss.flatten().float(), layouts.flatten(0, 1), torch.arange(REQUESTS).repeat_interleave(rows)


@pytest.fixture(scope="module")
def fitted() -> LossModel:
    loss, layouts, owner = measured(truth())
    return fit_losses(loss, layouts, owner, REQUESTS)


def test_scale_sensitivity_and_interaction_are_recovered(fitted: LossModel) -> None:
    real = truth()
    assert torch.corrcoef(torch.stack([fitted.scale, real.scale]))[0, 1] > 0.97
    assert float(fitted.interaction[1, 5]) == pytest.approx(0.2, rel=0.2)
    others = fitted.interaction.clone()
    others[1, 5] = others[5, 1] = 0.0
    assert others.abs().max() < 0.04
    new = random_layouts(list(range(BLOCKS)), REQUESTS, torch.Generator().manual_seed(9))
    error = (fitted.loss(new) - real.loss(new)).abs().mean() / real.loss(new).mean()
    assert error < 0.05


def test_deviations_are_shrunk_toward_what_all_requests_share() -> None:
    real = truth()
    few, many = (fit_losses(*measured(real, rows), REQUESTS) for rows in (4, 40))
    assert few.deviation.std() < many.deviation.std() < 1.2 * real.deviation.std()
    new = random_layouts(list(range(BLOCKS)), REQUESTS, torch.Generator().manual_seed(9))
    # With little evidence they do no harm, with much they help.
    for found, share in ((few, 1.02), (many, 0.6)):
        error = (found.loss(new) - real.loss(new)).square().mean()
        without = (found.scale * found.shared(new) - real.loss(new)).square().mean()
        assert error < share**2 * without
    assert torch.corrcoef(torch.stack([many.deviation.flatten(), real.deviation.flatten()]))[0, 1] > 0.8


def test_the_chain_shape_gives_the_static_layouts_of_its_ranking(fitted: LossModel) -> None:
    ranking = fitted.greedy_ranking()
    # Blocks 1 and 5 are cheap alone and dear together: once one has attention, the other can wait.
    assert abs(ranking.index(1) - ranking.index(5)) > 1
    shape = fitted.chain_shape(ranking)
    assert shape.argsort(descending=True).tolist() == ranking
    for count in range(1, BLOCKS):
        threshold = float(shape.sort(descending=True).values[count - 1 : count + 1].mean())
        assert torch.equal(shape > threshold, nested_layouts(ranking, [count])[0])


def test_capping_keeps_the_mean() -> None:
    heavy = torch.randn(500, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(1.5).exp()
    light = capped(heavy, 0.95)
    torch.testing.assert_close(light.mean(0), heavy.mean(0))
    assert (light.std(0) < heavy.std(0)).all()


def fit(model: LossModel, signal: float, adaptive: list[int] | None = None) -> tuple[GateFit, FeatureRows]:
    """Features of which one direction tells the scale, in noise."""
    rng = torch.Generator().manual_seed(4)
    raw = torch.randn(2 * REQUESTS, BLOCKS, 2 * HIDDEN, generator=rng)
    owner = torch.arange(REQUESTS).repeat(2)
    raw[:, :, 3] = signal * model.scale.float()[owner][:, None] + 0.1 * raw[:, :, 3]
    lengths = torch.randint(20, 2000, (REQUESTS,), generator=rng)
    rows = FeatureRows(raw.half(), owner, lengths.float().log(), torch.arange(REQUESTS))
    ranking = model.greedy_ranking()
    chosen = list(range(BLOCKS)) if adaptive is None else adaptive
    config = FitConfig(penalties=(0.001, 0.03, 1.0), counts=(0.25, 0.5))
    return fit_gates(rows, model, ranking, [ranking], lengths.tolist(), chosen, config), rows


def test_gates_that_see_the_scale_beat_static_and_shuffled_layouts() -> None:
    found, _ = fit(truth(), signal=1.0)
    best = min(found.candidates, key=lambda c: c["vs_static"] * c["vs_shuffled"])
    assert (best["penalty"], best["deviation"]) == (found.penalty, found.deviation)
    assert best["vs_static"] < 0.97 and best["vs_shuffled"] < 0.95
    assert found.r2[0] > 0.8 and found.r2[2] > 0.8


def test_cross_validation_does_not_praise_gates_that_see_nothing() -> None:
    found, _ = fit(truth(), signal=0.0)
    best = min(found.candidates, key=lambda c: c["vs_static"] * c["vs_shuffled"])
    assert best["vs_static"] > 0.99 and best["vs_shuffled"] > 0.97
    assert max(found.r2) < 0.1


def test_what_is_served_is_what_was_fitted() -> None:
    found, rows = fit(truth(), signal=1.0)
    table = CostTable((16, 4096), [[2.0, 3.0]] * BLOCKS, [[1.0, 1.0]] * BLOCKS, 32, "analytic", "test")
    saved, tau = saved_matrix(table, [100]), 0.02
    tensors = found.gates.tensors()
    for block in range(BLOCKS):
        raw = rows.block(block)[:20].float()
        stack = found.gates(block, raw)
        name = f"blocks.{block}.gate."
        gate = GateWeights(
            tensors[f"{name}fc1.weight"], tensors[f"{name}fc1.bias"], tensors[f"{name}fc2.weight"][0],
            float(tensors[f"{name}fc2.bias"]),
        )  # fmt: skip
        served = torch.tensor([gate.utility(row) for row in raw])
        torch.testing.assert_close(stack, served, atol=1e-5, rtol=1e-4)
        policy = UtilityPolicy([gate] * BLOCKS, table, tau)
        sums, last = raw[0, :HIDDEN].double() * 100, raw[0, HIDDEN : 2 * HIDDEN]
        decision = policy.decide(block, sums, last, 100, policy.initial_carry())
        expected = gate.utility(features(sums, last, 100)) > float(rules_of(tau, saved)[0, block])
        assert decision.attention == expected
    again = GateStack.of([gate] * 2 + [None])
    assert again(2, raw).abs().max() == 0 and torch.equal(again(0, raw), again(1, raw))


def test_static_blocks_get_no_gate() -> None:
    found, _ = fit(truth(), signal=1.0, adaptive=[0, 2, 5])
    assert set(found.gates.tensors([0, 2, 5])) == {
        f"blocks.{b}.gate.{part}" for b in (0, 2, 5) for part in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias")
    }
    assert all(math.isnan(found.r2[b]) for b in (1, 3, 4, 6, 7)) and found.gates.fc1[1].abs().max() == 0


def test_ratios_are_one_for_the_same_layout_everywhere_and_less_for_the_truth() -> None:
    model = truth()
    decisions = Decisions(model, [model.greedy_ranking()], [100] * REQUESTS, list(range(BLOCKS)), (0.25, 0.5))
    same = model.chain_shape(model.greedy_ranking()).expand(REQUESTS, -1)
    ratios = decision_ratios(same, decisions)
    assert ratios["vs_static"] == pytest.approx(1) and ratios["vs_shuffled"] == pytest.approx(1)
    best = decision_ratios(model.scale[:, None] * (same + model.deviation), decisions)
    assert best["vs_static"] < 0.95 and best["vs_shuffled"] < 0.95


def test_neighbours_differ_in_at_least_one_block() -> None:
    layouts = torch.rand(200, BLOCKS, generator=torch.Generator().manual_seed(0)) < 0.5
    near = flipped(layouts, 0.1, torch.Generator().manual_seed(1))
    changed = (near != layouts).sum(1)
    assert changed.min() == 1 and changed.float().mean() < 3
