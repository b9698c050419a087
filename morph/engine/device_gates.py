"""Gate predictions where the activations are: one small transfer per block, whatever the number of requests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from morph.engine.request import Request
from morph.engine.runner import Cohort, ModelRunner
from morph.gate.policy import GateWeights, UtilityPolicy


class DeviceGates:
    """û of the requests of a cohort at its next block, on an accelerator.

    Args:
        device: where the model runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._weights: dict[int, tuple[GateWeights, list[torch.Tensor]]] = {}

    def utilities(
        self, gate: GateWeights, sums: torch.Tensor, last: torch.Tensor, lengths: Sequence[int]
    ) -> torch.Tensor:
        """û float32 `[requests]` on the device.

        Rows go one by one through products of a fixed shape, so a prediction does not depend on the company.

        Args:
            sums: float64 `[requests, hidden]`. last: `[requests, hidden]`. lengths: prompt tokens of each.
        """
        fc1, bias1, fc2 = self._moved(gate)
        counts = torch.tensor([(float(n), math.log(n)) for n in lengths], dtype=torch.float64).to(self.device)
        mean = (sums / counts[:, :1]).float()
        rows = torch.cat([mean, last.float(), counts[:, 1:].float()], dim=1)
        hidden = [torch.nn.functional.gelu(torch.addmv(bias1, fc1, row)) for row in rows]
        return torch.stack([torch.dot(fc2, row) for row in hidden]) + gate.bias2

    def predict(self, runner: ModelRunner, cohort: Cohort, normed: torch.Tensor) -> dict[str, float]:
        """û by request id, for those whose decision at the cohort's next block depends on it.

        The running sums of what their gates see are brought up to date.
        """
        block = cohort.block
        found: dict[int, tuple[GateWeights, list[tuple[Request, torch.Tensor, torch.Tensor]]]] = {}
        for index, request in enumerate(cohort.requests):
            if not needs_prediction(request, block):
                continue
            gate = request.policy.gates[block]
            rows = normed[cohort.starts[index] : cohort.starts[index + 1]]
            seen = request.gate_tokens
            # Copies: the sums go on over the rest of the prompt while the gates' products are queued.
            sums = runner.sum_prompt(request, block, rows, request.cached, seen).clone()
            found.setdefault(id(gate), (gate, []))[1].append((request, sums, rows[seen - 1 - request.cached]))
        members, values = [], []
        for gate, entries in found.values():
            sums, last = torch.stack([e[1] for e in entries]), torch.stack([e[2] for e in entries])
            values.append(self.utilities(gate, sums, last, [e[0].gate_tokens for e in entries]))
            members += [e[0].id for e in entries]
        return dict(zip(members, torch.cat(values).tolist(), strict=True)) if members else {}

    def _moved(self, gate: GateWeights) -> list[torch.Tensor]:
        if id(gate) not in self._weights:
            self._weights[id(gate)] = (gate, [t.to(self.device) for t in (gate.fc1, gate.bias1, gate.fc2)])
        return self._weights[id(gate)][1]


def needs_prediction(request: Request, block: int) -> bool:
    """True when the block's decision is open and the request's policy would ask the block's gate."""
    policy = request.policy
    return len(request.bits) <= block and isinstance(policy, UtilityPolicy) and policy.asks(block, request.gate_tokens)
