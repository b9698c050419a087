"""The kernels compile for the cards that Morph promises to run on, whether or not one is there."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed (extra `cuda`)")

SHARED_LIMIT = {80: 163 << 10, 90: 227 << 10}
"""Bytes of shared memory that one program may have."""


@pytest.mark.slow
@pytest.mark.parametrize("capability", sorted(SHARED_LIMIT))
def test_every_kernel_compiles_and_fits(capability: int) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.cuda.compile_all", str(capability)],
        capture_output=True, text=True, env=environment, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert {k["kernel"] for k in kernels} == {
        "_add_rms_norm", "_silu_mul", "_row_linear", "_rope_write_kv", "_split", "_combine", "_attend", "_prepare",
        "_update", "_conv_norm",
    }  # fmt: skip
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_LIMIT[capability], kernel
        assert kernel["stack"] <= 64, f"registers spill: {kernel}"
