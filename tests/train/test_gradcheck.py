"""The gradient check passes right kernels, fails wrong ones, and on CUDA holds for fla on this device."""

from __future__ import annotations

import pytest
import torch

from morph.errors import UnsupportedModel
from morph.kernels.flash_window import has_flash_window
from morph.kernels.gated_delta import reference
from morph.kernels.gated_delta.fla import has_fla
from morph.train import gradcheck

CPU = torch.device("cpu")


def test_right_kernels_pass() -> None:
    check = gradcheck.check_gradients(CPU, heads=2, head_dim=16, tokens=96)
    assert check.passed and set(check.errors) == set(gradcheck.NAMES)


@pytest.mark.parametrize("wrong", ["gradient", "nan"])
def test_wrong_kernels_are_refused(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(q: torch.Tensor, k: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, None]:
        out, _ = reference.chunk_gated_delta_rule(q, k, *rest)  # type: ignore[arg-type]
        # Same output; the gradient of k is doubled, or everything is NaN.
        other, _ = reference.chunk_gated_delta_rule(q.detach(), k, *(t.detach() for t in rest))  # type: ignore[arg-type]
        return out + other - other.detach() if wrong == "gradient" else out * torch.nan, None

    monkeypatch.setattr(gradcheck, "chunk_gated_delta_rule", rule)
    monkeypatch.setattr(gradcheck, "has_fla", lambda device: True)
    with pytest.raises(UnsupportedModel, match=r"wrong on this device .*use triton >= 3.7.1"):
        gradcheck.require_right_gradients(CPU, 2, 16, 1, torch.float32)


def test_nothing_is_checked_where_fla_does_not_run() -> None:
    assert gradcheck.require_right_gradients(CPU, 2, 16, 1, torch.float32) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_fla_agrees_with_float32_torch_on_this_device(head_dim: int) -> None:
    device = torch.device("cuda")
    if not has_fla(device):
        pytest.skip("needs fla-core")
    check = gradcheck.check_gradients(device, head_dim=head_dim)
    assert check.passed, str(check)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("heads", [(9, 3), (4, 4)])
@pytest.mark.parametrize("size", [64, 100])
def test_flash_window_agrees_with_masked_float32_attention_on_this_device(heads: tuple[int, int], size: int) -> None:
    device = torch.device("cuda")
    if not has_flash_window(device, torch.bfloat16):
        pytest.skip("needs flash attention")
    check = gradcheck.check_window(device, *heads, 64, size)
    assert check.passed, str(check)


def test_a_wrong_window_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, size: int) -> torch.Tensor:
        return gradcheck.masked_window(*(t.transpose(1, 2) for t in (q, k, v)), size=size + wrong)

    monkeypatch.setattr(gradcheck, "flash_window", window)
    monkeypatch.setattr(gradcheck, "has_flash_window", lambda device, dtype: True)
    wrong = 0
    assert gradcheck.require_right_gradients(CPU, 2, 16, 1, torch.bfloat16, 32) is None
    wrong = 1
    with pytest.raises(UnsupportedModel, match="windowed FlashAttention is wrong"):
        gradcheck.require_right_gradients(CPU, 2, 16, 1, torch.bfloat16, 32)
