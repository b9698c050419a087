"""A converted model opened for training: frozen base in the compute dtype, float32 mixers that learn."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from morph.checkpoint import ModelSource, open_model
from morph.checkpoint.delta import FIRST_DELTA, read_first_delta
from morph.checkpoint.safetensors_file import SafetensorsFiles
from morph.checkpoint.shapes import delta_shapes
from morph.config import BlockKind, ModelConfig
from morph.errors import InvalidRequest, ModelNotFound, UnsupportedModel
from morph.model.model import MorphModel


class _Pair:
    """Mixers of the converted model, everything else of the teacher."""

    def __init__(self, mixers: ModelSource, base: ModelSource) -> None:
        self.mixers, self.base = mixers, base

    def has(self, name: str) -> bool:
        """As `TensorSource`."""
        return (self.mixers if name.startswith("blocks.") else self.base).has(name)

    def get(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """As `TensorSource`."""
        return (self.mixers if name.startswith("blocks.") else self.base).get(name, dtype)


def open_converted(folder: Path, teacher: Path | None = None) -> tuple[ModelSource, ModelSource]:
    """The converted model and its teacher, which is its own base unless another is named.

    Raises:
        UnsupportedModel: it has no mixers, or blocks without attention and no teacher, or a teacher of another shape.
    """
    source = open_model(folder)
    if not source.config.has_ssm:
        raise UnsupportedModel(f"{folder} has no ssm mixers; make some with `morph convert {folder} --out DIR`")
    if teacher is None:
        if "ssm" in source.config.block_kinds:
            block = source.config.block_kinds.index("ssm")
            raise UnsupportedModel(f"block {block} of {folder} has no attention to learn from; name --teacher BASE")
        return source, source
    base = open_model(teacher)
    ours, theirs = (
        replace(c, ssm=None, block_kinds=(), bos_token_id=None, eos_token_ids=()) for c in (source.config, base.config)
    )
    if ours != theirs:
        raise UnsupportedModel(f"teacher {teacher} has another shape than {folder}; name the base of it")
    if "ssm" in base.config.block_kinds:
        raise UnsupportedModel(f"teacher {teacher} has blocks without attention; name the base itself")
    return source, base


def training_model(source: ModelSource, base: ModelSource, dtype: torch.dtype, device: torch.device) -> MorphModel:
    """The model with all its attention; only the mixers require gradients.

    Args:
        dtype: of the base; mixers are float32.
    """
    kinds: tuple[BlockKind, ...] = tuple("adaptive" if kind == "ssm" else kind for kind in source.config.block_kinds)
    with torch.device("meta"):
        model = MorphModel(replace(source.config, block_kinds=kinds))
    model = model.to_empty(device=device).to(dtype)
    for block in model.layers:
        if block.ssm is not None:
            block.ssm.float()
    model.load_source(_Pair(source, base))
    model.requires_grad_(False)
    for parameter in mixer_parameters(model).values():
        parameter.requires_grad_(True)
    return model


def mixer_parameters(model: MorphModel) -> dict[str, nn.Parameter]:
    """What is trained, under the names of a model folder."""
    return {name: parameter for name, parameter in model.named_parameters() if ".ssm." in name}


def fingerprint(source: ModelSource) -> str:
    """What tells this model's shape and base from others': a digest of the shape and of some of the base's weights."""
    digest = hashlib.sha256(json.dumps(source.config.to_dict(), sort_keys=True).encode())
    for name in ("model.norm.weight", "model.layers.0.mlp.down_proj.weight"):
        digest.update(source.get(name).float().contiguous().numpy().tobytes())
    return digest.hexdigest()


@torch.no_grad()
def load_mixers(parameters: dict[str, nn.Parameter], path: Path, config: ModelConfig) -> None:
    """Begin from another delta: a model folder, a folder or a file of `blocks.*.ssm.*` tensors, or an early run's file.

    Raises:
        ModelNotFound: nothing there. InvalidRequest: it is of a model of another shape.
    """
    files = sorted(path.glob("delta-*.safetensors")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise ModelNotFound(f"no mixers at {path}; give a .safetensors file or a folder with delta-*.safetensors")
    reader = SafetensorsFiles(files)
    early = len(files) == 1 and any(name.partition(".")[2] in FIRST_DELTA for name in reader.names())
    tensors = read_first_delta(files[0]) if early else {name: reader.get(name) for name in reader.names()}
    for name, shape in delta_shapes(config).items():
        found = tuple(tensors[name].shape) if name in tensors else None
        if found != shape:
            what = "is missing" if found is None else f"has shape {found}"
            raise InvalidRequest(
                f"{path}: tensor {name!r} {what}, this model wants {shape}; give mixers of a model with the same base, "
                "window and state heads"
            )
    strange = [name for name in tensors if name not in parameters]
    if strange:
        raise InvalidRequest(f"{path}: tensor {strange[0]!r} has no place in this model (another window or base?)")
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name].to(parameter.device))
