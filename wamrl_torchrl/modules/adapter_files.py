"""Adapters on disk, in the standard directory of peft, so that other tools read ours and we read theirs.

A directory holds the adapters of one expert: ``adapter_config.json`` and ``adapter_model.safetensors``, whose names are
those of the expert with the prefix ``base_model.model.``. As the video expert has the names of the original Wan 2.2
transformer, adapters go from one to the other.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import Literal

from peft import LoraConfig, PeftConfig, get_peft_model_state_dict, set_peft_model_state_dict
from peft.tuners.lora import Linear as LoRALinear
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import Tensor, nn

from wamrl_torchrl.messages import first_few
from wamrl_torchrl.modules.adapters import ADAPTER, ATTENTION_PROJECTIONS, LoRAOptions
from wamrl_torchrl.modules.fastwam.dit import Expert
from wamrl_torchrl.modules.fastwam.model import FastWAM
from wamrl_torchrl.modules.lora import VideoLoRA, add_video_lora
from wamrl_torchrl.modules.trainable import ActorTraining, set_actor_training
from wamrl_torchrl.tensor_files import check_tensors, read_safetensors

ExpertName = Literal["video", "action"]

#: What peft's ``PeftModel`` puts before the names of the module that it wraps.
PREFIX = "base_model.model."

# Fields of peft's configuration that may be anything: they say where adapters came from, choose layers (which is looked
# at by its outcome) or matter while peft itself trains. Every other field must be as in adapters of our own.
_FREE_FIELDS = {
    "auto_mapping",
    "base_model_name_or_path",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "r",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}
# Other initialisations change the weights under the adapters.
_PLAIN_INIT = (True, False, "gaussian")


def save_adapters(model: FastWAM, directory: str | Path, *, expert: ExpertName = "video") -> Path:
    """Write the adapters of an expert as a peft adapter directory; other files in it are left alone.

    Both files are written aside first. If the configuration changes it is taken away before the tensors are replaced,
    so that whatever interrupts this leaves adapters that fit together or none that load.

    Args:
        model: the model.
        directory: made if it does not exist.

    Keyword Args:
        expert: ``"video"`` or ``"action"``.

    Returns:
        the directory.

    Raises:
        ValueError: an unknown expert, or one without adapters.
    """
    directory = Path(directory)
    module, options = _expert(model, expert), _options(model, expert)
    if options is None:
        raise ValueError(f"the {expert} expert has no adapters to save; {_HOW_TO_ADD[expert]} first")
    config = options.peft_config()
    config.inference_mode = True
    kind = {"base_model_class": type(module).__name__, "parent_library": type(module).__module__}
    tensors = {f"{PREFIX}{key}": value.contiguous() for key, value in get_peft_model_state_dict(module).items()}
    aside = directory / ".partial"
    aside.mkdir(parents=True, exist_ok=True)
    try:
        config.save_pretrained(str(aside), auto_mapping_dict=kind)
        save_file(tensors, aside / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
        described = directory / CONFIG_NAME
        if described.exists() and described.read_bytes() != (aside / CONFIG_NAME).read_bytes():
            described.unlink()
        (aside / SAFETENSORS_WEIGHTS_NAME).replace(directory / SAFETENSORS_WEIGHTS_NAME)
        (aside / CONFIG_NAME).replace(described)
    finally:
        shutil.rmtree(aside)
    return directory


def load_adapters(model: FastWAM, directory: str | Path, *, expert: ExpertName = "video") -> FastWAM:
    """Load adapters from a peft adapter directory, in place; they are added as it says if the expert has none.

    Adding them freezes and trains what :func:`~wamrl_torchrl.modules.lora.add_video_lora`, or
    :func:`~wamrl_torchrl.modules.trainable.set_actor_training` for the action expert, says. Tensors are cast to the
    dtype of the expert's adapters. Dropout in the configuration is not used. A directory that is refused leaves the
    model as it was.

    Args:
        model: the model.
        directory: as written by :func:`save_adapters` or by peft's ``save_pretrained``.

    Keyword Args:
        expert: ``"video"`` or ``"action"``.

    Returns:
        the model.

    Raises:
        FileNotFoundError: one of the two files is missing.
        ValueError: an unknown expert; no plain LoRA, the other expert's, or on layers that cannot be chosen here;
            the expert has other adapters or trains otherwise; or tensors are missing, unexpected or of another shape
            (the first few are named with what was found and expected).
    """
    directory = Path(directory)
    module = _expert(model, expert)
    for name in (CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME):
        if not (directory / name).is_file():
            raise FileNotFoundError(f"{directory} holds no adapters ({name} is missing); write them with save_adapters")
    config = _read_config(directory, module)
    options = _read_options(config, module, directory / CONFIG_NAME)
    tensors = _read_tensors(directory / SAFETENSORS_WEIGHTS_NAME, module, options)
    if expert == "video":
        add_video_lora(model, VideoLoRA(**asdict(options)))
    else:
        set_actor_training(model, ActorTraining(kind="lora", **asdict(options)))
    set_peft_model_state_dict(module, tensors, adapter_name=ADAPTER)
    return model


_HOW_TO_ADD = {"video": "add them with add_video_lora", "action": "set_actor_training with kind 'lora'"}


def _expert(model: FastWAM, name: str) -> Expert:
    if name not in model.mot.mixtures:
        raise ValueError(f"expert must be one of {sorted(model.mot.mixtures)}, got {name!r}")
    return model.mot.mixtures[name]  # type: ignore[return-value]


def _options(model: FastWAM, expert: str) -> LoRAOptions | None:
    if expert == "video":
        return model.lora
    training = model.actor_training
    return training if training is not None and training.kind == "lora" else None


def _read_config(directory: Path, module: Expert) -> LoraConfig:
    """Read the configuration; plain LoRA and not another expert's, or a ValueError."""
    path = directory / CONFIG_NAME
    try:
        config = PeftConfig.from_pretrained(str(directory))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(config, LoraConfig):
        raise ValueError(f"{path} describes {config.peft_type} adapters, only LORA can be loaded")
    plain = LoraConfig()
    odd = {field.name: getattr(config, field.name) for field in fields(LoraConfig) if field.name not in _FREE_FIELDS}
    if config.init_lora_weights in _PLAIN_INIT:
        odd.pop("init_lora_weights")
    odd = {name: value for name, value in odd.items() if value != getattr(plain, name)}
    if odd:
        found = ", ".join(f"{name}={value!r}" for name, value in odd.items())
        raise ValueError(f"{path} describes more than plain LoRA, which is all that can be loaded: {found}")
    made_for = (config.auto_mapping or {}).get("base_model_class")
    others = {kind.__name__ for kind in Expert.__subclasses__()} - {type(module).__name__}
    if made_for in others:
        raise ValueError(f"{path} describes adapters of {made_for}, not of {type(module).__name__}")
    return config


_LAYER_NAME = re.compile(
    r"blocks\.(?P<index>\d+)\.((?P<attention>self|cross)_attn\.(?P<projection>[qkvo])|(?P<ffn>ffn)\.[02])"
)


def _read_options(config: LoraConfig, module: Expert, path: Path) -> LoRAOptions:
    """Our options for the layers that a peft configuration chooses in ``module``, with or without its adapters."""
    names = {
        name
        for name, layer in module.named_modules()
        if isinstance(layer, (nn.Linear, nn.Conv3d, LoRALinear))
        and not re.search(r"\.(base_layer|lora_[AB])(\.|$)", name)
        and check_target_module_exists(config, name)
    }
    found = [match for match in map(_LAYER_NAME.fullmatch, names) if match]
    if not found:
        raise ValueError(f"{path} chooses no layer in the blocks of {type(module).__name__}: {config.target_modules}")
    indices = [int(match["index"]) for match in found]
    span = (min(indices), max(indices) + 1)
    options = LoRAOptions(
        rank=config.r,
        alpha=None if config.lora_alpha == config.r else config.lora_alpha,
        projections=tuple({match["projection"] for match in found if match["attention"]}) or ATTENTION_PROJECTIONS,
        cross_attention=any(match["attention"] == "cross" for match in found),
        ffn=any(match["ffn"] for match in found),
        blocks=None if span == (0, len(module.blocks)) else span,
    )
    odd = sorted(names ^ set(options.layers(len(module.blocks))))
    if odd:
        raise ValueError(
            f"{path} chooses layers that cannot be chosen here: adapters go on some of q, k, v, o of self-attention, "
            f"with or without the same of cross-attention and both ffn layers, in a range of blocks; it differs at "
            f"{first_few(odd)}"
        )
    return options


def _read_tensors(path: Path, module: Expert, options: LoRAOptions) -> dict[str, Tensor]:
    """Read tensors; exactly those of ``options`` in name and shape, or a ValueError."""
    tensors = read_safetensors(path)
    expected: dict[str, tuple[int, int]] = {}
    for name in options.layers(len(module.blocks)):
        layer = module.get_submodule(name)
        expected[f"{PREFIX}{name}.lora_A.weight"] = (options.rank, layer.in_features)  # type: ignore[assignment]
        expected[f"{PREFIX}{name}.lora_B.weight"] = (layer.out_features, options.rank)  # type: ignore[assignment]
    check_tensors(expected, tensors, path, what=f"the {type(module).__name__}")
    return tensors
