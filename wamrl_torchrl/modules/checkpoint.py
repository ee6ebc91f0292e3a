"""A policy on disk: one directory with its configuration (JSON) and its tensors (safetensors)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from wamrl_torchrl import schema
from wamrl_torchrl.data.stats import DatasetStats
from wamrl_torchrl.files import replace_file
from wamrl_torchrl.modules.fastwam.codec import Codec, make_codec
from wamrl_torchrl.modules.fastwam.config import ExpertConfig, FastWAMConfig
from wamrl_torchrl.modules.fastwam.context import ContextBank
from wamrl_torchrl.modules.fastwam.weights import build_empty, fill
from wamrl_torchrl.modules.lora import VideoLoRA, add_video_lora
from wamrl_torchrl.modules.policy import FlowPolicy, FlowSDEConfig, IDMConfig
from wamrl_torchrl.modules.trainable import ActorTraining, set_actor_training
from wamrl_torchrl.tensor_files import read_safetensors

CONFIG_FILE = "config.json"
TENSOR_FILE = "policy.safetensors"
FORMAT = 2


def save_policy(policy: FlowPolicy, directory: str | Path) -> Path:
    """Write a policy to ``directory``; each of its two files is replaced only when it is complete.

    The weights keep their dtypes. A codec with weights of its own (the Wan VAE) is not written but referred to.

    Returns:
        the directory.
    """
    directory = Path(directory)
    model = policy.model
    config = {
        "format": FORMAT,
        "model": asdict(model.config),
        "codec": model.codec.recipe,
        "instructions": model.contexts.instructions,
        "contexts": list(model.contexts.contexts.shape),
        "lora": None if model.lora is None else asdict(model.lora),
        "actor_training": None if model.actor_training is None else asdict(model.actor_training),
        "sde": asdict(policy.sde),
        "idm": None if policy.idm is None else asdict(policy.idm),
        "executed_rows": policy.executed_rows,
        "seed": policy.seed,
    }
    tensors = {key: value.contiguous() for key, value in policy.state_dict().items()}
    replace_file(directory / TENSOR_FILE, lambda path: save_file(tensors, path))
    replace_file(directory / CONFIG_FILE, lambda path: path.write_text(json.dumps(config, indent=2)))
    return directory


def load_policy(
    directory: str | Path,
    *,
    device: torch.device | str = "cpu",
    codec: Codec | None = None,
    vae: str | Path | None = None,
) -> FlowPolicy:
    """Rebuild a policy saved by :func:`save_policy`; its weights are held once, on ``device``.

    Keyword Args:
        device: where the policy is to live.
        codec: codec to use instead of the one the policy was saved with.
        vae: where the Wan VAE of the policy is now, if it has moved.

    Raises:
        FileNotFoundError: the directory holds no policy, or the codec's file is not where it was.
        ValueError: another format, ``vae`` for a policy without one, or tensors that do not fit the configuration (the
            first few are named).
    """
    directory = Path(directory)
    if not (directory / CONFIG_FILE).is_file():
        raise FileNotFoundError(f"{directory} holds no policy ({CONFIG_FILE} is missing); train or import one first")
    config = json.loads((directory / CONFIG_FILE).read_text())
    if config.get("format") != FORMAT:
        raise ValueError(f"{directory / CONFIG_FILE} has format {config.get('format')!r}, this version reads {FORMAT}")
    codec = _make_codec(config["codec"], directory, vae, device) if codec is None else codec
    contexts = ContextBank(torch.empty(config["contexts"]), instructions=config["instructions"])
    model = build_empty(_model_config(config["model"]), codec, contexts)
    if config["lora"] is not None:
        add_video_lora(model, VideoLoRA(**config["lora"]))
    if config["actor_training"] is not None:
        set_actor_training(model, ActorTraining(**config["actor_training"]))
    policy = FlowPolicy(
        model,
        _blank_stats(),
        sde=_sde_config(config["sde"]),
        idm=None if config["idm"] is None else IDMConfig(**config["idm"]),
        executed_rows=config["executed_rows"],
        seed=config["seed"],
    )
    path = directory / TENSOR_FILE
    fill(policy, read_safetensors(path), source=path, device=device)
    return policy


def weights_digest(policy: FlowPolicy) -> str:
    """SHA-256, in hex, of a policy's tensors with their names, dtypes and shapes: weights, contexts and statistics.

    Neither where the policy lives nor on which device changes it. The Wan VAE, which is not saved with a policy, has no
    part in it.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(policy.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _make_codec(recipe: dict[str, Any], directory: Path, vae: str | Path | None, device: torch.device | str) -> Codec:
    if vae is not None:
        if recipe["kind"] != "wan":
            raise ValueError(
                f"{directory} was saved with the codec {recipe['kind']!r}, which has no file; leave vae out"
            )
        recipe = {**recipe, "path": str(vae)}
    try:
        return make_codec(recipe, device=device)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"the VAE of {directory} is gone ({error}): say where it is with model.vae") from error


def _blank_stats() -> DatasetStats:
    state, action = torch.zeros(schema.STATE_DIM), torch.zeros(schema.ACTION_DIM)
    return DatasetStats(state_min=state, state_max=state, action_min=action, action_max=action)


def _model_config(fields: dict[str, Any]) -> FastWAMConfig:
    experts = {name: ExpertConfig(**fields[name]) for name in ("video", "action")}
    pairs = {name: tuple(fields[name]) for name in ("image_size", "action_modes")}
    return FastWAMConfig(**{**fields, **experts, **pairs})


def _sde_config(fields: dict[str, Any]) -> FlowSDEConfig:
    window = fields["window"]
    return FlowSDEConfig(**{**fields, "window": None if window is None else tuple(window)})
