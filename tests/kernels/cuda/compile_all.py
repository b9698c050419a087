"""Compile every kernel of a decode step and of prefill for a GPU that need not be there; prints what each uses.

    python -m tests.kernels.cuda.compile_all 90        (compute capability × 10)

Launches become compilations: the driver is a stub that names the target, tensors are on the CPU and stay untouched.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from morph.kernels.interface import SSMParams

SHAPES = {"135m": (9, 3, 64, 576), "1b": (32, 8, 64, 2048), "8b": (32, 8, 128, 4096)}


class Absent:
    """A driver that knows its target and has no device."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        """The target to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """Caches are kept per device."""
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """Never used: nothing is launched."""
        return 0


def usage(cubin: bytes) -> dict[str, int]:
    """Registers, stack bytes (spills) and shared memory of a compiled kernel, as cuobjdump reads them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    fields = dict(part.split(":")[:2] for part in text.replace("\n", " ").split() if part.count(":") == 1)
    return {"registers": int(fields["REG"]), "stack": int(fields["STACK"])}


def compile_everything(dtype: torch.dtype) -> None:
    """Call every launcher with the shapes of real models."""
    from morph.kernels.cuda import attention_decode, attention_prefill, gdn_decode, gdn_prefill, norm, rope, swiglu
    from morph.kernels.cuda.row_linear import row_linear

    ints = torch.zeros(64, dtype=torch.int32)
    for heads, kv_heads, dim, hidden in SHAPES.values():
        rows, qkv_size = 64, (heads + 2 * kv_heads) * dim
        storage = torch.zeros(4, dim * dim * 4, dtype=torch.uint8)
        pages, table = storage.view(dtype), torch.zeros(4, 512, dtype=torch.int32)
        x = torch.zeros(rows, hidden, dtype=dtype)
        h, weight = x.float(), torch.zeros(hidden)
        sums = torch.zeros(4, hidden, dtype=torch.float64)
        norm.add_rms_norm(h, None, weight, 1e-5, x, sums, ints)
        norm.add_rms_norm(h, x, weight, 1e-5, x)
        swiglu.silu_mul(x, x, x)
        qkv = torch.zeros(rows, qkv_size, dtype=dtype)
        heads_out = torch.zeros(rows, heads * dim, dtype=dtype)
        row_linear(x, torch.zeros(qkv_size, hidden, dtype=dtype), qkv, ints[:1], ints, gather=True)
        row_linear(heads_out, torch.zeros(hidden, heads * dim, dtype=dtype), x, ints[:1], ints, scatter=True)
        gate = torch.zeros(heads * dim, 64, dtype=dtype)
        row_linear(x[:, :64], gate, heads_out, ints[:1], bias=torch.zeros(heads * dim), silu_mul=heads_out)
        cos = torch.zeros(256, dim // 2)
        for mapped in (ints, None):
            rope.rope_write_kv(
                qkv, cos, cos, ints, ints, None, None, 1e-5, pages, table, 64, kv_heads, dim, mapped,
                None if mapped is None else ints[:1],
            )  # fmt: skip
        splits = attention_decode.splits_for(rows, kv_heads, 64)
        part, stats = attention_decode.scratch(rows, heads, dim, splits, torch.device("cpu"))
        attention_decode.decode_attention(
            qkv, pages, table, 64, ints, ints, ints[:1], 0.1, kv_heads, dim, heads_out, part, stats, ints
        )
        tails = torch.zeros(4, 3, qkv_size)
        long = torch.zeros(256, heads * dim, dtype=dtype)
        attention_prefill.paged_attention(long, pages, table[0], 64, 128, 0.1, kv_heads, dim, long)
        attention_prefill.paged_attention(long[:8], pages, table[0], 64, 128, 0.1, kv_heads, dim, long[:8])
        kv = torch.zeros(319, kv_heads * dim, dtype=dtype)
        attention_prefill.window_attention(long, kv, kv, 128, 63, 64, 0.1, dim, long)
        inputs = torch.zeros(rows, qkv_size + 2 * heads, dtype=dtype)
        for window in (0, 64):
            params = SSMParams(
                torch.zeros(qkv_size, 4), torch.zeros(2 * heads), torch.zeros(heads), torch.zeros(heads), cos, cos,
                window, heads, kv_heads, heads, dim,
            )  # fmt: skip
            scratch = gdn_decode.Scratch.make(rows, heads, kv_heads, dim, torch.device("cpu"))
            gdn_decode.gdn_decode(
                inputs, params, storage, dtype, table, ints, ints, ints[:1], tails, scratch, heads_out, ints
            )
        for tail in (None, tails[0]):
            gdn_prefill.conv_norm(inputs, params, tail, dtype)


def main(capability: int, dtype: torch.dtype = torch.bfloat16) -> list[dict[str, Any]]:
    """Compile for a compute capability; one entry per compiled kernel."""
    driver.set_active(Absent(capability))
    original, found = JITFunction.run, []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = original(self, *args, grid=grid, warmup=True, **options)
        if kernel is not None:
            found.append({"kernel": self.__name__, "shared": kernel.metadata.shared, **usage(kernel.asm["cubin"])})
        return kernel

    JITFunction.run = run
    try:
        compile_everything(dtype)
    finally:
        JITFunction.run = original
    return found


if __name__ == "__main__":
    for entry in main(int(sys.argv[1])):
        print(json.dumps(entry))
