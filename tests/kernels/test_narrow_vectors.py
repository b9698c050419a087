"""The kernels as processors without AVX-512 compile them: the same promises, checked by the same tests."""

from __future__ import annotations

import ctypes
import functools
import platform
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from morph.kernels import build
from tests.kernels import memory, test_attention, test_elementwise, test_gdn, test_linear

F32, BF16 = memory.DTYPES

CASES: dict[str, Callable[[], None]] = {
    "linear-float32": functools.partial(test_linear.test_equals_float64, 1042, 576, True, F32),
    "linear-bfloat16": functools.partial(test_linear.test_equals_float64, 70, 50, True, BF16),
    "linear-rows-float32": functools.partial(test_linear.test_a_row_has_the_same_bits_in_any_batch, 100, 300, F32),
    "linear-rows-bfloat16": functools.partial(test_linear.test_a_row_has_the_same_bits_in_any_batch, 100, 300, BF16),
    "pack-bfloat16": functools.partial(test_linear.test_rows_and_unpack_give_the_weight_back, 70, 50, BF16),
    "prefill-float32": functools.partial(test_attention.test_prefill_equals_the_reference, 9, 3, 64, F32),
    "prefill-bfloat16": functools.partial(test_attention.test_prefill_equals_the_reference, 9, 3, 64, BF16),
    "prefill-128": functools.partial(test_attention.test_prefill_equals_the_reference, 8, 1, 128, BF16),
    "decode-float32": functools.partial(test_attention.test_decode_equals_the_reference, 9, 3, 64, F32),
    "decode-bfloat16": functools.partial(test_attention.test_decode_equals_the_reference, 9, 3, 64, BF16),
    "large-scores": functools.partial(test_attention.test_large_scores_do_not_overflow, 1e4),
    "rope-bfloat16": functools.partial(test_attention.test_rope_writes_rotated_keys_and_values, 64, True, BF16),
    "rounding": test_attention.test_values_round_to_nearest_even,
    "gdn-prefill-q": functools.partial(test_gdn.test_prefill_equals_the_oracle, 64, "q", False),
    "gdn-prefill-kv-similar": functools.partial(test_gdn.test_prefill_equals_the_oracle, 64, "kv", True),
    "gdn-erase": functools.partial(test_gdn.test_tokens_that_erase_the_state_cost_no_digits, -60.0),
    "gdn-continued-window": functools.partial(
        test_gdn.test_a_continued_prefill_equals_the_reference, 70, 64, "q", BF16
    ),
    "gdn-decode-window": functools.partial(test_gdn.test_decode_continues_prefill, 64, "q", 64, BF16),
    "gdn-decode": functools.partial(test_gdn.test_decode_continues_prefill, 0, "kv", 32, F32),
    "gdn-conv-width": functools.partial(test_gdn.test_other_conv_widths, 8),
    "rms-norm": functools.partial(test_elementwise.test_rms_norm, 7, 100),
    "silu-mul": functools.partial(test_elementwise.test_silu_mul, 7, 100),
    "silu-extreme": test_elementwise.test_silu_of_extreme_values_is_finite,
    "sums": functools.partial(test_elementwise.test_sums_have_the_same_bits_however_the_tokens_are_cut, 100),
}


@pytest.fixture(scope="module")
def avx2_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernels compiled for AVX2 and FMA, without AVX-512, in a cache of their own."""
    if platform.machine() not in ("x86_64", "AMD64") or not build.cpu_has("avx2"):
        pytest.skip("the processor has no AVX2")
    home: Path = tmp_path_factory.mktemp("avx2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MORPH_HOME", str(home))
        patch.setattr(build, "_machine_flags", lambda: ["-march=haswell", "-mprefer-vector-width=256"])
        try:
            library = build.load_library()
        except build.KernelBuildError as error:
            if "no C++ compiler" in str(error):
                pytest.skip(str(error))
            raise
    assert list((home / "kernels").glob("*.so")), "another build was loaded"
    return library


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_avx2_build_keeps_the_promise_of(name: str, avx2_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "load_library", lambda: avx2_library)
    CASES[name]()


@pytest.mark.slow
def test_avx2_build_does_without_fixed_point(avx2_library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MORPH_CPU_GEMM", raising=False)
    assert not avx2_library.morph_has_fixed()
    assert memory.NativeKernels(avx2_library, BF16, 3).gemm in ("float32", "onednn")
    monkeypatch.setenv("MORPH_CPU_GEMM", "fixed")
    with pytest.raises(ValueError, match="AVX-512 VNNI"):
        memory.NativeKernels(avx2_library, BF16, 3)


@pytest.mark.slow
def test_avx2_build_has_no_avx512_instruction(avx2_library: ctypes.CDLL) -> None:
    """One would end the process on the machines that this build stands for."""
    objdump = shutil.which("objdump")
    if objdump is None:
        pytest.skip("no objdump on the PATH")
    command = [objdump, "-d", "--no-show-raw-insn", avx2_library._name]
    code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "%ymm" in code
    # 512-bit registers, mask registers, and the upper half of the register file exist in AVX-512 alone.
    assert not re.search(r"%zmm|\{%k[0-7]\}|%[xy]mm(1[6-9]|2[0-9]|3[01])\b", code)
