"""`AutoConfig` for Morph folders: importing this module registers the model type `morph` with transformers."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from morph.config import FORMAT_VERSION, ModelConfig


class MorphConfig(PretrainedConfig):
    """`config.json` of a Morph folder as a transformers config.

    The folder's own keys (`model`, `base`, `delta`, `gate`, …) are kept as they are; the names that tools expect
    (`hidden_size`, `num_hidden_layers`, …) are read from `model`.

    Raises:
        UnsupportedModel: `model` has keys that this version of Morph does not know.
    """

    model_type = "morph"

    def __init__(
        self, model: dict[str, Any] | None = None, format_version: int = FORMAT_VERSION, **kwargs: Any
    ) -> None:
        self.format_version = format_version
        self.model = model
        if model is not None:
            shape = ModelConfig.from_dict(model)
            eos = list(shape.eos_token_ids)
            self.vocab_size = shape.vocab_size
            self.hidden_size = shape.hidden_size
            self.intermediate_size = shape.intermediate_size
            self.num_hidden_layers = shape.num_blocks
            self.num_attention_heads = shape.num_heads
            self.num_key_value_heads = shape.num_kv_heads
            self.head_dim = shape.head_dim
            self.max_position_embeddings = shape.max_context
            self.rms_norm_eps = shape.rms_norm_eps
            kwargs.setdefault("tie_word_embeddings", shape.tie_embeddings)
            kwargs.setdefault("bos_token_id", shape.bos_token_id)
            kwargs.setdefault("eos_token_id", eos[0] if len(eos) == 1 else eos or None)
        super().__init__(**kwargs)

    @property
    def model_config(self) -> ModelConfig:
        """The shape as Morph uses it."""
        return ModelConfig.from_dict(self.model or {})


AutoConfig.register("morph", MorphConfig, exist_ok=True)
