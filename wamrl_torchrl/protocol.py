"""What an evaluation runs and under which conditions: initial conditions, horizons, settings, software."""

from __future__ import annotations

from dataclasses import asdict, replace
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from wamrl_torchrl import schema
from wamrl_torchrl.build import horizon, task_ids
from wamrl_torchrl.config import EnvConfig, RunConfig, eval_init_states
from wamrl_torchrl.envs.libero_gl import check_gl
from wamrl_torchrl.envs.libero_install import VERSIONS
from wamrl_torchrl.envs.libero_suites import load_suite
from wamrl_torchrl.modules.checkpoint import weights_digest
from wamrl_torchrl.modules.policy import FlowPolicy

PACKAGES = ("wamrl_torchrl", "torch", "torchrl", "tensordict")


def eval_conditions(config: RunConfig) -> Tensor:
    """Initial conditions int64 [M,3] of an evaluation: task, init state, env seed; one task after another.

    ``standard``: every init state that a task has of its own, 50 in LIBERO, once, under the env seed
    ``evaluation.seed``. ``held_out``: ``env.eval_init_states`` under ``evaluation.repeats`` env seeds from
    ``evaluation.seed`` on; when ``evaluation.episodes`` cuts them short, all tasks keep about the same number.
    """
    evaluation, tasks = config.evaluation, task_ids(config.env)
    if evaluation.protocol == "standard":
        counts = _own_init_states(config.env, tasks)
        rows = [(task, init, evaluation.seed) for task, n in zip(tasks, counts, strict=True) for init in range(n)]
        conditions = torch.tensor(rows)
    else:
        seeds = evaluation.seed + torch.arange(evaluation.repeats)
        conditions = torch.cartesian_prod(seeds, torch.tensor(eval_init_states(config)), torch.tensor(tasks))
        conditions = conditions[: evaluation.episodes, [2, 1, 0]]
    # A change of task makes a simulator rebuild its model.
    return conditions[conditions[:, 0].argsort(stable=True)]


def _own_init_states(env: EnvConfig, tasks: list[int]) -> list[int]:
    if env.name == "tabletop":
        return [schema.PLAIN_INIT_STATES] * len(tasks)
    states = load_suite(env.suite).init_states
    return [min(len(states[task]), schema.PLAIN_INIT_STATES) for task in tasks]


def protocol_env(config: RunConfig) -> EnvConfig:
    """The run's world under its evaluation protocol: the standard one has its own horizons."""
    standard = config.evaluation.protocol == "standard"
    return replace(config.env, standard_horizon=True) if standard else config.env


def describe(config: RunConfig, policy: FlowPolicy) -> dict[str, Any]:
    """All that an evaluation's numbers depend on, JSON-able: its ``settings`` and the ``software`` it runs on.

    The number of slots is not among them: an episode's conditions and noise depend on its ids alone.

    Args:
        config: the configuration.
        policy: the policy as it will act, after :func:`wamrl_torchrl.build.fit_policy`.
    """
    env, conditions = protocol_env(config), eval_conditions(config)
    is_libero, tasks, limits = env.name == "libero", task_ids(env), horizon(env)
    codec = {name: value for name, value in policy.model.codec.recipe.items() if name != "path"}
    settings = {
        "protocol": config.evaluation.protocol,
        "world": env.suite if is_libero else env.name,
        "tasks": tasks,
        "init_states": conditions[:, 1].unique().tolist(),
        "env_seeds": conditions[:, 2].unique().tolist(),
        "episodes": len(conditions),
        "settle_steps": env.settle_steps if is_libero else 0,
        "horizons": [limits if isinstance(limits, int) else limits[task] for task in tasks],  # in executed actions
        "image_size": list(env.image_size),
        "replan_steps": env.replan_steps,
        "sampling_steps": policy.sde.num_steps,  # K, of the ODE
        "action_mode": config.model.action_mode,
        "idm": None if policy.idm is None else asdict(policy.idm),
        "seed": policy.seed,  # of the policy's noise
        "policy_sha256": weights_digest(policy),
        "codec": codec,
        "device": policy.device.type,
    }
    return {"settings": settings, "software": _software(env, policy)}


def _software(env: EnvConfig, policy: FlowPolicy) -> dict[str, str]:
    found = {name: _version(name) for name in PACKAGES}
    if policy.device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(policy.device)
    if env.name == "libero":
        load_suite(env.suite)  # refuses other versions than these
        opengl = check_gl(env.render_devices)
        providers = metadata.packages_distributions().get("libero", ["libero"])
        found |= {**VERSIONS, **{name: _version(name) for name in set(providers)}, opengl.check: opengl.detail}
    return found


def _version(package: str) -> str:
    """Its version; a package that runs from its sources, by ``PYTHONPATH`` alone, has none on record."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
