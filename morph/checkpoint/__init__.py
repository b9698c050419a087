"""Reading models: Morph folders, Hugging Face safetensors folders and GGUF files."""

from morph.checkpoint.source import ModelSource, open_model

__all__ = ["ModelSource", "open_model"]
