"""GGUF files: types, order of rows, configuration, damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from morph.checkpoint import ModelSource, open_model
from morph.checkpoint.gguf_blocks import TYPES, dequantise
from morph.checkpoint.gguf_file import GGUFFile
from morph.checkpoint.gguf_header import GGUFHeader
from morph.checkpoint.gguf_tokenizer import write_tokenizer
from morph.config import ModelConfig
from morph.errors import CorruptFile, MorphError, UnsupportedModel
from morph.model.model import MorphModel
from morph.model.rope import inverse_frequencies
from tests.checkpoint.files import Tensors, byte_tokenizer, write_gguf, write_hf
from tests.tiny import tiny_config, tiny_tensors

KIND = gguf.GGMLQuantizationType


@pytest.fixture(scope="module")
def model() -> tuple[ModelConfig, Tensors]:
    config = tiny_config(ssm=False, rope_theta=100000.0)
    return config, tiny_tensors(config)[0]


# ---- blocks


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_type_dequantises_to_the_bits_of_the_gguf_package(kind: KIND) -> None:
    rng = np.random.default_rng(0)
    per_block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    columns = 512
    if kind in (KIND.F32, KIND.F16):
        values = rng.standard_normal((5, columns)).astype(np.float32 if kind == KIND.F32 else np.float16)
        raw, expected = values.view(np.uint8), values.astype(np.float32)
    else:
        raw = rng.integers(0, 256, (5, columns // per_block * block_bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            expected = gguf.quants.dequantize(raw, kind).astype(np.float32)
    with np.errstate(all="ignore"):
        found = dequantise(torch.from_numpy(raw.copy()), kind).numpy()
    assert found.shape == (5, columns) and found.dtype == np.float32
    # Random bytes make NaNs too, whose payload may differ.
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_tensors_read_in_pieces_are_those_of_the_file(
    kind: str, model: tuple[ModelConfig, Tensors], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, tensors = model
    monkeypatch.setattr("morph.checkpoint.gguf_file.PIECE", 1000)
    source = open_model(write_gguf(tmp_path / "m.gguf", config, tensors, kind=kind))
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            assert torch.equal(source.get(name), tensor)
            continue
        stored = gguf.quants.quantize(tensor.numpy(), KIND[kind])
        expected = torch.from_numpy(gguf.quants.dequantize(stored, KIND[kind]).astype(np.float32))
        # Blocks lie within rows, so permuting rows and quantising commute.
        assert torch.equal(source.get(name), expected)
        assert torch.equal(source.get(name, torch.bfloat16), expected.bfloat16())


# ---- the same model from both formats


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_gguf_and_safetensors_of_one_model_have_equal_tensors(arch: str, tied: bool, tmp_path: Path) -> None:
    config = tiny_config(ssm=False, qk_norm=arch == "qwen3", tie_embeddings=tied, rope_theta=100000.0)
    tensors = tiny_tensors(config)[0]
    if not tied:
        tensors["lm_head.weight"] = torch.randn(config.vocab_size, config.hidden_size)
    name = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[arch]
    hf = open_model(write_hf(tmp_path / "hf", config, tensors, architecture=name))
    own = open_model(write_gguf(tmp_path / "m.gguf", config, tensors, arch=arch))
    assert own.config.to_dict() | {"bos_token_id": 1} == hf.config.to_dict()
    assert own.config.eos_token_ids == (299,) and own.config.tie_embeddings is tied
    assert sorted(own.names()) == sorted(hf.names())
    for tensor in hf.names():
        assert torch.equal(own.get(tensor), hf.get(tensor)), tensor
    tokens = torch.arange(12)[None]
    one, two = (MorphModel.from_source(s, s.config)(tokens) for s in (own, hf))
    assert torch.equal(one, two)


def test_mixed_types_are_read_by_their_own(model: tuple[ModelConfig, Tensors], tmp_path: Path) -> None:
    config, tensors = model
    kinds = {"model.embed_tokens.weight": "Q8_0", "model.layers.1.mlp.up_proj.weight": "BF16"}
    source = open_model(write_gguf(tmp_path / "m.gguf", config, tensors, kind="Q4_1", kinds=kinds))
    up = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(source.get(up), tensors[up].bfloat16().float())
    for name, tensor in tensors.items():
        assert (source.get(name) - tensor).abs().max() <= 0.15 * tensor.abs().max(), name


def test_eps_and_theta_are_the_decimals_that_were_meant(model: tuple[ModelConfig, Tensors], tmp_path: Path) -> None:
    config, tensors = model
    found = open_model(write_gguf(tmp_path / "m.gguf", config, tensors)).config
    assert (found.rms_norm_eps, found.rope_theta) == (1e-05, 100000.0)


def test_end_of_turn_token_ends_answers_too(model: tuple[ModelConfig, Tensors], tmp_path: Path) -> None:
    config, tensors = model
    tokenizer = byte_tokenizer(config.vocab_size) | {"ggml.eot_token_id": 290}
    found = open_model(write_gguf(tmp_path / "m.gguf", config, tensors, tokenizer=tokenizer)).config
    assert found.eos_token_ids == (299, 290)


# ---- RoPE scaling


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_factors_come_back_as_the_scaling_they_were_made_from(factor: float, tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = tiny_config(ssm=False, rope_theta=500000.0, rope_scaling=scaling)
    plain = tiny_config(ssm=False, rope_theta=500000.0)
    factors = (inverse_frequencies(plain) / inverse_frequencies(config)).numpy()
    path = write_gguf(tmp_path / "m.gguf", config, tiny_tensors(config)[0], extra={"rope_freqs.weight": factors})
    found = open_model(path).config
    assert found.rope_scaling == scaling
    assert torch.allclose(inverse_frequencies(found), inverse_frequencies(config), rtol=1e-6)


def test_other_rope_factors_and_scalings_are_refused(model: tuple[ModelConfig, Tensors], tmp_path: Path) -> None:
    config, tensors = model
    strange = np.linspace(1, 3, config.head_dim // 2, dtype=np.float32)
    path = write_gguf(tmp_path / "a.gguf", config, tensors, extra={"rope_freqs.weight": strange})
    with pytest.raises(UnsupportedModel, match="RoPE factors"):
        open_model(path)
    path = write_gguf(tmp_path / "b.gguf", config, tensors, fields={"rope.scaling.type": "yarn"})
    with pytest.raises(UnsupportedModel, match="'yarn'"):
        open_model(path)
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    found = open_model(write_gguf(tmp_path / "c.gguf", config, tensors, fields=linear)).config
    assert found.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    path = write_gguf(tmp_path / "d.gguf", config, tensors, fields={"rope.dimension_count": 8})
    with pytest.raises(UnsupportedModel, match="part of the head"):
        open_model(path)


# ---- what is refused


def test_another_architecture_is_named_with_those_that_work(model: tuple[ModelConfig, Tensors], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="'mamba' is not supported; use one of llama, qwen3"):
        open_model(write_gguf(tmp_path / "m.gguf", *model, arch="mamba"))


def test_biases_and_experts_are_refused_by_name(model: tuple[ModelConfig, Tensors], tmp_path: Path) -> None:
    bias = {"blk.0.attn_q.bias": np.zeros(8, np.float32)}
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_q\.bias"):
        open_model(write_gguf(tmp_path / "m.gguf", *model, extra=bias))


def test_an_unknown_tensor_type_is_refused_by_name(model: tuple[ModelConfig, Tensors], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"norm\.weight has type F64"):
        open_model(write_gguf(tmp_path / "m.gguf", *model, extra={"blk.0.norm.weight": np.zeros(4)}))


def test_a_missing_field_is_named(model: tuple[ModelConfig, Tensors], tmp_path: Path) -> None:
    with pytest.raises(CorruptFile, match=r"llama\.block_count is missing"):
        open_model(write_gguf(tmp_path / "m.gguf", *model, fields={"block_count": None}))


def test_a_missing_tensor_is_named(model: tuple[ModelConfig, Tensors], tmp_path: Path) -> None:
    config, tensors = model
    name = "model.layers.2.mlp.down_proj.weight"
    fewer = {key: value for key, value in tensors.items() if key != name}
    with pytest.raises(CorruptFile, match=name):
        open_model(write_gguf(tmp_path / "m.gguf", config, fewer))


# ---- damage


def test_a_file_cut_anywhere_is_corrupt_and_says_what_to_do(model: tuple[ModelConfig, Tensors], tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", *model).read_bytes()
    broken = tmp_path / "cut.gguf"
    for size in [0, 3, 8, 20, 24, 100, 1000, 5000, 8000, len(whole) // 2, len(whole) - 200]:
        broken.write_bytes(whole[:size])
        with pytest.raises(CorruptFile, match=r"cut\.gguf.*morph pull --force"):
            open_model(broken)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_damage_to_the_header_never_ends_in_another_error(
    data: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "damage.gguf"
    if not path.exists():
        config = tiny_config(ssm=False)
        write_gguf(path, config, tiny_tensors(config)[0])
    whole = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, 9000))] = data.draw(st.integers(0, 255))
    broken = path.with_name("damaged.gguf")
    broken.write_bytes(whole)
    try:
        file = GGUFFile(broken)
        ModelSource(file.config, {}, [file], path.parent, broken)
        write_tokenizer(file, path.parent / "damaged")
    except MorphError as error:
        assert "damaged.gguf" in str(error)


def test_other_versions_of_the_format_are_refused(model: tuple[ModelConfig, Tensors], tmp_path: Path) -> None:
    whole = bytearray(write_gguf(tmp_path / "m.gguf", *model).read_bytes())
    for version, what in (((1).to_bytes(4, "little"), "version 1"), ((3).to_bytes(4, "big"), "big-endian")):
        whole[4:8] = version
        (tmp_path / "v.gguf").write_bytes(whole)
        with pytest.raises(UnsupportedModel, match=what):
            open_model(tmp_path / "v.gguf")


# ---- the header against the package's reader


def test_fields_and_tensors_equal_those_of_the_package_reader(
    model: tuple[ModelConfig, Tensors], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", *model, kind="Q8_0", fields={"some.floats": [1.5, -2.0]})
    header, reader = GGUFHeader(path), gguf.GGUFReader(path)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            assert header.get(key) == field.contents(), key
    for tensor in reader.tensors:
        entry = header.tensors[tensor.name]
        assert entry.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert header.data_start + entry.offset == tensor.data_offset
        assert entry.kind == int(tensor.tensor_type)
    assert header.get("no.such.field", 7) == 7
