"""Checkpoints of other FastWAM code: the released ``.pt`` files, read and written, and LeRobot's safetensors, read.

Released layout (https://github.com/yuantianyuan01/FastWAM): a dict of ``mot`` (the state dict of the mixture, under the
names of this package), ``proprio_encoder``, ``step`` and ``torch_dtype``. LeRobot keeps the same tensors under
``model.mot`` with the blocks regrouped by layer: ``layers.{i}.blocks.{video|action}.*``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from wamrl_torchrl.files import replace_file
from wamrl_torchrl.modules.fastwam.codec import Codec
from wamrl_torchrl.modules.fastwam.config import FastWAMConfig
from wamrl_torchrl.modules.fastwam.context import ContextBank
from wamrl_torchrl.modules.fastwam.model import FastWAM
from wamrl_torchrl.modules.fastwam.weights import build_empty, fill
from wamrl_torchrl.tensor_files import named_tensors, read_pickle, read_safetensors


@dataclass(frozen=True)
class Recipe:
    """What weights were trained with and a checkpoint's tensors do not say."""

    action_shift: float
    action_modes: tuple[str, ...]


#: Recipes of the released files for LIBERO, by file name without suffix.
RECIPES = {
    "libero_optional_idm_2cam224": Recipe(1.0, ("first_frame", "idm")),
    "libero_uncond_2cam224": Recipe(5.0, ("first_frame",)),
}

#: Fields of a released payload. The last two are our own: the code that made the format does not read them.
_FIELDS = ("mot", "proprio_encoder", "step", "torch_dtype", "action_shift", "action_modes")
_LAYER = re.compile(r"layers\.(\d+)\.blocks\.(video|action)\.")


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A checkpoint of other FastWAM code, its tensors memory-mapped.

    Attributes:
        path: the file.
        tensors: parameters of a model by this package's names (``mot.*`` and ``proprio_encoder.*``).
        recipe: what the weights were trained with, as far as the file, its neighbour or its name tells.
        step: training step, if the file tells.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    recipe: Recipe | None
    step: int | None

    def check(self, config: FastWAMConfig) -> None:
        """Compare ``config`` with the recipe.

        Raises:
            ValueError: another action shift, or action modes the weights were not trained in.
        """
        if self.recipe is None:
            return
        if config.action_shift != self.recipe.action_shift:
            raise ValueError(
                f"{self.path} was trained with action_shift {self.recipe.action_shift}, the configuration says "
                f"{config.action_shift}: sampling would run on another time grid. Leave --action-shift out, or give "
                f"{self.recipe.action_shift}"
            )
        foreign = set(config.action_modes) - set(self.recipe.action_modes)
        if foreign:
            raise ValueError(
                f"{self.path} was trained for actions in {self.recipe.action_modes}, not {sorted(foreign)}"
            )


def read_checkpoint(path: str | Path) -> ForeignCheckpoint:
    """Open a released ``.pt`` file, or a LeRobot ``.safetensors`` file (or the directory that holds it).

    Raises:
        FileNotFoundError: no such file.
        ValueError: a pickle that needs code, a damaged file, or a missing or unknown field.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "model.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    return _read_lerobot(path) if path.suffix == ".safetensors" else _read_released(path)


def _read_released(path: Path) -> ForeignCheckpoint:
    payload = read_pickle(path)
    if not isinstance(payload, dict):
        raise ValueError(f"{path} must hold a dict, found {type(payload).__name__}")
    unknown = [field for field in payload if field not in _FIELDS]
    missing = [field for field in ("mot", "proprio_encoder") if field not in payload]
    if missing or unknown:
        raise ValueError(f"{path} is no released FastWAM checkpoint: it lacks {missing} and has unknown {unknown}")
    tensors = {}
    for part in ("mot", "proprio_encoder"):
        state = named_tensors(payload[part], f"{path}: field {part!r}")
        tensors.update({f"{part}.{name}": value for name, value in state.items()})
    recipe = RECIPES.get(path.stem)
    if "action_shift" in payload:
        if not isinstance(payload["action_shift"], float):
            raise ValueError(f"{path}: field 'action_shift' must be a float, found {payload['action_shift']!r}")
        recipe = Recipe(payload["action_shift"], tuple(payload.get("action_modes", ("first_frame",))))
    return ForeignCheckpoint(path, tensors, recipe, payload.get("step"))


def _read_lerobot(path: Path) -> ForeignCheckpoint:
    tensors = read_safetensors(path)
    foreign = [name for name in tensors if not name.startswith("model.")]
    if foreign:
        raise ValueError(
            f"{path} is no LeRobot FastWAM policy: its names must start with 'model.', found {foreign[0]!r}"
        )
    renamed = {_LAYER.sub(r"mixtures.\2.blocks.\1.", name[len("model.") :]): value for name, value in tensors.items()}
    return ForeignCheckpoint(path, renamed, _lerobot_recipe(path.with_name("config.json")), None)


def _lerobot_recipe(path: Path) -> Recipe | None:
    """What the ``config.json`` beside LeRobot's weights tells; LeRobot's FastWAM has no inverse dynamics."""
    if not path.is_file():
        return None
    try:
        fields = json.loads(path.read_text())
        shift = float(fields["action_scheduler"]["train_shift"])
        others = [fields["action_scheduler"].get("infer_shift"), fields.get("sigma_shift")]
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} has no number 'action_scheduler.train_shift' ({error!r})") from error
    if any(other is not None and other != shift for other in others):
        raise ValueError(
            f"{path}: action_scheduler.train_shift is {shift}, but infer_shift and sigma_shift are {others}"
        )
    normalisation = fields.get("normalization_mapping", {})
    wrong = {
        kind: normalisation.get(kind) for kind in ("STATE", "ACTION") if normalisation.get(kind, "MIN_MAX") != "MIN_MAX"
    }
    wrong |= {name: fields[name] for name in ("use_relative_actions", "toggle_action_dimensions") if fields.get(name)}
    if wrong:
        raise ValueError(f"{path} asks for what this package does not do: {wrong}; actions and states are MIN_MAX here")
    return Recipe(shift, ("first_frame",))


def load_checkpoint(
    checkpoint: ForeignCheckpoint | str | Path,
    config: FastWAMConfig,
    codec: Codec,
    contexts: ContextBank,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> FastWAM:
    """Build a model with the weights of a foreign checkpoint, which are held once and on ``device`` only.

    Args:
        checkpoint: from :func:`read_checkpoint`, or its path.
        config: sizes, shifts and action modes.
        codec: frames to latents and back.
        contexts: text contexts.

    Keyword Args:
        device: where the model is to live.
        dtype: dtype of the weights; the file's own if None.

    Raises:
        ValueError: the configuration contradicts the checkpoint's recipe, or tensors do not fit it (named).
    """
    if not isinstance(checkpoint, ForeignCheckpoint):
        checkpoint = read_checkpoint(checkpoint)
    checkpoint.check(config)
    model = build_empty(config, codec, contexts)
    buffers = {name: value for name, value in model.state_dict().items() if not value.is_meta}
    fill(model, {**buffers, **checkpoint.tensors}, source=checkpoint.path, device=device, dtype=dtype)
    return model


def save_released(model: FastWAM, path: str | Path, *, step: int = 0) -> Path:
    """Write the released layout, adapters merged; FastWAM's own code reads it.

    The action shift and modes are added as fields of their own, so that our reader need not guess them.
    """
    from wamrl_torchrl.modules.lora import merged_state

    payload = {
        "mot": {name: value.detach().cpu() for name, value in merged_state(model).items()},
        "proprio_encoder": {name: value.detach().cpu() for name, value in model.proprio_encoder.state_dict().items()},
        "step": step,
        "torch_dtype": str(model.dtype),
        "action_shift": float(model.config.action_shift),
        "action_modes": list(model.config.action_modes),
    }
    return replace_file(path, lambda temporary: torch.save(payload, temporary))
