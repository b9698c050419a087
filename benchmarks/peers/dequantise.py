"""Write a GGUF model as a Hugging Face folder in bfloat16, for peers that cannot read the GGUF.

    python benchmarks/peers/dequantise.py base/SmolLM2-135M-Instruct.Q4_1.gguf out/smollm2-hf

The values are the ones the quantised file stands for, rounded to bfloat16: every peer and Morph serve
the same model. Needs transformers, accelerate and gguf (peers/setup_vllm_cpu.sh installs them).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase


def dequantise(gguf: Path, folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Read `gguf`, save model (safetensors, bfloat16) and tokenizer to `folder`, and return both."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # transformers refuses to save what came from a GGUF file, although its weights are plain tensors
    # by now: move them to a model that has no quantiser.
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def sample_answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str, max_tokens: int = 48
) -> str:
    """Greedy answer to one chat question: a look at whether the written model is sane."""
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return str(answer).strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path, help="the quantised model file")
    parser.add_argument("folder", type=Path, help="where the Hugging Face folder goes")
    arguments = parser.parse_args()
    dequantise(arguments.gguf, arguments.folder)
    # Read back from disk: the check is of what the peers will load.
    model = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    question = "What is the capital of France?"
    print(f"{question} -> {sample_answer(model, tokenizer, question)}")


if __name__ == "__main__":
    main()
