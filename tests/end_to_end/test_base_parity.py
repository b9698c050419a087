"""All attention is the base model: the engine against transformers on the shipped weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.base_parity import BACKENDS, BOUND, backend, base_file, compare, read_llama, read_prompts
from morph import LLM

CHOSEN = (0, 4, 6, 11)
"""Prompts that are short and of different kinds; `python -m benchmarks.base_parity` runs all of them."""


@pytest.fixture(scope="module")
def llama(shipped_model: Path) -> Iterator[Any]:
    yield read_llama(base_file(shipped_model))


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_all_attention_gives_the_logits_of_transformers(shipped_model: Path, llama: Any, name: str) -> None:
    if name == "native":
        from morph.kernels.build import KernelBuildError, load_library

        try:
            load_library()
        except KernelBuildError as error:
            pytest.skip(f"no native kernels here: {error}")
    with backend(name):
        llm = LLM(shipped_model, dtype="float32", max_requests=4, max_context=512)
    assert llm.engine.runner.kernels.name == name
    prompts = read_prompts(llm.tokenizer)
    rows = list(compare(llm, llama, [prompts[i] for i in CHOSEN], max_tokens=16))
    assert sum(row.steps for row in rows) == 16 * len(CHOSEN)
    for row in rows:
        assert row.difference <= BOUND, row
        assert row.differ == 0, row


@pytest.mark.slow
def test_the_ssm_layout_is_another_model(shipped_model: Path, llama: Any) -> None:
    """The comparison sees a difference where there is one."""
    llm = LLM(shipped_model, dtype="float32", max_requests=1, max_context=512)
    prompt = read_prompts(llm.tokenizer)[0]
    row = next(compare(llm, llama, [prompt], max_tokens=4, layout="1" * 29 + "0"))
    assert row.difference > 10 * BOUND
