"""Write a GGUF model as a Hugging Face folder in bfloat16, for peers that cannot read the GGUF.

    python benchmarks/peers/dequantise.py base/SmolLM2-135M-Instruct.Q4_1.gguf out/smollm2-hf

The values are the ones the quantised file stands for, rounded to bfloat16: every peer and Morph serve the same
model. Needs transformers, accelerate and gguf (peers/setup_vllm_cpu.sh installs them).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import transformers

# transformers' factories are untyped.
Model: Any = transformers.AutoModelForCausalLM
Tokenizer: Any = transformers.AutoTokenizer


def dequantise(gguf: Path, folder: Path) -> None:
    """Read `gguf`; save the model (safetensors, bfloat16) and its tokenizer to `folder`."""
    read = Model.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # transformers refuses to save what came from a GGUF file, although its weights are plain tensors by now: move
    # them to a model that has no quantiser.
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = Model.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    Tokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def sample_answer(folder: Path, question: str, max_tokens: int = 48) -> str:
    """Greedy answer to one chat question by the model as it is on disk: a look at whether it is sane."""
    model, tokenizer = Model.from_pretrained(folder, dtype=torch.bfloat16), Tokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def main() -> None:
    """Dequantise and print one answer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("gguf", type=Path, help="the quantised model file")
    parser.add_argument("folder", type=Path, help="where the Hugging Face folder goes")
    arguments = parser.parse_args()
    dequantise(arguments.gguf, arguments.folder)
    question = "What is the capital of France?"
    print(f"{question} -> {sample_answer(arguments.folder, question)}")


if __name__ == "__main__":
    main()
