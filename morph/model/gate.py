"""The gate of one block as a module, for fitting; serving reads the same tensors through `morph.gate.policy`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

GATE_WIDTH = 32


class Gate(nn.Module):
    """Linear(2d+1, 32)-GELU-Linear(32, 1): features of a prompt to û, nats of KL per answer token.

    Args:
        hidden: width of the model; a feature is mean normed input, last normed input and log length.
    """

    def __init__(self, hidden: int, width: int = GATE_WIDTH) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2 * hidden + 1, width)
        self.fc2 = nn.Linear(width, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Features float32 `[requests, 2 * hidden + 1]` to û `[requests]`."""
        return self.fc2(F.gelu(self.fc1(features))).squeeze(-1)
