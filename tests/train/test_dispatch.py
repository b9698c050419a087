"""The gated delta rule goes to the right kernel, packed sequences equal separate ones, the Hopper guard is narrow."""

from __future__ import annotations

import types

import pytest
import torch

from morph.kernels.gated_delta import chunk_gated_delta_rule, l2_normalise, reference
from morph.kernels.gated_delta import fla as fla_module
from morph.kernels.gated_delta.hopper import narrow_blocks_where_needed, needs_narrow_blocks


def rule_inputs(tokens: int, batch: int = 1, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    q, k, v = (torch.randn(batch, tokens, 3, 16, generator=generator) for _ in range(3))
    g = torch.nn.functional.logsigmoid(torch.randn(batch, tokens, 3, generator=generator) + 2)
    beta = torch.rand(batch, tokens, 3, generator=generator)
    return l2_normalise(q).to(dtype), l2_normalise(k).to(dtype), v.to(dtype), g, beta


def test_cpu_takes_the_reference_and_gives_states_only_when_asked() -> None:
    inputs = rule_inputs(70, batch=2)
    out, state = chunk_gated_delta_rule(*inputs, output_final_state=True)
    want, want_state = reference.chunk_gated_delta_rule(*inputs)
    assert torch.equal(out, want) and state is not None and torch.equal(state, want_state)
    assert chunk_gated_delta_rule(*inputs)[1] is None


def test_packed_sequences_equal_separate_ones() -> None:
    inputs, bounds = rule_inputs(100), torch.tensor([0, 30, 31, 100])
    start = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    out, states = chunk_gated_delta_rule(*inputs, start, True, bounds)
    assert states is not None
    for i, (begin, end) in enumerate(((0, 30), (30, 31), (31, 100))):
        parts = [x[:, begin:end] for x in inputs]
        alone, state = chunk_gated_delta_rule(*parts, start[i : i + 1], True)
        assert state is not None
        torch.testing.assert_close(out[:, begin:end], alone)
        torch.testing.assert_close(states[i : i + 1], state)


def test_packing_errors_name_the_problem() -> None:
    with pytest.raises(ValueError, match="batch of 1 row, got 2"):
        chunk_gated_delta_rule(*rule_inputs(10, batch=2), cu_seqlens=torch.tensor([0, 10]))
    with pytest.raises(ValueError, match="spans 0…9, the row has 10"):
        chunk_gated_delta_rule(*rule_inputs(10), cu_seqlens=torch.tensor([0, 9]))


@pytest.mark.parametrize(
    ("capability", "triton", "narrow"),
    [
        ((9, 0), "3.3.1", False),
        ((9, 0), "3.4.0", True),
        ((9, 0), "3.6.0", True),
        ((9, 0), "3.7.0", True),
        ((9, 0), "3.7.1", False),
        ((8, 0), "3.6.0", False),
        ((10, 0), "3.6.0", False),
    ],
)
def test_narrow_blocks_only_on_hopper_with_a_broken_triton(
    capability: tuple[int, int], triton: str, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert needs_narrow_blocks(capability, triton) is narrow
    chunk_o = types.ModuleType("chunk_o")
    chunk_o.TRITON_ABOVE_3_7_1, chunk_o.check_shared_mem = False, lambda *a: True  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "triton", types.SimpleNamespace(__version__=triton))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert narrow_blocks_where_needed(chunk_o) is narrow
    assert chunk_o.TRITON_ABOVE_3_7_1 is narrow and chunk_o.check_shared_mem("hopper", 0) is not narrow


def test_without_fla_there_is_one_warning_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(name: str) -> types.ModuleType:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(fla_module.importlib, "import_module", missing)
    fla_module.fla_rule.cache_clear()
    try:
        assert not fla_module.has_fla(torch.device("cuda")) and not fla_module.has_fla(torch.device("cuda"))
    finally:
        fla_module.fla_rule.cache_clear()
    assert len(caplog.records) == 1 and "pip install 'morph-hybrid[train]'" in caplog.text


def test_fla_is_called_with_scale_one_and_float32_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    def rule(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens):  # type: ignore[no-untyped-def]
        seen.update(scale=scale, types=(q.dtype, g.dtype, beta.dtype, initial_state.dtype), cu_seqlens=cu_seqlens)
        return q, initial_state if output_final_state else None

    monkeypatch.setattr(fla_module, "fla_rule", lambda: rule)
    q, k, v, g, beta = rule_inputs(8, dtype=torch.bfloat16)
    state = torch.zeros(1, 3, 16, 16, dtype=torch.bfloat16)
    out, final = fla_module.fla_chunk_rule(q, k, v, g.bfloat16(), beta.bfloat16(), state, True, None)
    assert out.dtype == torch.bfloat16 and final is not None and final.dtype == torch.float32
    assert seen["scale"] == 1.0 and seen["cu_seqlens"] is None
    assert seen["types"] == (torch.bfloat16, torch.float32, torch.float32, torch.float32)
