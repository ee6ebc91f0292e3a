"""LoRA on the video expert, and the weights of both experts with their adapters merged in."""

from __future__ import annotations

from dataclasses import dataclass

from wamrl_torchrl.modules.adapters import LoRAOptions, MergedState, add_adapters
from wamrl_torchrl.modules.fastwam.model import FastWAM
from wamrl_torchrl.modules.trainable import video_parameters


@dataclass(kw_only=True)
class VideoLoRA(LoRAOptions):
    """Adapters of the video expert; on the self-attention of every block unless told otherwise.

    Rank 32 at the size of the released checkpoints: 23.6 M parameters, with ``cross_attention`` 47.2 M, and with
    ``ffn`` too 80.6 M.
    """


def add_video_lora(model: FastWAM, lora: VideoLoRA) -> FastWAM:
    """Freeze the video side and put LoRA adapters on the video expert, in place; equal ones that are there are kept.

    A fresh adapter changes nothing: its second factor starts at zero. Text, VAE, proprioception and the video expert's
    own weights are frozen. The action expert becomes trainable as a whole, or stays as
    :func:`~wamrl_torchrl.modules.trainable.set_actor_training` left it; the two may be called in either order.

    Raises:
        ValueError: other adapters are there already, or ``blocks`` ends beyond the last block.
    """
    num_layers = model.config.video.num_layers
    if model.lora is not None:
        if model.lora.same_adapters(lora, num_layers):
            return model
        raise ValueError(f"the video expert has other adapters already: {model.lora}, wanted {lora}")
    add_adapters(model.mot.video, lora)
    actor = list(model.mot.action.parameters())
    if model.actor_training is None:
        model.mot.action.requires_grad_(True)
    trainable = {id(parameter) for parameter in (*actor, *video_parameters(model))}
    for parameter in model.parameters():
        if id(parameter) not in trainable:
            parameter.requires_grad_(False)
    model.lora = lora
    return model


def merged_state(model: FastWAM) -> MergedState:
    """State dict of ``model.mot`` under the released names, with the adapters of both experts merged into the weights.

    The model itself is not changed. Tensors without adapters are the live ones; see :class:`MergedState`.
    """
    return MergedState(model.mot)
