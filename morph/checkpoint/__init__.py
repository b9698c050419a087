"""Reading models: Morph folders, Hugging Face safetensors folders and GGUF files."""

from morph.checkpoint.source import ModelSource, open_model
from morph.checkpoint.tokenizer import ChatTokenizer, load_tokenizer

__all__ = ["ChatTokenizer", "ModelSource", "load_tokenizer", "open_model"]
