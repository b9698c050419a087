"""vLLM's load generator against the server; runs where `vllm` is on the path or named by MORPH_VLLM."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import NAME, Served

VLLM = os.environ.get("MORPH_VLLM") or shutil.which("vllm")


@pytest.mark.slow
@pytest.mark.skipif(VLLM is None, reason="needs vllm: set MORPH_VLLM to its command")
@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_all_requests_complete_with_all_their_tokens(served: Served, tmp_path: Path, backend: str) -> None:
    endpoint = "/v1/completions" if backend == "openai" else "/v1/chat/completions"
    assert VLLM is not None
    done = subprocess.run(
        [
            VLLM, "bench", "serve", "--backend", backend, "--endpoint", endpoint, "--base-url", served.url,
            "--model", NAME, "--tokenizer", str(served.folder), "--dataset-name", "random",
            "--random-input-len", "32", "--random-output-len", "12", "--num-prompts", "10", "--max-concurrency", "4",
            "--ignore-eos", "--extra-body", '{"morph": {"layout": "1001"}}', "--disable-tqdm",
            "--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json",
        ],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (10, 0)
    assert result["total_output_tokens"] == 120
    assert served.engine.stats()["finished"] >= 10
