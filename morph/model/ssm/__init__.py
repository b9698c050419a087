"""SSM mixers, one module per family: `SSM_KINDS` maps `SSMConfig.kind` to its class."""

from __future__ import annotations

from morph.config import ModelConfig
from morph.errors import UnsupportedModel
from morph.model.ssm.gated_delta_net import GatedDeltaNet

SSM_KINDS = {"gated_delta_net": GatedDeltaNet}


def make_ssm(config: ModelConfig) -> GatedDeltaNet:
    """The mixer that the config names.

    Raises:
        UnsupportedModel: no ssm config, or a kind that this Morph does not know.
    """
    kind = config.ssm.kind if config.ssm is not None else None
    if kind not in SSM_KINDS:
        raise UnsupportedModel(f"ssm kind {kind!r} is unknown, want one of {sorted(SSM_KINDS)}; update Morph")
    return SSM_KINDS[kind](config)
