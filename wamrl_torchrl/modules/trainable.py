"""What the updates train; of the action expert all, its last blocks, or LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import nn

from wamrl_torchrl.modules.adapters import LoRAOptions, add_adapters
from wamrl_torchrl.modules.fastwam.model import FastWAM

ACTOR_KINDS = ("full", "last_blocks", "lora")


@dataclass
class ActorTraining(LoRAOptions):
    """What is trained of the action expert.

    Attributes:
        kind: ``"full"``: every parameter; ``"last_blocks"``: the last blocks and the action head, which follows them;
            ``"lora"``: adapters on frozen weights, chosen by the same options as :class:`~.lora.VideoLoRA`.
        num_blocks: how many blocks ``"last_blocks"`` trains; 0 for the other kinds.

    Raises:
        ValueError: an unknown kind, an option out of range, or one that the kind has no use for.
    """

    kind: str = "full"  # a str, as configurations know no Literal
    num_blocks: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind not in ACTOR_KINDS:
            raise ValueError(f"kind must be one of {ACTOR_KINDS}, got {self.kind!r}")
        if self.kind == "last_blocks":
            if self.num_blocks < 1:
                raise ValueError(f"num_blocks must be at least 1 for kind 'last_blocks', got {self.num_blocks}")
        elif self.num_blocks:
            raise ValueError(f"num_blocks is for kind 'last_blocks' only, got {self.num_blocks} for {self.kind!r}")
        if self.kind != "lora":
            idle = [option.name for option in fields(LoRAOptions) if getattr(self, option.name) != option.default]
            if idle:
                raise ValueError(f"{', '.join(idle)}: for kind 'lora' only, got kind {self.kind!r}")


def set_actor_training(model: FastWAM, training: ActorTraining) -> FastWAM:
    """Make the chosen part of the action expert trainable and freeze the rest of it, in place.

    The video expert and everything else is left alone. The choice is kept as ``model.actor_training``; the same once
    more changes nothing. Fresh adapters change no output.

    Raises:
        ValueError: another choice was made before, or more blocks than the expert has.
    """
    expert = model.mot.action
    num_layers = len(expert.blocks)
    before = model.actor_training
    if before is not None:
        both_lora = before.kind == training.kind == "lora"
        if before == training or (both_lora and before.same_adapters(training, num_layers)):
            return model
        raise ValueError(f"the action expert is trained otherwise already: {before}, wanted {training}")
    if training.num_blocks > num_layers:
        raise ValueError(f"num_blocks is {training.num_blocks}, the action expert has {num_layers} blocks")
    if training.kind == "lora":
        add_adapters(expert, training)
    elif training.kind == "last_blocks":
        expert.requires_grad_(False)
        expert.blocks[num_layers - training.num_blocks :].requires_grad_(True)
        expert.head.requires_grad_(True)
    else:
        expert.requires_grad_(True)
    model.actor_training = training
    return model


def actor_parameters(model: FastWAM) -> list[nn.Parameter]:
    """What flow-PPO trains: the trainable part of the action expert, by default all of it."""
    return [parameter for parameter in model.mot.action.parameters() if parameter.requires_grad]


def video_parameters(model: FastWAM) -> list[nn.Parameter]:
    """What video SFT trains: the adapters of the video expert."""
    return [parameter for parameter in model.mot.video.parameters() if parameter.requires_grad]
