"""Measured rows as the stages keep them: losses and layouts of all, features of some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from morph.gate.answers import Requests
from morph.gate.collect import Measurement
from morph.gate.fit import FeatureRows
from morph.gate.labels import LossModel, fit_losses
from morph.gate.work import WorkFolder


@dataclass
class Part:
    """Rows of one chunk. `feature_rows` says which rows `features` float16 `[kept, blocks, 2 * hidden]` belong to."""

    request: torch.Tensor
    layouts: torch.Tensor
    loss: torch.Tensor
    feature_rows: torch.Tensor
    features: torch.Tensor

    @classmethod
    def of(cls, found: Measurement, keep: torch.Tensor) -> Part:
        """A measurement, with the features of the rows `keep` (indices)."""
        hidden = torch.empty(0, found.layouts.shape[1], 0, dtype=torch.float16)
        features = hidden if found.features is None else found.features[keep.to(found.features.device)].cpu()
        return cls(found.request, found.layouts, found.loss, keep, features)

    def save(self, work: WorkFolder, name: str) -> None:
        """Losses to `name.npz`, features to `name.safetensors`; the losses come last and mean that both are there."""
        if len(self.feature_rows):
            work.write_tensors(f"{name}.safetensors", {"features": self.features})
        work.write_arrays(f"{name}.npz", pack(self) | {"feature_rows": self.feature_rows.numpy()})

    @classmethod
    def load(cls, work: WorkFolder, name: str) -> Part:
        """What `save` kept."""
        arrays = work.read_arrays(f"{name}.npz")
        blocks = int(arrays["blocks"])
        rows = torch.from_numpy(arrays["feature_rows"])
        features = torch.empty(0, blocks, 0, dtype=torch.float16)
        if len(rows):
            features = work.read_tensors(f"{name}.safetensors")["features"]
        layouts = torch.from_numpy(np.unpackbits(arrays["layouts"], axis=1)[:, :blocks].astype(bool))
        request = torch.from_numpy(arrays["request"].astype(np.int64))
        return cls(request, layouts, torch.from_numpy(arrays["loss"]), rows, features)


def pack(part: Part) -> dict[str, Any]:
    """Losses and layouts as small numpy arrays."""
    return {
        "request": part.request.int().numpy(),
        "layouts": np.packbits(part.layouts.numpy(), axis=1),
        "loss": part.loss.numpy(),
        "blocks": np.array(part.layouts.shape[1]),
    }


def joined(parts: Sequence[Part]) -> Part:
    """Parts one after the other; features of different rows go on where the parts that have any follow each other."""
    starts = np.cumsum([0, *(len(part.request) for part in parts)])
    with_features = [part for part in parts if len(part.feature_rows)]
    return Part(
        torch.cat([part.request for part in parts]),
        torch.cat([part.layouts for part in parts]),
        torch.cat([part.loss for part in parts]),
        torch.cat([part.feature_rows + int(start) for part, start in zip(parts, starts, strict=False)]),
        torch.cat([part.features for part in with_features]) if with_features else parts[0].features,
    )


@dataclass
class Fitted:
    """A loss model of measured requests, with what the gates saw of them.

    Attributes:
        ids: request index of each row of the model, ascending.
    """

    ids: list[int]
    losses: LossModel
    rows: FeatureRows


def fit_measured(parts: Sequence[Part], weights: Sequence[float], requests: Requests, device: torch.device) -> Fitted:
    """The loss model of all rows, and the feature rows with each request's probe: the last of them.

    Args:
        weights: how much a row of each part counts.
    """
    whole = joined(parts)
    known = whole.request.unique()
    place = torch.full((len(requests),), -1)
    place[known] = torch.arange(len(known))
    weight = torch.cat([torch.full((len(part.request),), w) for part, w in zip(parts, weights, strict=True)])
    losses = fit_losses(whole.loss, whole.layouts, place[whole.request], len(known), weight)
    owner = place[whole.request[whole.feature_rows]]
    # Not always the same budget's context: requests take turns among their last rows.
    last = torch.zeros(len(known), dtype=torch.long).scatter_reduce(0, owner, torch.arange(len(owner)), "amax")
    turns = torch.arange(len(known)) % 3
    fits = owner[(last - turns).clamp_min(0)] == torch.arange(len(known))
    probe = torch.where(fits, (last - turns).clamp_min(0), last)
    lengths = torch.tensor([len(requests.prompts[r]) for r in known.tolist()])
    rows = FeatureRows(whole.features.to(device), owner, lengths.float().log(), probe)
    return Fitted(known.tolist(), losses, rows)
