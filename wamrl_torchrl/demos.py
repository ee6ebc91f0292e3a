"""Demonstrations, scripted or of a LeRobot dataset, as episodes that pre-training reads: ``wamrl-demos``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from wamrl_torchrl import schema
from wamrl_torchrl.build import make_env, task_ids, task_instructions
from wamrl_torchrl.cli import command
from wamrl_torchrl.config import EnvConfig, RunConfig
from wamrl_torchrl.data.analysis import Rate
from wamrl_torchrl.data.episodes import STRIDE, EpisodeStore
from wamrl_torchrl.data.lerobot import LeRobotReader, fix_grippers, select
from wamrl_torchrl.envs.libero import LiberoEnv
from wamrl_torchrl.envs.libero_goals import require_expert
from wamrl_torchrl.envs.libero_suites import load_suite
from wamrl_torchrl.envs.tabletop import TableTopEnv
from wamrl_torchrl.report import progress_bar

MAX_ENV_SEED = 2**31 - 1


def demo_episodes(config: EnvConfig, per_task: int, *, seed: int) -> Tensor:
    """Episodes to demonstrate, int64 [tasks*per_task,5]: train init states in turn, each with its own env seed."""
    generator = torch.Generator().manual_seed(seed)
    tasks = torch.tensor(task_ids(config)).repeat_interleave(per_task)
    inits = torch.arange(*config.train_init_states)
    inits = inits[torch.arange(len(tasks)) % per_task % len(inits)]
    seeds = torch.randint(MAX_ENV_SEED, (len(tasks),), generator=generator)
    index = torch.arange(len(tasks))
    return torch.stack((tasks, inits, seeds, index, index), 1)


def to_episode(demonstration: TensorDictBase) -> TensorDict:
    """Turn what ``demonstrate`` gives into an episode of :mod:`wamrl_torchrl.data.episodes`."""
    frames = demonstration.get("frames")
    keys = ("frames", "actions", schema.SIM_STATES, schema.SUCCESS, schema.TASK_ID, schema.INIT_STATE_ID)
    episode = demonstration.select(*keys, schema.ENV_SEED)
    episode.set("states", demonstration.get("states")[::STRIDE])
    return episode.set("is_decision", torch.ones(len(frames), dtype=torch.bool))


def make_demo_env(config: EnvConfig) -> LiberoEnv | TableTopEnv:
    """Build the environment of :func:`make_demonstrations`.

    Raises:
        ValueError: a task has no scripted expert; no simulator has been started.
    """
    if config.name == "libero":
        require_expert(load_suite(config.suite), task_ids(config))
    return make_env(config)


def make_demonstrations(env: LiberoEnv | TableTopEnv, config: RunConfig, console: Console) -> EpisodeStore:
    """Let the scripted expert run and keep the episodes that succeed.

    Raises:
        RuntimeError: a task has no successful demonstration.
    """
    episodes = demo_episodes(config.env, config.demos.episodes_per_task, seed=config.seed)
    options: dict[str, Any] = {"noise": config.demos.noise, "seed": config.seed}
    if isinstance(env, LiberoEnv):
        options["grasp_variation"] = config.demos.grasp_variation
    else:
        demos = config.demos
        options |= {"grasp_offset": demos.grasp_offset, "start_spread": demos.start_spread, "aligned": demos.aligned}
    found: dict[int, TensorDict] = {}
    with progress_bar(console, "demonstrations", len(episodes)) as advance:
        for row, demonstration in env.iter_demonstrations(episodes, **options):
            if bool(demonstration.get(schema.SUCCESS)):
                found[row] = to_episode(demonstration)
            advance(1, f"{len(found)} successful")
    # In the order asked for, whichever simulator was faster.
    store, wins = EpisodeStore(), dict.fromkeys(task_ids(config.env), 0)
    for row in sorted(found):
        store.add(found[row])
        wins[int(episodes[row, 0])] += 1
    for task, won in wins.items():
        console.print(f"  task {task}: expert succeeded in {Rate(won, config.demos.episodes_per_task)}")
    lost = [task for task, won in wins.items() if not won]
    if lost:
        raise RuntimeError(
            f"the scripted expert never succeeded on tasks {lost}: leave them out with env.task_ids, or raise "
            "demos.episodes_per_task"
        )
    return store


def import_demonstrations(config: RunConfig, console: Console) -> EpisodeStore:
    """Read the episodes of the run's tasks from the LeRobot dataset that ``demos.lerobot`` describes.

    Episodes that it marks as failed are left out.

    Raises:
        FileNotFoundError, ValueError: see :class:`~wamrl_torchrl.data.lerobot.LeRobotReader`.
        RuntimeError: no successful episode of a task.
    """
    height, width = config.env.image_size
    reader = LeRobotReader(config.demos.lerobot, image_size=(height, width))
    tasks = task_ids(config.env)
    chosen = select(reader.entries, task_instructions(config.env), tasks, config.demos.episodes_per_task)
    console.print(f"{len(chosen)} of {len(reader.entries)} episodes of {reader.root}, cameras {reader.cameras}")
    episodes = []
    with progress_bar(console, "demonstrations", len(chosen)) as advance:
        for entry, task in chosen:
            episodes.append(reader.read(entry, task_id=task))
            advance(1, f"{sum(bool(episode.get(schema.SUCCESS)) for episode in episodes)} successful")
    fix_grippers(episodes, config.demos.lerobot.gripper)
    store, wins = EpisodeStore(), dict.fromkeys(tasks, 0)
    for episode in episodes:
        if bool(episode.get(schema.SUCCESS)):
            store.add(episode)
            wins[int(episode.get(schema.TASK_ID))] += 1
    lost = [task for task, won in wins.items() if not won]
    if lost:
        raise RuntimeError(f"{reader.root} has no successful episode of tasks {lost}: leave them out with env.task_ids")
    return store


def provide_demonstrations(config: RunConfig, console: Console) -> EpisodeStore:
    """The demonstrations that the options ask for: imported, or made by the scripted expert."""
    if config.demos.lerobot.path is not None:
        return import_demonstrations(config, console)
    env = make_demo_env(config.env)
    try:
        return make_demonstrations(env, config, console)
    finally:
        env.close()


def _main(config: RunConfig, console: Console) -> None:
    directory = Path(config.logger.directory) / "demos"
    if directory.exists():
        raise FileExistsError(f"{directory} exists: choose another logger.directory")
    provide_demonstrations(config, console).save(directory)
    console.print(f"episodes in {directory}")


main = command("wamrl-demos", _main)

if __name__ == "__main__":
    main()
