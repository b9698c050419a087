"""One face for every kind of model on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from morph.checkpoint.gguf_file import GGUFFile, sha256_of
from morph.checkpoint.safetensors_file import SafetensorsFiles, open_hf_folder, read_json
from morph.config import FORMAT_VERSION, ModelConfig
from morph.errors import CorruptFile, ModelNotFound, UnsupportedModel


class ModelSource:
    """A model on disk: its shape, its metadata and its tensors, one at a time.

    Attributes:
        config: shape.
        meta: `config.json` of a Morph folder, else a minimum with the name.
        tokenizer_dir: folder with `tokenizer.json`.
    """

    def __init__(
        self, config: ModelConfig, meta: dict[str, Any], base: Any, extra: SafetensorsFiles | None, tokenizer_dir: Path
    ) -> None:
        self.config = config
        self.meta = meta
        self.tokenizer_dir = tokenizer_dir
        self._base = base
        self._base_names = set(base.names())
        self._extra = extra

    def names(self) -> list[str]:
        """Names of all tensors."""
        return [*self._base_names, *(self._extra.names() if self._extra else [])]

    def has(self, name: str) -> bool:
        """True when the model has the tensor."""
        return name in self._base_names or (self._extra is not None and self._extra.has(name))

    def get(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """One tensor, dequantised.

        Raises:
            CorruptFile: the model lacks it, or its shape is not what the config says.
        """
        if self._extra is not None and self._extra.has(name):
            tensor = self._extra.get(name, dtype)
        elif name in self._base_names:
            tensor = self._base.get(name, dtype)
        else:
            raise CorruptFile(f"tensor {name} is missing; the model folder is incomplete, fetch it again")
        expected = expected_shape(self.config, name)
        if expected is not None and tuple(tensor.shape) != expected:
            raise CorruptFile(f"tensor {name} has shape {tuple(tensor.shape)}, the config says {expected}")
        return tensor


def expected_shape(config: ModelConfig, name: str) -> tuple[int, ...] | None:
    """Shape that a tensor of this name must have; None for names that are not checked."""
    hidden, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    suffixes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config.vocab_size, hidden),
        "lm_head.weight": (config.vocab_size, hidden),
        "self_attn.q_proj.weight": (config.q_size, hidden),
        "self_attn.k_proj.weight": (config.kv_size, hidden),
        "self_attn.v_proj.weight": (config.kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, config.q_size),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "layernorm.weight": (hidden,),
    }
    if config.ssm is not None:
        states, rank = config.num_state_heads, config.ssm.gate_rank
        suffixes |= {
            "ssm.qkv.weight": (config.qkv_size, hidden),
            "ssm.conv.weight": (config.qkv_size, config.ssm.conv_width),
            "ssm.ab.weight": (2 * states, hidden),
            "ssm.ab.bias": (2 * states,),
            "ssm.gain": (config.num_heads,),
            "ssm.mix": (config.num_heads,),
            "ssm.gate_down.weight": (rank, hidden),
            "ssm.gate_up.weight": (config.q_size, rank),
            "ssm.gate_up.bias": (config.q_size,),
            "ssm.out.weight": (hidden, config.q_size),
        }
    for suffix, shape in suffixes.items():
        if name.endswith(suffix) and "q_norm" not in suffix and "k_norm" not in suffix and "_norm" not in name:
            return shape
    return (head,) if name.endswith(("q_norm.weight", "k_norm.weight")) else None


def open_model(path: str | Path) -> ModelSource:
    """Open a Morph folder, a Hugging Face folder or a GGUF file.

    Raises:
        ModelNotFound: nothing there.
        CorruptFile, UnsupportedModel: cannot be read.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        file = GGUFFile(path)
        return ModelSource(file.config, {"name": path.stem}, file, None, _gguf_tokenizer(file))
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"no model at {path}: neither a .gguf file nor a folder with config.json")
    meta = read_json(path / "config.json")
    if meta.get("model_type") == "morph":
        return _open_morph(path, meta)
    config, files = open_hf_folder(path)
    return ModelSource(config, {"name": path.name}, files, None, path)


def _open_morph(path: Path, meta: dict[str, Any]) -> ModelSource:
    version = meta.get("format_version")
    if version != FORMAT_VERSION:
        raise UnsupportedModel(f"{path}: format version {version!r}, this Morph reads {FORMAT_VERSION}; update it")
    config = ModelConfig.from_dict(meta["model"])
    base: Any = None
    if meta.get("base"):
        file = path / meta["base"]["file"]
        if not file.exists():
            raise CorruptFile(f"{path}: the base {file.name} is missing; fetch it with `morph pull {meta.get('name')}`")
        base = GGUFFile(file) if file.suffix == ".gguf" else open_hf_folder(file)[1]
    names = [*meta.get("weights", []), *meta.get("delta", [])]
    if meta.get("gate"):
        names.append("gate.safetensors")
    extra = SafetensorsFiles(path / name for name in names)
    return ModelSource(config, meta, base if base is not None else SafetensorsFiles([]), extra, path)


def _gguf_tokenizer(file: GGUFFile) -> Path:
    """Folder with the tokenizer of a bare GGUF file, made once per content."""
    from morph.hub.paths import cache_home

    folder = cache_home() / "tokenizers" / sha256_of(file.path)[:16]
    if not (folder / "tokenizer.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_tokenizer(folder)
    return folder
