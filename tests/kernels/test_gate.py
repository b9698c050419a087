"""A gate in one native call against torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from morph.kernels.gate import native_gate


@pytest.mark.parametrize(("hidden", "width"), [(64, 32), (576, 32), (50, 7), (1, 1)])
def test_equals_torch(hidden: int, width: int) -> None:
    fc1, bias1, fc2 = torch.randn(width, 2 * hidden + 1) / hidden**0.5, torch.randn(width), torch.randn(width)
    gate = native_gate(fc1, bias1, fc2, 0.25)
    if gate is None:
        pytest.skip("no native kernels here")
    for n in (1, 17, 3000):
        sums, last = torch.randn(hidden, dtype=torch.float64) * n, torch.randn(hidden)
        features = torch.cat([(sums / n).float(), last, torch.tensor([math.log(n)])]).double()
        want = F.gelu(fc1.double() @ features + bias1.double()) @ fc2.double() + 0.25
        assert gate(sums, last, n) == pytest.approx(float(want), abs=1e-5)
        assert gate(sums, last, n) == gate(sums.clone(), last.clone(), n)


def test_torch_kernels_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORPH_KERNELS", "torch")
    assert native_gate(torch.randn(4, 9), torch.randn(4), torch.randn(4), 0.0) is None
