"""Factories: from a configuration to environments, models and policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrl.envs import Compose, EnvBase, TransformedEnv

from wamrl_torchrl import schema
from wamrl_torchrl.config import EnvConfig, RunConfig
from wamrl_torchrl.data.stats import DatasetStats, NormalizeProprio
from wamrl_torchrl.envs.episodes import DealEpisodes, EpisodePlan
from wamrl_torchrl.envs.libero import LiberoEnv
from wamrl_torchrl.envs.libero_suites import base_suite, default_horizon, load_suite
from wamrl_torchrl.envs.libero_suites import instructions as libero_instructions
from wamrl_torchrl.envs.tabletop import MAX_EPISODE_STEPS as TABLETOP_HORIZON
from wamrl_torchrl.envs.tabletop import TABLETOP_INSTRUCTIONS, TableTopEnv
from wamrl_torchrl.modules.fastwam.codec import TinyCodec
from wamrl_torchrl.modules.fastwam.config import ACTION_MODES, FastWAMConfig, preset
from wamrl_torchrl.modules.fastwam.context import ContextBank
from wamrl_torchrl.modules.fastwam.model import FastWAM
from wamrl_torchrl.modules.policy import FlowPolicy, IDMConfig

#: Actions that an episode of LIBERO's standard protocol may take, settling not counted, as published with OpenVLA
#: (``run_libero_eval.py``) and used since. A perturbed suite has that of the suite it perturbs.
#: :data:`~wamrl_torchrl.envs.libero_suites.SUITES` are ours for training.
STANDARD_HORIZONS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}


def choose_device(name: str) -> torch.device:
    """``"auto"`` is the GPU if there is one; any other name is torch's.

    Raises:
        ValueError: a GPU is named and there is none, or the name is not a device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device must be 'auto' or a torch device, got {name!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}, but torch {torch.__version__} sees no GPU; use device=auto or device=cpu")
    return device


def task_instructions(config: EnvConfig) -> list[str]:
    """Instruction of every task of the world, in the order of ``task_id``."""
    return list(TABLETOP_INSTRUCTIONS) if config.name == "tabletop" else libero_instructions(config.suite)


def task_ids(config: EnvConfig) -> list[int]:
    """Tasks of the run.

    Raises:
        ValueError: an id the world does not have.
    """
    known = range(len(task_instructions(config)))
    ids = list(known) if config.task_ids is None else list(config.task_ids)
    unknown = [task for task in ids if task not in known]
    if unknown or not ids:
        world = config.suite if config.name == "libero" else config.name
        raise ValueError(f"env.task_ids must be some of 0..{len(known) - 1} ({world}), got {ids}")
    return ids


def horizon(config: EnvConfig) -> int | list[int]:
    """Actions that an episode may take, settling not counted; in a mix of suites, one number per task.

    Raises:
        ValueError: the standard horizon is asked for and none is published for the suite.
    """
    if config.max_episode_steps is not None:
        return config.max_episode_steps
    if config.name == "tabletop":
        return TABLETOP_HORIZON
    find = _standard_horizon if config.standard_horizon else default_horizon
    if "+" in config.suite:
        return [find(suite) for suite in load_suite(config.suite).suites]
    return find(config.suite)


def _standard_horizon(suite: str) -> int:
    base = base_suite(suite)
    if base is None:
        known = ", ".join(STANDARD_HORIZONS)
        raise ValueError(f"no horizon is known for {suite}, only for {known}: set env.max_episode_steps")
    return STANDARD_HORIZONS[base]


def frame_offsets(config: EnvConfig) -> tuple[int, ...]:
    """Offsets of the future frames: every 4th executed action, as the video expert sees the world, or none."""
    if not config.future_frames:
        return ()
    return tuple(range(schema.VIDEO_STRIDE, config.replan_steps + 1, schema.VIDEO_STRIDE))


def make_env(
    config: EnvConfig, *, start_states: dict[int, Tensor] | None = None, future_frames: bool = True
) -> LiberoEnv | TableTopEnv:
    """Build the bare environment of one worker; without ``future_frames`` only what the policy sees is rendered."""
    common: dict[str, Any] = {
        "task_ids": task_ids(config),
        "replan_steps": config.replan_steps,
        "max_episode_steps": horizon(config),
        "frame_offsets": frame_offsets(config) if future_frames else (),
        "init_state_ids": range(*config.train_init_states),
        "start_states": start_states,
    }
    if config.name == "tabletop":
        height, width = config.image_size
        return TableTopEnv(config.num_envs, image_size=(height, width), **common)
    names = ("settle_steps", "physics", "background_reset", "max_failures", "render_devices")
    common |= {name: getattr(config, name) for name in names}
    return LiberoEnv(config.suite, config.num_envs, **common)


@dataclass
class EnvFactory:
    """Picklable builder of a worker's environment: ``factory(worker, num_workers)``.

    Attributes:
        config: the world.
        stats: normalisation of proprioception.
        plan: where the episodes come from.
        start_states: extra start states by task.
        future_frames: render the frames of a chunk that training and videos need.
    """

    config: EnvConfig
    stats: DatasetStats
    plan: EpisodePlan
    start_states: dict[int, Tensor] = field(default_factory=dict)
    future_frames: bool = True

    def __call__(self, worker: int = 0, num_workers: int = 1) -> TransformedEnv:  # noqa: ARG002
        """Build the environment of one worker."""
        base = make_env(self.config, start_states=self.start_states or None, future_frames=self.future_frames)
        return self.wrap(base, worker)

    def wrap(self, base: EnvBase, worker: int = 0) -> TransformedEnv:
        """Add the transforms to a bare environment."""
        deal = DealEpisodes(self.plan, worker=worker)
        return TransformedEnv(base, Compose(NormalizeProprio(self.stats), deal))


def make_model(config: RunConfig) -> FastWAM:
    """Build a model with random weights for the run's world."""
    height, width = config.env.image_size
    share = config.pretrain.action_idm_prob
    modes = ("first_frame",) if share == 0 else ("idm",) if share == 1 else ACTION_MODES
    model_config = replace(preset(config.model.preset, image_size=(height, width)), action_modes=modes)
    return FastWAM(model_config, TinyCodec(), make_contexts(config, model_config))


def make_contexts(config: RunConfig, model_config: FastWAMConfig) -> ContextBank:
    """Text contexts of the world's tasks, from the context cache if there is one."""
    instructions = task_instructions(config.env)
    if config.model.contexts is not None:
        return cached_contexts(config.model.contexts, instructions, model_config)
    length, text_dim = model_config.context_length, model_config.video.text_dim
    return ContextBank.hashed(instructions, length=length, text_dim=text_dim)


def cached_contexts(path: str | Path, instructions: Sequence[str], model_config: FastWAMConfig) -> ContextBank:
    """Text contexts from a context cache, for a model of this size.

    Raises:
        ValueError: the cache was made for a model of another size.
        KeyError: it lacks an instruction.
    """
    bank = ContextBank.from_cache(path, instructions)
    found, wanted = tuple(bank.contexts.shape[1:]), (model_config.context_length, model_config.video.text_dim)
    if found != wanted:
        raise ValueError(f"{path} holds contexts of {found} (length, width), the model reads {wanted}")
    return bank


def make_policy(config: RunConfig, model: FastWAM, stats: DatasetStats) -> FlowPolicy:
    """Wrap a model as the run's policy."""
    return FlowPolicy(
        model,
        stats,
        sde=config.sde,
        executed_rows=config.env.replan_steps,
        seed=config.seed,
        idm=_idm(config),
    )


def _idm(config: RunConfig) -> IDMConfig | None:
    return config.model.idm if config.model.action_mode == "idm" else None


def fit_policy(policy: FlowPolicy, config: RunConfig) -> FlowPolicy:
    """Give a loaded policy the run's sampling options, in place, after checking that it belongs to the run's world.

    Raises:
        ValueError: it was made for pictures of another size, for other instructions, or without the run's action mode.
    """
    model = policy.model
    found, wanted = tuple(model.config.image_size), tuple(config.env.image_size)
    if found != wanted:
        raise ValueError(f"the policy was made for pictures of {found}, env.image_size is {wanted}")
    if config.model.contexts is not None:
        model.contexts = make_contexts(config, model.config).to(policy.device)
    elif model.contexts.instructions != task_instructions(config.env):
        world = config.env.suite if config.env.name == "libero" else config.env.name
        raise ValueError(
            f"the policy was made for other instructions than {world} has: check env and model.policy, or give the "
            "contexts of this world with model.contexts (see wamrl-context build)"
        )
    policy.sde = config.sde
    policy.seed = config.seed
    policy.executed_rows = config.env.replan_steps
    policy.set_idm(_idm(config))
    return policy.eval()
