"""A policy on disk: one directory with its configuration (JSON) and its tensors (safetensors)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from wamrl_torchrl import schema
from wamrl_torchrl.data.stats import DatasetStats
from wamrl_torchrl.modules.fastwam.codec import TinyCodec
from wamrl_torchrl.modules.fastwam.config import ExpertConfig, FastWAMConfig
from wamrl_torchrl.modules.fastwam.context import ContextBank
from wamrl_torchrl.modules.fastwam.model import FastWAM
from wamrl_torchrl.modules.lora import VideoLoRA, add_video_lora
from wamrl_torchrl.modules.policy import FlowPolicy, FlowSDEConfig

CONFIG_FILE = "config.json"
TENSOR_FILE = "policy.safetensors"
FORMAT = 1


def save_policy(policy: FlowPolicy, directory: str | Path) -> Path:
    """Write a policy to ``directory``; each of its two files is replaced only when it is complete.

    Returns:
        the directory.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    model = policy.model
    config = {
        "format": FORMAT,
        "model": asdict(model.config),
        "lora": None if model.lora is None else asdict(model.lora),
        "sde": asdict(policy.sde),
        "executed_rows": policy.executed_rows,
        "seed": policy.seed,
        "num_tasks": model.contexts.num_tasks,
    }
    tensors = {key: value.contiguous() for key, value in policy.state_dict().items()}
    _replace(directory / TENSOR_FILE, lambda path: save_file(tensors, path))
    _replace(directory / CONFIG_FILE, lambda path: path.write_text(json.dumps(config, indent=2)))
    return directory


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    temporary = path.with_name(path.name + ".partial")
    write(temporary)
    temporary.replace(path)


def load_policy(directory: str | Path, *, device: torch.device | str = "cpu") -> FlowPolicy:
    """Rebuild a policy saved by :func:`save_policy`.

    Raises:
        FileNotFoundError: the directory holds no policy.
        ValueError: another format, or tensors that do not fit the configuration (the first few are named).
    """
    directory = Path(directory)
    if not (directory / CONFIG_FILE).is_file():
        raise FileNotFoundError(f"{directory} holds no policy ({CONFIG_FILE} is missing); train or download one first")
    config = json.loads((directory / CONFIG_FILE).read_text())
    if config.get("format") != FORMAT:
        raise ValueError(f"{directory / CONFIG_FILE} has format {config.get('format')!r}, this version reads {FORMAT}")
    model_config = _model_config(config["model"])
    contexts = torch.zeros(config["num_tasks"], model_config.context_length, model_config.video.text_dim)
    model = FastWAM(model_config, TinyCodec(), ContextBank(contexts))
    if config["lora"] is not None:
        lora = dict(config["lora"], projections=tuple(config["lora"]["projections"]))
        add_video_lora(model, VideoLoRA(**lora))
    sde = dict(config["sde"])
    if sde["window"] is not None:
        sde["window"] = tuple(sde["window"])
    policy = FlowPolicy(
        model,
        _blank_stats(),
        sde=FlowSDEConfig(**sde),
        executed_rows=config["executed_rows"],
        seed=config["seed"],
    )
    load_tensors(policy, directory / TENSOR_FILE)
    return policy.to(device)


def _blank_stats() -> DatasetStats:
    state, action = torch.zeros(schema.STATE_DIM), torch.zeros(schema.ACTION_DIM)
    return DatasetStats(state_min=state, state_max=state, action_min=action, action_max=action)


def _model_config(fields: dict) -> FastWAMConfig:
    experts = {name: ExpertConfig(**fields[name]) for name in ("video", "action")}
    return FastWAMConfig(**{**fields, **experts, "image_size": tuple(fields["image_size"])})


def load_tensors(module: nn.Module, path: Path) -> None:
    """Load a safetensors file into ``module``; names and shapes must match exactly.

    Raises:
        ValueError: the file is damaged, or tensors are missing, unexpected or of another shape; the first few are
            named with what was found and expected.
    """
    try:
        tensors = load_file(path)
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    problems = _mismatches(module.state_dict(), tensors)
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"{path} does not fit the model: {'; '.join(problems[:5])}{more}")
    module.load_state_dict(tensors, strict=True)


def _mismatches(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    missing = [f"{key} is missing" for key in expected if key not in found]
    extra = [f"{key} is unexpected" for key in found if key not in expected]
    shapes = [
        f"{key} has shape {tuple(found[key].shape)}, expected {tuple(value.shape)}"
        for key, value in expected.items()
        if key in found and found[key].shape != value.shape
    ]
    return shapes + missing + extra
