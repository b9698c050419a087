"""A whole decode step in one call gives the bits of its operations called one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from morph import LLM, SamplingParams
from morph.engine.runner import ModelRunner
from tests.tiny import tiny_model

LAYOUTS = ["attention", "ssm", "1010", "0101", "0011"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"window": 64},
        {"state_heads": "kv"},
        {"qk_norm": True},
        {"num_heads": 3, "num_kv_heads": 3, "head_dim": 64},
        {"ssm": False},
    ],
    ids=lambda shape: "-".join(shape) or "plain",
)
def test_one_call_equals_many(tmp_path: Path, dtype: str, shape: dict[str, Any]) -> None:
    folder = tiny_model(tmp_path / "model", gates=False, **shape)
    layouts = LAYOUTS if shape.get("ssm", True) else ["attention"] * 3
    prompts = [[(7 * i + 3 * j) % 290 for i in range(5 + 40 * j)] for j in range(len(layouts))]
    params = [SamplingParams(max_tokens=9 + j, layout=layout, ignore_eos=True) for j, layout in enumerate(layouts)]

    def run(fused: bool) -> tuple[list[list[int]], list[torch.Tensor], torch.Tensor]:
        llm = LLM(str(folder), dtype=dtype)
        runner = llm.engine.runner
        if runner.decoder is None:
            pytest.skip("this backend has no decoder")
        if not fused:
            runner.decoder = None
        logits, decode = [], runner.decode

        def keep(requests: Any) -> torch.Tensor:
            logits.append(decode(requests).clone())
            return logits[-1]

        runner.decode = keep  # type: ignore[method-assign]
        outputs = llm.generate(prompts, params)
        return [output.token_ids for output in outputs], logits, runner.sums.clone()

    tokens, logits, sums = run(fused=True)
    want_tokens, want_logits, want_sums = run(fused=False)
    assert tokens == want_tokens
    assert len(logits) == len(want_logits) > 8
    assert all(torch.equal(a, b) for a, b in zip(logits, want_logits, strict=True))
    assert torch.equal(sums, want_sums)


def test_the_native_backend_has_a_decoder(tmp_path: Path) -> None:
    runner: ModelRunner = LLM(str(tiny_model(tmp_path / "model"))).engine.runner
    if runner.kernels.name != "native":
        pytest.skip(f"backend is {runner.kernels.name}")
    assert runner.decoder is not None


def test_odd_head_dims_go_operation_by_operation(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", num_heads=2, num_kv_heads=1, head_dim=16)
    llm = LLM(str(folder))
    assert llm.engine.runner.decoder is None
    assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4
