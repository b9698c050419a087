"""Hugging Face folders, against transformers' own models."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from morph.checkpoint import open_model
from morph.errors import CorruptFile, ModelNotFound, UnsupportedModel
from morph.model.model import MorphModel
from tests.checkpoint.files import write_hf
from tests.tiny import tiny_config, tiny_tensors

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Llama", {"tie_word_embeddings": True}),
        ("Llama", {"rope_parameters": {**LLAMA3, "rope_theta": 5000.0}}),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
        ("Mistral", {"sliding_window": None}),
        ("Qwen3", {"head_dim": 32}),
    ],
)
def test_logits_equal_those_of_transformers(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    reference = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for name, parameter in reference.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.1)
    reference.save_pretrained(tmp_path)
    source = open_model(tmp_path)
    model = MorphModel.from_source(source, source.config)
    tokens = torch.randint(0, 97, (2, 150))
    with torch.no_grad():
        expected = reference(tokens).logits
        assert torch.allclose(model(tokens), expected, atol=2e-5), (model(tokens) - expected).abs().max()
    assert source.config.eos_token_ids == (2,) and source.config.ssm is None


def test_shards_are_one_model(tmp_path: Path) -> None:
    config = tiny_config(ssm=False)
    tensors = tiny_tensors(config)[0]
    source = open_model(write_hf(tmp_path / "m", config, tensors, shards=3))
    assert all(torch.equal(source.get(name), tensor) for name, tensor in tensors.items())
    assert source.tokenizer_dir == tmp_path / "m" and source.meta["name"] == "m"
    (tmp_path / "m" / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CorruptFile, match=r"model-00002-of-00003\.safetensors is missing.*morph pull --force"):
        open_model(tmp_path / "m")


def test_tensors_of_another_dtype_are_converted_when_read(tmp_path: Path) -> None:
    config = tiny_config(ssm=False)
    tensors = {name: tensor.bfloat16() for name, tensor in tiny_tensors(config)[0].items()}
    source = open_model(write_hf(tmp_path, config, tensors))
    name = "model.layers.0.mlp.up_proj.weight"
    assert source.get(name).dtype == torch.float32 and torch.equal(source.get(name), tensors[name].float())
    assert source.get(name, torch.bfloat16).dtype == torch.bfloat16


def test_end_tokens_of_the_generation_config_count(tmp_path: Path) -> None:
    config = tiny_config(ssm=False)
    folder = write_hf(tmp_path, config, tiny_tensors(config)[0], eos_token_id=5)
    assert open_model(folder).config.eos_token_ids == (5,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert open_model(folder).config.eos_token_ids == (5, 7)


def test_a_sliding_window_limits_the_context_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = tiny_config(ssm=False)
    folder = write_hf(tmp_path, config, tiny_tensors(config)[0], architecture="MistralForCausalLM", sliding_window=128)
    with caplog.at_level(logging.WARNING):
        assert open_model(folder).config.max_context == 128
    assert "128" in caplog.text


def test_a_tied_head_that_is_stored_again_is_ignored_and_buffers_too(tmp_path: Path) -> None:
    config = tiny_config(ssm=False)
    tensors = tiny_tensors(config)[0]
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16),
    }
    assert open_model(write_hf(tmp_path, config, tensors | extra)).config.tie_embeddings


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "'MambaForCausalLM' is not supported; use one of LlamaForCausalLM",
        ),
        ({"architectures": []}, "'none' is not supported"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"partial_rotary_factor": 0.5}, "part of the head"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn'"),
    ],
)
def test_variants_that_morph_does_not_run_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = tiny_config(ssm=False)
    with pytest.raises(UnsupportedModel, match=message):
        open_model(write_hf(tmp_path, config, tiny_tensors(config)[0], **changes))


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    config = tiny_config(ssm=False)
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)}
    with pytest.raises(UnsupportedModel, match=r"q_proj\.bias.*would change the results"):
        open_model(write_hf(tmp_path, config, tiny_tensors(config)[0] | bias))


def test_a_wrong_shape_names_tensor_found_and_expected(tmp_path: Path) -> None:
    config = tiny_config(ssm=False)
    tensors = tiny_tensors(config)[0]
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(96, 63)
    with pytest.raises(CorruptFile, match=r"layers\.1\.mlp\.up_proj\.weight' has shape \(96, 63\).*wants \(96, 64\)"):
        open_model(write_hf(tmp_path, config, tensors))


def test_missing_tensors_are_counted(tmp_path: Path) -> None:
    config = tiny_config(ssm=False)
    tensors = {name: t for name, t in tiny_tensors(config)[0].items() if ".layers.2.mlp" not in name}
    with pytest.raises(CorruptFile, match=r"layers\.2\.mlp\.gate_proj\.weight' and 2 more"):
        open_model(write_hf(tmp_path, config, tensors))


def test_a_cut_file_is_corrupt_and_says_what_to_do(tmp_path: Path) -> None:
    config = tiny_config(ssm=False)
    folder = write_hf(tmp_path, config, tiny_tensors(config)[0])
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(CorruptFile, match=r"model\.safetensors.*morph pull --force"):
            open_model(folder)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    config = tiny_config(ssm=False)
    folder = write_hf(tmp_path, config, tiny_tensors(config)[0])
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="convert them to safetensors"):
        open_model(folder)


def test_broken_config_files_are_named(tmp_path: Path) -> None:
    config = tiny_config(ssm=False)
    folder = write_hf(tmp_path, config, tiny_tensors(config)[0])
    data = json.loads((folder / "config.json").read_text())
    del data["num_hidden_layers"]
    (folder / "config.json").write_text(json.dumps(data))
    with pytest.raises(CorruptFile, match="num_hidden_layers"):
        open_model(folder)
    for text in ("{", "[]"):
        (folder / "config.json").write_text(text)
        with pytest.raises(CorruptFile, match=r"config\.json"):
            open_model(folder)


def test_nothing_there_is_said(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", tmp_path / "none.gguf"):
        with pytest.raises(ModelNotFound, match="no model at"):
            open_model(path)
