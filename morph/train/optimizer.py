"""AdamW over float32 masters with one flat gradient, clipping, cosine learning rate and a moving average."""

from __future__ import annotations

import math

import torch
from torch import nn

from morph.train.config import StageConfig

BETAS = (0.9, 0.95)


class MixerOptimizer:
    """Optimises the mixers' parameters.

    Gradients are views of one float32 buffer: one all-reduce, one norm, one zeroing, whatever the number of tensors.

    Args:
        parameters: float32, by name. Vectors, and the small conv, learn `vector_lr` times faster than matrices.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], config: StageConfig) -> None:
        self.parameters, self.config = parameters, config
        device = next(iter(parameters.values())).device
        self.gradient = torch.zeros(sum(p.numel() for p in parameters.values()), device=device)
        offset = 0
        for parameter in parameters.values():
            parameter.grad = self.gradient[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        fast = [p for name, p in parameters.items() if is_vector(name, p)]
        slow = [p for name, p in parameters.items() if not is_vector(name, p)]
        groups = [{"params": slow, "factor": 1.0}, {"params": fast, "factor": config.vector_lr}]
        self.adam = torch.optim.AdamW(groups, lr=config.lr, betas=BETAS, weight_decay=0.0, fused=device.type == "cuda")
        self.averages = [p.detach().clone() for p in parameters.values()] if config.ema else None
        self.updates = 0

    def learning_rate(self, step: int, begin: int) -> float:
        """Cosine over the stage, after a linear warm-up that counts from the run's own first step, `begin`."""
        config = self.config
        along = min(1.0, step / max(1, config.steps))
        rate = config.final_lr + (config.lr - config.final_lr) * 0.5 * (1 + math.cos(math.pi * along))
        return rate * min(1.0, (step - begin + 1) / max(1, config.warmup))

    def zero(self) -> None:
        """Forget the gradients."""
        self.gradient.zero_()

    @torch.no_grad()
    def step(self, rate: float) -> torch.Tensor:
        """Clip and update; returns the norm of the gradient, on the device."""
        norm = self.gradient.norm()
        self.gradient.mul_((self.config.clip / (norm + 1e-6)).clamp(max=1.0))
        for group in self.adam.param_groups:
            group["lr"] = rate * group["factor"]
        self.adam.step()
        self.updates += 1
        if self.averages is not None:
            # Early on the average follows quickly, so that it does not remember the start.
            decay = min(self.config.ema, (1 + self.updates) / (10 + self.updates))
            torch._foreach_lerp_(self.averages, list(self.parameters.values()), 1 - decay)
        return norm

    def result(self) -> dict[str, torch.Tensor]:
        """What is evaluated and exported: the moving average, or the parameters where there is none."""
        values = list(self.parameters.values()) if self.averages is None else self.averages
        return {name: value.detach() for name, value in zip(self.parameters, values, strict=True)}

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters, moments and average, by name."""
        out: dict[str, torch.Tensor] = {}
        for index, (name, parameter) in enumerate(self.parameters.items()):
            out[f"parameter.{name}"] = parameter.detach()
            moments = self.adam.state[parameter]
            # Before the first update there are none yet.
            out[f"mean.{name}"] = moments.get("exp_avg", torch.zeros_like(parameter))
            out[f"square.{name}"] = moments.get("exp_avg_sq", torch.zeros_like(parameter))
            if self.averages is not None:
                out[f"average.{name}"] = self.averages[index]
        return out

    @torch.no_grad()
    def restore(self, state: dict[str, torch.Tensor], updates: int) -> None:
        """Go on from `state` after `updates` updates."""
        self.updates = updates
        for index, (name, parameter) in enumerate(self.parameters.items()):
            parameter.copy_(state[f"parameter.{name}"])
            step_on = parameter.device if self.adam.defaults["fused"] else torch.device("cpu")
            self.adam.state[parameter] = {
                "step": torch.tensor(float(updates), device=step_on),
                "exp_avg": state[f"mean.{name}"].to(parameter.device, copy=True),
                "exp_avg_sq": state[f"square.{name}"].to(parameter.device, copy=True),
            }
            if self.averages is not None:
                self.averages[index].copy_(state[f"average.{name}"])


def is_vector(name: str, parameter: torch.Tensor) -> bool:
    """True for biases, gains, mixing weights and conv taps."""
    return parameter.dim() < 2 or name.endswith("conv.weight")
