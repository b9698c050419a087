"""A training step captured as a CUDA graph: hundreds of small launches become one.

An alignment step has one shape and no decision of the host in it, so all of it can be replayed. Distillation draws its
layouts anew in each step, which changes what is launched; it is not captured.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

WARM_UP = 3
"""Steps before the capture, in which compilers and autotuners do their work."""


class CapturedStep:
    """Replays `step(tokens)`, a function of device tensors that adds to gradients and returns losses.

    Warm-up and capture run the step on `tokens`: gradients must be zeroed before the first call of this object.

    Args:
        tokens: the first rows, on the device; later calls take rows of the same shape.

    Raises:
        RuntimeError: something in the step cannot be captured.
    """

    def __init__(self, step: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> None:
        self._tokens = tokens.clone()
        stream = torch.cuda.Stream(tokens.device)
        stream.wait_stream(torch.cuda.current_stream(tokens.device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                step(self._tokens)
        torch.cuda.current_stream(tokens.device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._losses = step(self._tokens)

    @property
    def shape(self) -> torch.Size:
        """Shape of the tokens that it takes."""
        return self._tokens.shape

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """Losses of these rows; the buffer is overwritten by the next call."""
        self._tokens.copy_(tokens)
        self._graph.replay()
        return self._losses
