"""From a model folder to a running engine."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from morph.cache.context_cache import ContextCache
from morph.cache.cost import PrefillCost
from morph.cache.eviction import make_evictor
from morph.checkpoint import ModelSource, open_model
from morph.checkpoint.tokenizer import load_tokenizer
from morph.config import EngineConfig, ModelConfig
from morph.engine.engine import Engine
from morph.engine.runner import ModelRunner
from morph.engine.weights import load_weights
from morph.errors import InvalidRequest, OutOfMemory
from morph.gate.policy import Gates
from morph.kernels import get_kernels
from morph.memory.pool import UnitPool
from morph.memory.tables import PageTables, UnitLayout
from morph.model.rope import rope_tables

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MEMORY_SHARE = {"cpu": 0.4, "cuda": 0.85}
"""Share of the free memory that the pool takes at most when no size is given; on CUDA the weights are loaded by then,
and activations of prefill, graphs and the libraries' own buffers need the rest."""


CACHE_SHARE = {"cpu": 0.25, "cuda": 1.0}
"""Share of the pool that the context cache may hold when nothing is said. On a CPU the system hands out the pool's
memory as it is first written, so a smaller cache keeps the process small."""


@dataclass
class LoadedModel:
    """An engine with what belongs to it."""

    engine: Engine
    source: ModelSource
    tokenizer: Any
    name: str
    engine_config: EngineConfig


def available_memory(device: torch.device) -> int:
    """Free bytes for the pool on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def load_engine(path: str | Path, engine_config: EngineConfig, device: str = "cpu") -> LoadedModel:
    """Open a model and build an engine for it.

    Raises:
        ModelNotFound, CorruptFile, UnsupportedModel: the model cannot be read.
        InvalidRequest: a limit that makes no sense for this model.
        OutOfMemory: the pool would not hold one page per block, or the weights do not fit the device.
    """
    try:
        return _load(path, engine_config, device)
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"{path} does not fit the memory of {device}: {error}; lower memory_bytes ({engine_config.memory_bytes}) "
            "or max_requests, or use a smaller model"
        ) from error


def _load(path: str | Path, engine_config: EngineConfig, device: str) -> LoadedModel:
    if engine_config.dtype not in DTYPES:
        raise InvalidRequest(f"dtype {engine_config.dtype!r} is unknown; use float32 or bfloat16", "dtype")
    source = open_model(Path(path))
    config = source.config
    dtype = DTYPES[engine_config.dtype]
    kernels = get_kernels(torch.device(device), dtype, config.num_kv_heads)
    max_context = engine_config.max_context or config.max_context
    if not 2 <= max_context <= config.max_context:
        raise InvalidRequest(f"max_context is {max_context}; use 2 to the model's {config.max_context}", "max_context")
    if engine_config.max_requests < 1:
        raise InvalidRequest(f"max_requests is {engine_config.max_requests}; use at least 1", "max_requests")
    cos, sin = rope_tables(config, max_context)
    cos, sin = cos.to(kernels.device), sin.to(kernels.device)
    weights = load_weights(source, config, kernels, dtype, cos, sin)
    layout = UnitLayout.of(config, dtype, max_context)
    per_block = max(layout.attention_units(max_context), layout.state_units)
    wanted = engine_config.max_requests * config.num_blocks * per_block
    if engine_config.memory_bytes is None:
        units = min(
            wanted, int(available_memory(kernels.device) * MEMORY_SHARE[kernels.device.type]) // layout.unit_bytes
        )
    else:
        units = min(wanted, engine_config.memory_bytes // layout.unit_bytes)
    least = config.num_blocks * max(layout.attention_units(2), layout.state_units)
    if units < least:
        raise OutOfMemory(
            f"the pool would hold {units} units of {layout.unit_bytes} bytes, the smallest request needs {least}; "
            f"give the engine at least {least * layout.unit_bytes / 2**20:.0f} MB of memory"
        )
    pool = UnitPool(units, layout.unit_bytes, kernels.device, engine_config.poison)
    tables = PageTables(pool, layout, config, engine_config.max_requests, kernels.device)
    runner = ModelRunner(config, weights, kernels, tables, cos, sin, engine_config.token_tile)
    if runner.decoder is not None:
        runner.decoder.warm_up(range(1, engine_config.max_requests + 1))
    tokenizer = load_tokenizer(source.tokenizer_dir)
    policy_for = Gates.load(source).policy if source.meta.get("gate") else None
    cache = _context_cache(config, engine_config, pool)
    engine = Engine(config, engine_config, runner, tokenizer, policy_for, max_context, cache)
    name = str(source.meta.get("name") or Path(path).stem)
    return LoadedModel(engine, source, tokenizer, name, replace(engine_config, max_context=max_context))


def _context_cache(config: ModelConfig, engine_config: EngineConfig, pool: UnitPool) -> ContextCache | None:
    share = engine_config.cache_share
    if share is None:
        share = CACHE_SHARE[pool.storage.device.type]
    if not 0 <= share <= 1:
        raise InvalidRequest(
            f"cache_share is {share}; use 0 (no cache) to 1 (all memory that requests leave)", "cache_share"
        )
    if share == 0:
        return None
    most = int(share * pool.num_units)
    return ContextCache(
        pool, PrefillCost(config), most, evictor=make_evictor(engine_config.cache_policy),
        most_aside=max(1 << 20, most * pool.unit_bytes // 4),
    )  # fmt: skip
