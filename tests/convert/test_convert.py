"""Conversion: exact base, neutral mixers, static blocks, figures, and failures that leave nothing behind."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from morph import LLM, SamplingParams
from morph.checkpoint import open_model
from morph.checkpoint.digest import sha256_of
from morph.cli.app import main
from morph.config import SSMConfig
from morph.convert.base import open_base
from morph.convert.convert import convert, converted_config, exact_type
from morph.convert.figures import contexts, figures
from morph.errors import CorruptFile, InvalidRequest, ModelNotFound, MorphError, UnsupportedModel
from morph.hub.describe import info
from morph.kernels.gated_delta import l2_normalise
from morph.model.model import MorphModel
from tests.convert.bases import tiny_base
from tests.tiny import tiny_config, tiny_tensors


@pytest.mark.parametrize("qk_norm", [False, True], ids=["llama", "qwen3"])
def test_all_attention_is_the_base_and_mixers_are_copies(tmp_path: Path, qk_norm: bool) -> None:
    base = tiny_base(tmp_path / "base", qk_norm=qk_norm)
    assert main(["convert", str(base), "--out", str(tmp_path / "out"), "--window", "64", "--gate-rank", "8"]) == 0
    source, plain = open_model(tmp_path / "out"), open_model(base)
    assert source.config.ssm == SSMConfig(window=64, gate_rank=8) and source.meta["base"]["kind"] == "safetensors"
    model = MorphModel.from_source(source, source.config)
    want = MorphModel.from_source(plain, plain.config)
    tokens = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(tokens), want(tokens))
    attention, mixer = model.layers[1].attention, model.layers[1].ssm
    assert attention is not None and mixer is not None
    x = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(1))
    q = attention.q_proj(x).unflatten(-1, (4, 32))
    q = attention.q_norm(q) if qk_norm else q
    ours = l2_normalise(mixer.qkv(x)[..., :128].unflatten(-1, (4, 32)))
    torch.testing.assert_close(ours, l2_normalise(q), atol=5e-3, rtol=0)
    assert torch.equal(mixer.out.weight, attention.o_proj.weight)


def test_converted_model_serves_explicit_layouts_and_says_that_it_has_no_gates(converted_folder: Path) -> None:
    llm = LLM(str(converted_folder), dtype="float32")
    for layout in ("attention", "ssm", "0110"):
        output = llm.generate(["hello"], SamplingParams(max_tokens=4, layout=layout, temperature=0))[0]
        assert len(output.token_ids) > 0
    with pytest.raises(InvalidRequest, match="has no gates"):
        llm.generate(["hello"], SamplingParams(max_tokens=4))


@pytest.fixture
def converted_folder(tmp_path: Path) -> Path:
    base = open_base(str(tiny_base(tmp_path / "base")))
    return convert(base, tmp_path / "converted", converted_config(base.source.config, SSMConfig(gate_rank=8)))


def test_folder_names_its_base_with_checksum_and_licence(converted_folder: Path) -> None:
    meta = json.loads((converted_folder / "config.json").read_text())
    assert meta["base"]["file"] == "base" and len(meta["base"]["sha256"]) == 64 and meta["licence"] == "apache-2.0"
    card = (converted_folder / "README.md").read_text()
    assert meta["base"]["sha256"] in card and "4 adaptive" in card and "not trained" in card
    again = open_base(str(converted_folder))
    assert again.reference["sha256"] == meta["base"]["sha256"] and again.digest() == meta["base"]["sha256"]
    assert info(converted_folder).delta_parameters == figures(open_model(converted_folder).config).delta_parameters


def test_a_converted_model_can_be_converted_anew(converted_folder: Path, tmp_path: Path) -> None:
    base = open_base(str(converted_folder))
    config = converted_config(base.source.config, SSMConfig(window=64, state_heads="kv", gate_rank=4))
    convert(base, tmp_path / "second", config)
    assert open_model(tmp_path / "second").config.num_state_heads == 2


def test_gguf_bases_are_kept_as_they_are(tmp_path: Path) -> None:
    from tests.checkpoint.files import write_gguf

    shape = tiny_config(ssm=False)
    path = write_gguf(tmp_path / "tiny.gguf", shape, tiny_tensors(shape)[0], kind="Q4_1")
    base = open_base(str(path))
    folder = convert(base, tmp_path / "out", converted_config(base.source.config, SSMConfig(gate_rank=4)))
    meta = json.loads((folder / "config.json").read_text())
    assert meta["base"] == {"kind": "gguf", "file": "base/tiny.gguf", "source": "tiny.gguf", "sha256": sha256_of(path)}
    source = open_model(folder)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(source.get(name), open_model(path).get(name))


def test_static_blocks_have_one_mixer(tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base")
    words = ["--static-attention", "0", "--static-ssm", "2-3", "--gate-rank", "8", "--licence", "MIT"]
    assert main(["convert", str(base), "--out", str(tmp_path / "out"), *words]) == 0
    source = open_model(tmp_path / "out")
    assert source.config.block_kinds == ("attention", "adaptive", "ssm", "ssm") and source.meta["licence"] == "MIT"
    assert not source.has("blocks.0.ssm.qkv.weight") and not source.has("model.layers.2.self_attn.q_proj.weight")
    # What is left of the base is exact.
    name = "model.layers.2.mlp.down_proj.weight"
    assert torch.equal(source.get(name), open_model(base).get(name)) and "base" not in source.meta
    llm = LLM(str(tmp_path / "out"), dtype="float32")
    assert llm.generate(["a"], SamplingParams(max_tokens=2, layout="1100"))[0].layout == "1100"


def test_weights_are_kept_in_the_smallest_exact_type() -> None:
    values = torch.tensor([1.0, 0.5])
    assert exact_type(values).dtype == torch.bfloat16
    assert exact_type(torch.tensor([1.0009765625])).dtype == torch.float16
    assert exact_type(torch.tensor([1.0000001])).dtype == torch.float32


def test_impossible_shapes_are_refused() -> None:
    config = tiny_config(ssm=False)
    with pytest.raises(InvalidRequest, match="window is 32; use 0 or 64"):
        converted_config(config, SSMConfig(window=32))
    with pytest.raises(InvalidRequest, match="block 4 does not exist; the model has 0 to 3"):
        converted_config(config, SSMConfig(), [4])
    with pytest.raises(InvalidRequest, match="block 1 is named twice"):
        converted_config(config, SSMConfig(), [1], [1])
    with pytest.raises(InvalidRequest, match="nothing to convert"):
        converted_config(config, SSMConfig(), range(4))


def test_figures_are_counts_of_the_shapes() -> None:
    config = replace(
        tiny_config(), num_heads=9, num_kv_heads=3, head_dim=64, hidden_size=576, intermediate_size=1536, num_blocks=30,
        vocab_size=49152, max_context=8192, ssm=SSMConfig(), block_kinds=(),
    )  # fmt: skip
    facts = figures(config)
    rows = {row.context: row for row in facts.rows}
    # Attention 885k + 1152 n, MLP 2.65M, head 28.3M multiply-adds.
    macs = 30 * (884_736 + 1152 * 4096 + 2_654_208) + 49152 * 576
    assert rows[4096].attention == 2 * macs and rows[4096].decode_saved == pytest.approx(0.49, abs=0.01)
    assert facts.state_bytes_per_block == 9 * 64 * 64 * 4 + 3 * 960 * 4 and facts.kv_bytes_per_token_per_block == 768
    assert facts.break_even_memory == facts.state_bytes_per_block // 768 + 1
    assert rows[512].half == pytest.approx((rows[512].attention + rows[512].ssm) / 2)
    assert contexts(8192) == [512, 1024, 2048, 4096, 8192] and contexts(300) == [300]


# ---- bad input


def test_unknown_architecture_is_refused_without_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tiny_base(tmp_path / "base", architectures=["MambaForCausalLM"])
    assert main(["convert", str(base), "--out", str(tmp_path / "out")]) == 1
    assert "architecture 'MambaForCausalLM' is not supported; use one of Llama" in capsys.readouterr().err
    with pytest.raises(UnsupportedModel):
        open_base(str(base))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


def test_existing_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = tiny_base(tmp_path / "base")
    (tmp_path / "out").mkdir()
    assert main(["convert", str(base), "--out", str(tmp_path / "out")]) == 2
    assert "exists already; choose another --out or remove it" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir()) and len(list(tmp_path.iterdir())) == 2


def test_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    with pytest.raises(ModelNotFound, match=r"neither a .gguf file nor a folder with config.json"):
        open_base(str(tmp_path / "notes"))
    (tmp_path / "notes" / "config.json").write_text("[]")
    with pytest.raises(CorruptFile, match="does not hold a JSON object"):
        open_base(str(tmp_path / "notes"))
    with pytest.raises(ModelNotFound, match="no such path"):
        open_base(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("when", ["before", "while writing"])
def test_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    base = open_base(str(tiny_base(tmp_path / "base")))
    config = converted_config(base.source.config, SSMConfig(gate_rank=8))

    def full(tensors: object, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    if when == "before":
        monkeypatch.setattr("morph.convert.folder.shutil.disk_usage", lambda path: SimpleNamespace(free=1))
        message = r"has 0 MB free, about 1 MB are needed; free some space"
    else:
        monkeypatch.setattr("morph.convert.convert.save_file", full)
        message = r"the disk of .* is full: about 1 MB are needed"
    with pytest.raises(MorphError, match=message):
        convert(base, tmp_path / "out", config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]
