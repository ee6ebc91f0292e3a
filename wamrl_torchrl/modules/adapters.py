"""LoRA adapters of one expert, by peft: which layers get them, switching them off, and merging them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoRALinear
from peft.tuners.tuners_utils import BaseTunerLayer, cast_adapter_dtype
from torch import Tensor, nn

from wamrl_torchrl.modules.fastwam.dit import Expert

ATTENTION_PROJECTIONS = ("q", "k", "v", "o")
#: The two linear layers of a block's MLP, by their place in its ``nn.Sequential``.
FFN_LAYERS = ("0", "2")
#: peft's name of the one adapter that an expert has.
ADAPTER = "default"


@dataclass(kw_only=True)
class LoRAOptions:
    """Which layers of an expert get adapters, and how large they are.

    Lists are taken for tuples and the projections are put in the order q, k, v, o, so that options come back equal from
    JSON: ``VideoLoRA(**json.loads(json.dumps(dataclasses.asdict(lora)))) == lora``.

    Attributes:
        rank: rank of the adapters.
        alpha: their scale is ``alpha / rank``; equal to ``rank`` if None.
        projections: which of q, k, v, o of an attention get adapters.
        cross_attention: adapt the attention to the text as well, in the same projections.
        ffn: adapt both linear layers of the MLP as well.
        blocks: (from, to) of the blocks that get adapters, ``to`` excluded; all if None.

    Raises:
        ValueError: an option that is out of range, by name.
    """

    rank: int = 32
    alpha: int | None = None
    projections: tuple[str, ...] = ATTENTION_PROJECTIONS
    cross_attention: bool = False
    ffn: bool = False
    blocks: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not self.projections or set(self.projections) - set(ATTENTION_PROJECTIONS):
            raise ValueError(f"projections must be some of {ATTENTION_PROJECTIONS}, got {tuple(self.projections)}")
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}")
        if self.alpha is not None and not self.alpha > 0:
            raise ValueError(f"alpha must be positive, or None for the rank, got {self.alpha}")
        ordered = tuple(name for name in ATTENTION_PROJECTIONS if name in self.projections)
        self.projections = ordered
        if self.blocks is not None:
            if len(self.blocks) != 2 or not 0 <= self.blocks[0] < self.blocks[1]:
                raise ValueError(f"blocks must be (from, to) with 0 <= from < to, or None, got {tuple(self.blocks)}")
            self.blocks = (self.blocks[0], self.blocks[1])

    @property
    def effective_alpha(self) -> int:
        """``alpha`` with its default filled in."""
        return self.rank if self.alpha is None else self.alpha

    def layers(self, num_layers: int) -> tuple[str, ...]:
        """Names of the adapted layers within an expert of ``num_layers`` blocks.

        Raises:
            ValueError: ``blocks`` ends beyond the last block.
        """
        first, end = (0, num_layers) if self.blocks is None else self.blocks
        if end > num_layers:
            raise ValueError(f"blocks {self.blocks} ends beyond the {num_layers} blocks of the expert")
        parts = [f"self_attn.{name}" for name in self.projections]
        if self.cross_attention:
            parts += [f"cross_attn.{name}" for name in self.projections]
        if self.ffn:
            parts += [f"ffn.{name}" for name in FFN_LAYERS]
        return tuple(f"blocks.{index}.{part}" for index in range(first, end) for part in parts)

    def same_adapters(self, other: LoRAOptions, num_layers: int) -> bool:
        """Whether both give the same adapters, however they say it (``blocks=(0, num_layers)`` is ``blocks=None``)."""
        mine, theirs = ((o.rank, o.effective_alpha, set(o.layers(num_layers))) for o in (self, other))
        return mine == theirs

    def peft_config(self) -> LoraConfig:
        """The same as peft says it."""
        attention = "(self_attn|cross_attn)" if self.cross_attention else "self_attn"
        part = rf"{attention}\.({'|'.join(self.projections)})"
        if self.ffn:
            part = rf"({part}|ffn\.({'|'.join(FFN_LAYERS)}))"
        # Blocks are spelled out in the pattern: peft's own layers_to_transform works with lists of names only, and a
        # list of names cannot tell the attentions apart from other layers with the same last name.
        index = r"\d+" if self.blocks is None else f"({'|'.join(map(str, range(*self.blocks)))})"
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.effective_alpha,
            lora_dropout=0.0,
            target_modules=rf"blocks\.{index}\.{part}",
        )


def add_adapters(expert: Expert, options: LoRAOptions) -> None:
    """Put fresh adapters on an expert without any, in place, and freeze its own weights.

    Adapters on half-precision weights are fp32: they are their own master weights, in which small steps do not round
    away, and at their size the arithmetic costs little.

    Raises:
        ValueError: ``blocks`` ends beyond the last block.
    """
    options.layers(len(expert.blocks))
    inject_adapter_in_model(options.peft_config(), expert, adapter_name=ADAPTER)
    cast_adapter_dtype(expert, ADAPTER)


def adapter_layers(module: nn.Module) -> list[BaseTunerLayer]:
    """Layers of ``module`` that carry adapters."""
    return [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]


@contextmanager
def adapters_disabled(module: nn.Module) -> Iterator[None]:
    """Run ``module`` as it was before its adapters: the frozen reference, without a second copy of the weights.

    Only adapters inside ``module`` are switched, so with ``model.mot.video`` those of the action expert go on. What was
    off or frozen before is so afterwards.
    """
    layers = [layer for layer in adapter_layers(module) if not layer.disable_adapters]
    # peft makes every adapter trainable that it switches on again.
    flags = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


class MergedState(Mapping[str, Tensor]):
    """State of a module as if it had no adapters, each merged weight made when it is asked for and not kept.

    The other tensors are the live ones, detached. Going through the items holds one merged tensor at a time, whereas
    ``dict(state)`` holds all of them (about as much as the adapted layers once more).

    Args:
        module: a module with plain LoRA layers in it, or none.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._layers: dict[str, LoRALinear] = {}
        for key, tensor in module.state_dict().items():
            owner, base, name = key.partition(".base_layer.")
            if not base:
                if ".lora_" not in key:
                    self._tensors[key] = tensor
                continue
            self._tensors[f"{owner}.{name}"] = tensor
            layer = module.get_submodule(owner)
            if name == "weight" and isinstance(layer, LoRALinear):
                self._layers[f"{owner}.{name}"] = layer

    def __getitem__(self, key: str) -> Tensor:
        weight = self._tensors[key]
        layer = self._layers.get(key)
        if layer is None or layer.merged:
            return weight
        with torch.no_grad():
            # Rounded once, after the sum: torch adds half precision in fp32, and fp32 adapters make the sum fp32.
            return (weight + layer.get_delta_weight(ADAPTER)).to(weight.dtype)

    def __contains__(self, key: object) -> bool:
        return key in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
