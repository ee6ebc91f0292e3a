"""LoRA on the video expert, by peft, and what each update trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from wamrl_torchrl.modules.fastwam.model import FastWAM

ATTENTION_PROJECTIONS = ("q", "k", "v", "o")


@dataclass(frozen=True)
class VideoLoRA:
    """Adapters on the self-attention of every block of the video expert.

    Attributes:
        rank: rank of the adapters.
        alpha: their scale is ``alpha / rank``; equal to ``rank`` if None.
        projections: which of q, k, v, o get adapters.
    """

    rank: int = 32
    alpha: int | None = None
    projections: tuple[str, ...] = ATTENTION_PROJECTIONS

    def __post_init__(self) -> None:
        if not self.projections or set(self.projections) - set(ATTENTION_PROJECTIONS):
            raise ValueError(f"projections must be some of {ATTENTION_PROJECTIONS}, got {tuple(self.projections)}")
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}")


def add_video_lora(model: FastWAM, lora: VideoLoRA) -> FastWAM:
    """Freeze the video side and put LoRA adapters on the video expert, in place; equal ones that are there are kept.

    A fresh adapter changes nothing: its second factor starts at zero. The action expert stays trainable; text, VAE,
    proprioception and the video expert's own weights are frozen.

    Raises:
        ValueError: other adapters are there already.
    """
    if model.lora == lora:
        return model
    if model.lora is not None:
        raise ValueError(f"the video expert has other adapters already: {model.lora}, wanted {lora}")
    model.requires_grad_(False)
    targets = "|".join(lora.projections)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.rank if lora.alpha is None else lora.alpha,
        lora_dropout=0.0,
        target_modules=rf"blocks\.\d+\.self_attn\.({targets})",
    )
    inject_adapter_in_model(config, model.mot.video)
    model.mot.action.requires_grad_(True)
    model.lora = lora
    return model


def adapter_layers(module: nn.Module) -> list[BaseTunerLayer]:
    """Layers of ``module`` that carry adapters."""
    return [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]


@contextmanager
def adapters_disabled(module: nn.Module) -> Iterator[None]:
    """Run ``module`` as it was before its adapters: the frozen reference, without a second copy of the weights."""
    layers = adapter_layers(module)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def actor_parameters(model: FastWAM) -> list[nn.Parameter]:
    """What flow-PPO trains: the action expert."""
    return list(model.mot.action.parameters())


def video_parameters(model: FastWAM) -> list[nn.Parameter]:
    """What video SFT trains: the adapters of the video expert."""
    return [parameter for parameter in model.mot.video.parameters() if parameter.requires_grad]
