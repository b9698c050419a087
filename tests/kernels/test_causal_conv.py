"""The Triton convolution of training against the plain torch form, with gradients; interpreted without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

triton = pytest.importorskip("triton")
SHAPES = [(1, 1, 1, 4), (2, 64, 64, 4), (3, 70, 100, 4), (1, 130, 65, 3), (2, 5, 32, 2)]


def compare(device: str) -> None:
    """Output and gradients over shapes and dtypes, raising where they differ."""
    from morph.kernels.causal_conv import causal_conv
    from morph.model.ssm.gated_delta_net import causal_depthwise

    rng = torch.Generator().manual_seed(0)
    for batch, tokens, channels, width in SHAPES:
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
            x, up = (torch.randn(batch, tokens, channels, generator=rng).to(device, dtype) for _ in range(2))
            weight = torch.randn(channels, width, generator=rng).to(device)
            results = []
            for exact in (True, False):
                leaves = [x.detach().float() if exact else x.detach().clone(), weight.detach().clone()]
                leaves = [leaf.requires_grad_() for leaf in leaves]
                out = causal_depthwise(leaves[0], leaves[1]) if exact else causal_conv(leaves[0], leaves[1])
                out.backward(up.to(out.dtype))
                results.append([out.detach(), leaves[0].grad, leaves[1].grad])
            for want, got in zip(*results, strict=True):
                assert want is not None and got is not None
                error = (got.float() - want.float()).norm() / want.float().norm()
                assert error < tolerance, (batch, tokens, channels, width, dtype, float(error))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_this_gpu() -> None:
    compare("cuda")


def test_interpreted() -> None:
    # The interpreter is chosen when triton is imported, which other tests may have done already.
    code = "from tests.kernels.test_causal_conv import compare; compare('cpu')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
