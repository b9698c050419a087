"""The models that come with the package, and what is said about models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from morph.checkpoint.safetensors_file import SafetensorsFiles
from morph.checkpoint.shapes import delta_shapes
from morph.config import FORMAT_VERSION, ModelConfig
from morph.errors import ModelNotFound
from morph.hub import info
from morph.hub.registry import ENTRIES, LATEST, find
from tests.checkpoint.files import write_gguf
from tests.tiny import tiny_config, tiny_model, tiny_tensors


@pytest.mark.parametrize("key", ENTRIES)
def test_shipped_files_are_whole_small_and_fit_the_registry(key: tuple[str, str]) -> None:
    entry = ENTRIES[key]
    meta = json.loads((entry.data / "config.json").read_text())
    assert (meta["name"], meta["revision"]) == key and meta["format_version"] == FORMAT_VERSION
    assert meta["model_type"] == "morph" and meta["architectures"] == ["MorphForCausalLM"]
    assert meta["base"]["sha256"] == entry.base.sha256 and meta["base"]["source"] == entry.base.requirement
    assert meta["base"]["file"] == f"base/{entry.base.filename}" and entry.hub.filename == entry.base.filename
    config = ModelConfig.from_dict(meta["model"])
    files = SafetensorsFiles(entry.data / name for name in meta["delta"])
    assert {name: files.shape(name) for name in files.names()} == delta_shapes(config)
    sizes = [(entry.data / name).stat().st_size for name in meta["delta"]]
    assert max(sizes) <= 16e6 and sum(sizes) <= 30e6
    assert (entry.data / "README.md").is_file()


def test_the_newest_revision_is_the_default() -> None:
    for name, revision in LATEST.items():
        assert find(name) == find(name, revision) == find(f"{name}@{revision}")
    with pytest.raises(ModelNotFound):
        find("")


def test_info_counts_parts_and_memory(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m", window=32)
    facts = info(folder)
    base, delta = tiny_tensors(tiny_config(window=32))
    assert facts.base_parameters == sum(t.numel() for t in base.values())
    assert facts.delta_parameters == sum(t.numel() for t in delta.values())
    assert facts.gate_parameters == 4 * (32 * 129 + 32 + 32 + 1)
    assert (facts.name, facts.revision, facts.adaptive_blocks, facts.window) == ("tiny", "r0", 4, 32)
    # K and V of 2 kv heads of 32 in bfloat16; states of 4 heads and the conv tail in float32, and the ring.
    assert facts.kv_bytes_per_token_per_block == 2 * 2 * 32 * 2
    assert facts.state_bytes_per_block == 4 * 32 * 32 * 4 + 3 * (4 + 2 * 2) * 32 * 4 + 32 * 256
    n, state, kv = facts.break_even_tokens, facts.state_bytes_per_block, facts.kv_bytes_per_token_per_block
    assert n is not None and (n - 1) * kv <= state < n * kv
    assert facts.budgets == (0.0, 0.5, 1.0) and facts.files["config.json"] > 100


def test_info_of_a_plain_model_has_no_ssm(tmp_path: Path) -> None:
    config = tiny_config(ssm=False)
    facts = info(write_gguf(tmp_path / "plain.gguf", config, tiny_tensors(config)[0]))
    assert (facts.name, facts.delta_parameters, facts.adaptive_blocks) == ("plain", 0, 0)
    assert facts.state_bytes_per_block is None and facts.break_even_tokens is None and facts.window is None
    assert list(facts.files) == ["plain.gguf"]


def test_transformers_reads_the_config_of_a_folder_and_writes_it_back(tmp_path: Path) -> None:
    from transformers import AutoConfig

    from morph.hub.hf_config import MorphConfig

    folder = tiny_model(tmp_path / "m")
    config = AutoConfig.from_pretrained(folder)
    assert isinstance(config, MorphConfig) and config.model_type == "morph"
    assert config.model_config == tiny_config()
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (64, 4, 4)
    assert (config.num_key_value_heads, config.vocab_size, config.max_position_embeddings) == (2, 300, 512)
    assert config.eos_token_id == 299 and config.tie_word_embeddings is True
    config.save_pretrained(tmp_path / "again")
    own, again = (json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "again"))
    assert {key: again[key] for key in own} == own
    assert MorphConfig().model is None
