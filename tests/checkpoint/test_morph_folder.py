"""Morph folders and packed deltas."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from morph.checkpoint import open_model
from morph.checkpoint.delta import FIRST_DELTA, pack_delta, quantise_rows, read_first_delta
from morph.checkpoint.safetensors_file import SafetensorsFiles
from morph.config import FORMAT_VERSION, ModelConfig, SSMConfig
from morph.errors import CorruptFile, UnsupportedModel
from morph.model.model import MorphModel
from tests.checkpoint.files import Tensors, write_gguf, write_hf
from tests.tiny import tiny_config, tiny_model, tiny_tensors


def write_morph(folder: Path, config: ModelConfig, base: dict[str, Any], delta: list[str]) -> Path:
    meta = {
        "model_type": "morph", "format_version": FORMAT_VERSION, "name": "tiny", "revision": "r9",
        "model": config.to_dict(), "base": base, "delta": delta,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(meta))
    return folder


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_base_and_packed_delta_are_one_model(kind: str, tmp_path: Path) -> None:
    config = tiny_config(window=32)
    base, delta = tiny_tensors(config)
    names = pack_delta(delta, tmp_path, file_limit=60_000)
    assert len(names) > 2 and names[0] == f"delta-00001-of-{len(names):05d}.safetensors"
    (tmp_path / "base").mkdir()
    plain = tiny_config(ssm=False)
    file = "base/m.gguf" if kind == "gguf" else "base"
    if kind == "gguf":
        write_gguf(tmp_path / file, plain, base)
    else:
        write_hf(tmp_path / file, plain, base)
    source = open_model(write_morph(tmp_path, config, {"kind": kind, "file": file}, names))
    assert source.config == config and source.tokenizer_dir == tmp_path
    assert sorted(source.names()) == sorted([*base, *delta])
    for name, tensor in base.items():
        assert torch.equal(source.get(name), tensor)
    for name, tensor in delta.items():
        assert source.shape(name) == tuple(tensor.shape)
        # Half a step of an int8 row, or float16 rounding.
        assert (source.get(name) - tensor).abs().max() <= tensor.abs().max() / 127 * 0.51, name
    MorphModel.from_source(source, source.config)


def test_gates_and_all_weights_in_the_folder_itself(tmp_path: Path) -> None:
    source = open_model(tiny_model(tmp_path / "m"))
    assert source.has("blocks.3.gate.fc1.weight") and source.get("blocks.3.gate.fc2.bias").shape == (1,)
    assert source.meta["gate"]["policy"] == "utility"
    assert not source.has("no.such.tensor")
    with pytest.raises(CorruptFile, match=r"no\.such\.tensor.*morph pull --force tiny@r0"):
        source.get("no.such.tensor")


def test_static_blocks_need_only_their_own_mixer(tmp_path: Path) -> None:
    kinds = ("attention", "ssm", "adaptive", "ssm")
    config = tiny_config(block_kinds=kinds)
    base, delta = tiny_tensors(config)
    tensors = {n: t for n, t in base.items() if "self_attn" not in n or n.split(".")[2] in "02"}
    tensors |= {n: t for n, t in delta.items() if n.split(".")[1] != "0"}
    save_file(tensors, tmp_path / "w.safetensors")
    write_morph(tmp_path, config, {}, ["w.safetensors"])
    assert len(open_model(tmp_path).names()) == len(tensors)
    save_file({n: t for n, t in tensors.items() if "blocks.3.ssm.gain" not in n}, tmp_path / "w.safetensors")
    with pytest.raises(CorruptFile, match=r"blocks\.3\.ssm\.gain.*morph pull --force tiny@r9"):
        open_model(tmp_path)


def test_a_state_per_kv_head_changes_the_expected_shapes(tmp_path: Path) -> None:
    config = tiny_config()
    _, delta = tiny_tensors(config)
    folder = tiny_model(tmp_path / "m", state_heads="kv", gates=False)
    save_file(delta, folder / "delta-00001-of-00001.safetensors")
    with pytest.raises(CorruptFile, match=r"ab\.weight' has shape \(8, 64\), the config wants \(4, 64\)"):
        open_model(folder)


def test_newer_formats_missing_bases_and_strange_keys_are_refused(tmp_path: Path) -> None:
    config = tiny_config()
    folder = write_morph(tmp_path, config, {"kind": "gguf", "file": "base/m.gguf"}, [])
    with pytest.raises(CorruptFile, match=r"base/m\.gguf is missing; fetch it again with `morph pull --force tiny@r9`"):
        open_model(folder)
    good = json.loads((folder / "config.json").read_text())
    for change, error, message in (
        ({"format_version": 2}, UnsupportedModel, "format version 2"),
        ({"base": {"kind": "zip", "file": "x"}}, UnsupportedModel, "'zip'"),
        ({"model": good["model"] | {"new": 1}}, UnsupportedModel, "'new'"),
        ({"model": {"vocab_size": 3}}, CorruptFile, "does not describe a model"),
        (
            {"model": good["model"] | {"rope_scaling": {"rope_type": "llama3"}}, "base": {}},
            CorruptFile,
            "no tensor",
        ),
    ):
        (folder / "config.json").write_text(json.dumps(good | change))
        with pytest.raises(error, match=message):
            open_model(folder)


# ---- delta packing


def test_clipped_int8_rows_are_at_least_as_good_as_plain_ones() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 576)
    weight[3, 5] = 20.0
    weight[7] = 0.0
    rows, scale = quantise_rows(weight)
    plain = weight.abs().amax(1) / 127
    worst = ((weight / plain[:, None]).round() * plain[:, None]).nan_to_num() - weight
    error = rows.float() * scale[:, None] - weight
    assert rows.dtype == torch.int8 and scale.dtype == torch.float32
    assert (error.square().sum(1) <= worst.square().sum(1) + 1e-9).all()
    assert not error[7].any()


def test_small_tensors_stay_in_floats(tmp_path: Path) -> None:
    delta = tiny_tensors(tiny_config())[1]
    stored = load_file(tmp_path / pack_delta(delta, tmp_path)[0])
    kinds = {name.removeprefix("blocks.0.ssm."): t.dtype for name, t in stored.items() if "blocks.0." in name}
    assert kinds["qkv.weight.q8"] == torch.int8 and kinds["qkv.weight.scale"] == torch.float32
    assert kinds["conv.weight"] == kinds["ab.weight"] == torch.float16
    assert kinds["gain"] == kinds["ab.bias"] == torch.float32


def test_scales_stay_beside_their_rows_and_their_loss_is_noticed(tmp_path: Path) -> None:
    delta = tiny_tensors(tiny_config())[1]
    for name in pack_delta(delta, tmp_path, file_limit=1):
        stored = load_file(tmp_path / name)
        assert all(f"{n.removesuffix('.q8')}.scale" in stored for n in stored if n.endswith(".q8"))
    save_file({"x.q8": torch.zeros(2, 2, dtype=torch.int8)}, tmp_path / "x.safetensors")
    with pytest.raises(CorruptFile, match=r"x\.q8 has no scales"):
        SafetensorsFiles([tmp_path / "x.safetensors"])


def first_delta(config: ModelConfig) -> tuple[Tensors, Tensors]:
    """A delta under the names of an early run, and under Morph's."""
    own = tiny_tensors(config)[1]
    short = {long: name for name, long in FIRST_DELTA.items()}
    early = {}
    for name, tensor in own.items():
        _, block, rest = name.split(".", 2)
        key = short[rest.removeprefix("ssm.")]
        early[f"{block}.{key}"] = tensor.unsqueeze(1).contiguous() if key == "cw" else tensor
    return early, own


def test_an_early_delta_is_read_under_the_names_of_a_folder(tmp_path: Path) -> None:
    early, own = first_delta(tiny_config(ssm=True))
    save_file(early, tmp_path / "d.safetensors")
    found = read_first_delta(tmp_path / "d.safetensors")
    assert found.keys() == own.keys() and all(torch.equal(found[n], t) for n, t in own.items())
    save_file(early | {"0.zz": torch.zeros(1)}, tmp_path / "d.safetensors")
    with pytest.raises(UnsupportedModel, match=r"'0\.zz'"):
        read_first_delta(tmp_path / "d.safetensors")
    with pytest.raises(CorruptFile, match="no\\.safetensors"):
        read_first_delta(tmp_path / "no.safetensors")


# ---- memory


def test_reading_all_tensors_needs_about_one_in_memory(tmp_path: Path) -> None:
    """Peak resident memory of a process that reads a GGUF model tensor by tensor."""
    config = tiny_config(
        ssm=False, hidden_size=512, intermediate_size=1024, num_blocks=12, vocab_size=12000, head_dim=128
    )
    path = write_gguf(tmp_path / "m.gguf", config, tiny_tensors(config)[0], kind="F16")
    script = """
import sys, torch
torch.set_num_threads(1)
from morph.checkpoint.gguf_file import GGUFFile
from pathlib import Path
file = GGUFFile(Path(sys.argv[1]))
file.get("model.norm.weight")
def private():
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(l.split()[1]) for l in lines if l.startswith("RssAnon")) / 1024
before, worst = private(), 0.0
for name in file.names():
    tensor = file.get(name)
    worst = max(worst, private())
print(worst - before)
"""
    run = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True, timeout=120
    )
    largest = 12000 * 512 * 4 / 2**20
    assert float(run.stdout) < largest + 25, f"{run.stdout} MB beyond the start, largest tensor {largest:.0f} MB"


def test_a_window_needs_its_mix(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m", gates=False)
    meta = json.loads((folder / "config.json").read_text())
    meta["model"]["ssm"] = SSMConfig(window=32, gate_rank=32).__dict__
    (folder / "config.json").write_text(json.dumps(meta))
    with pytest.raises(CorruptFile, match=r"blocks\.0\.ssm\.mix"):
        open_model(folder)
