"""What the engine does on an accelerator instead of the host, here on the CPU's tensors: with the same results."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from morph import LLM, SamplingParams
from morph.engine.device_gates import DeviceGates
from morph.engine.device_sampling import sample_on_device
from morph.engine.pace import Pace
from morph.engine.sampling import sample
from morph.errors import UnsupportedModel
from morph.gate.policy import features

PROMPTS = [[(7 * i + 3 * j) % 290 for i in range(40 + 60 * j)] for j in range(4)]


def test_gates_on_the_device_decide_as_the_host_does(tmp_path: Path, tiny_folder: Path) -> None:
    params = [
        SamplingParams(max_tokens=1, attention_budget=budget, gate_tokens=tokens, ignore_eos=True)
        for budget, tokens in ((0.2, None), (0.5, 30), (0.5, None), (0.8, 100))
    ]
    results = []
    for on_device in (False, True):
        llm = LLM(str(tiny_folder), dtype="float32")
        if on_device:
            llm.engine._device_gates = DeviceGates(torch.device("cpu"))
        utilities: list[Any] = []
        prefill = llm.engine._decide

        def keep(
            request: Any, block: int, rows: Any, utility: Any = None, f: Any = prefill, u: Any = utilities
        ) -> bool:
            u.append(utility)
            return f(request, block, rows, utility)

        llm.engine._decide = keep  # type: ignore[method-assign]
        outputs = llm.generate(PROMPTS, params)
        results.append(([(o.layout, o.token_ids) for o in outputs], [o.predicted_loss for o in outputs], utilities))
        assert llm.engine.runner.sums.isfinite().all()
    assert results[0][0] == results[1][0]
    assert results[0][1] == pytest.approx(results[1][1], abs=1e-5)
    assert all(u is None for u in results[0][2])
    assert any(u is not None for u in results[1][2]), "no decision was predicted on the device"


def test_a_batch_of_predictions_has_the_bits_of_single_ones() -> None:
    hidden, width = 24, 16
    gate: Any = SimpleNamespace(
        fc1=torch.randn(width, 2 * hidden + 1), bias1=torch.randn(width), fc2=torch.randn(width), bias2=0.3
    )
    gates = DeviceGates(torch.device("cpu"))
    sums, last, lengths = torch.randn(5, hidden, dtype=torch.float64), torch.randn(5, hidden), [3, 70, 1, 9, 500]
    together = gates.utilities(gate, sums, last, lengths)
    for i, n in enumerate(lengths):
        assert torch.equal(gates.utilities(gate, sums[i : i + 1], last[i : i + 1], [n])[0], together[i])
        row = torch.nn.functional.gelu(torch.addmv(gate.bias1, gate.fc1, features(sums[i], last[i], n)))
        assert float(together[i]) == pytest.approx(float(torch.dot(gate.fc2, row)) + 0.3, abs=1e-6)


def test_sampling_on_the_device_is_the_host_s() -> None:
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 7, "logprobs": 2},
        {"temperature": 1.1, "top_p": 0.7, "repetition_penalty": 1.5},
        {"temperature": 0.0, "logit_bias": {5: 100.0}},
        {"temperature": 1.0, "min_p": 0.1, "frequency_penalty": 0.5},
        {"temperature": 0.0},
    ]
    params = [SamplingParams(**kind) for kind in kinds]  # type: ignore[arg-type]

    def requests() -> list[Any]:
        return [
            SimpleNamespace(
                params=p,
                seed=i,
                num_tokens=9,
                tokens=[1, 2, 3],
                counts={2: 1},
                logprobs=[],
                constraint=None,
                penalised=bool(p.logit_bias or p.repetition_penalty != 1.0 or p.frequency_penalty),
                plain_greedy=p == SamplingParams(temperature=0.0),
            )
            for i, p in enumerate(params)
        ]

    logits = 2 * torch.randn(len(params), 200)
    logits[-1, 3] = float("inf")
    ours, theirs = requests(), requests()
    assert sample_on_device(logits.clone(), ours) == sample(logits.clone(), theirs)
    assert ours[1].logprobs == theirs[1].logprobs and len(ours[1].logprobs) == 1


def test_pace_keeps_to_the_limit() -> None:
    pace = Pace(0.05)
    assert pace.blocks(1000) is None
    pace.observe(0.02, 1000 * 2)
    assert pace.blocks(1000) == 5
    assert pace.blocks(100_000) == 1, "a group is never empty"
    pace.observe(0.04, 1000 * 2)
    assert pace.blocks(1000) == 2, "slower work counts at once"
    pace.observe(0.02, 1000 * 2)
    assert pace.blocks(1000) == 2, "faster work counts slowly"


def test_a_cohort_without_room_fails_alone(tiny_folder: Path) -> None:
    llm = LLM(str(tiny_folder), dtype="float32", cohort_tokens=64, poison=True)
    run, failed = llm.engine.runner.run_block, []

    def run_block(cohort: Any, *args: Any, **options: Any) -> None:
        if any(request.prompt_len == 100 for request in cohort.requests) and cohort.block == 2:
            failed.append(len(cohort.requests))
            raise torch.OutOfMemoryError("no room")
        run(cohort, *args, **options)

    llm.engine.runner.run_block = run_block  # type: ignore[method-assign]
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=3, layout="1010", ignore_eos=True))
    assert [o.finish_reason for o in outputs] == ["length", "error", "length", "length"]
    assert failed == [1] and "no room" in str(outputs[1].error)
    llm.engine.check()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_gpu_is_a_clear_error(tiny_folder: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed (extra `cuda`)")
    with pytest.raises(UnsupportedModel, match="device='cpu'"):
        LLM(str(tiny_folder), device="cuda")
