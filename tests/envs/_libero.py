"""Shared by the LIBERO tests: requests, and a run of LIBERO's own environment to compare with."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

import torch
from tensordict import TensorDict

from wamrl_torchrl import schema
from wamrl_torchrl.envs.libero import LiberoEnv

#: Task, init state and env seed of an episode.
EPISODE = (0, 3, 11)
PARKED = None

_unique = itertools.count()


def request(*episodes: Sequence[int] | None, slots: Sequence[bool] | None = None) -> TensorDict:
    """Ask for one episode per slot (three ids, or :data:`PARKED`), or of some ``slots`` only.

    Group and episode ids are new in every request: the same five ids again would be an echo of the episode that has
    just run, and be answered with a fresh one.
    """
    rows = [
        (0, 0, 0, 0, schema.PARKED) if episode is PARKED else (*episode, next(_unique), next(_unique))
        for episode in episodes
    ]
    ids = torch.tensor(rows)
    td = TensorDict({key: ids[:, i, None] for i, key in enumerate(schema.EPISODE_KEYS)}, batch_size=[len(ids)])
    if slots is not None:
        td.set("_reset", torch.tensor(slots)[:, None])
    return td


def random_actions(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, schema.ACTION_DIM, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def act(env: LiberoEnv, observation: TensorDict, *actions: torch.Tensor) -> TensorDict:
    """One step; ``actions`` float32 [n,7] of every slot, padded to a chunk by what must not be executed."""
    chunk = torch.full((env.num_envs, schema.CHUNK, schema.ACTION_DIM), 1.0)
    for slot, some in enumerate(actions):
        chunk[slot, : len(some)] = some
    return env.step(observation.select("observation", *schema.EPISODE_KEYS).set("action", chunk))["next"]


def run(env: LiberoEnv, observation: TensorDict, *actions: torch.Tensor) -> TensorDict:
    """As many steps as ``actions`` (float32 [n,7] per slot, n a multiple of ``replan_steps``) fill, stacked in time."""
    steps = []
    for part in zip(*(some.split(env.replan_steps) for some in actions), strict=True):
        observation = act(env, observation, *part)
        steps.append(observation)
    return torch.stack(steps, 1)


#: LIBERO's own environment under its usual protocol; arguments: task, init state, env seed, actions.npy, out.npz.
STOCK = """
import sys, numpy as np
from libero.libero import benchmark
from libero.libero.envs import OffScreenRenderEnv
from PIL import Image
import robosuite.utils.transform_utils as transforms

task, init_state, seed = map(int, sys.argv[1:4])
suite = benchmark.get_benchmark("libero_spatial")()
env = OffScreenRenderEnv(bddl_file_name=suite.get_task_bddl_file_path(task), camera_heights=256, camera_widths=256)
images, states, sim_states = [], [], []

def record(obs):
    views = [obs[name + "_image"][::-1, ::-1] for name in ("agentview", "robot0_eye_in_hand")]
    views = [np.asarray(Image.fromarray(view).resize((224, 224), Image.BILINEAR)) for view in views]
    images.append(np.concatenate(views, 1).transpose(2, 0, 1))
    turn = transforms.quat2axisangle(obs["robot0_eef_quat"].copy())
    states.append(np.concatenate([obs["robot0_eef_pos"], turn, obs["robot0_gripper_qpos"]]).astype(np.float32))
    sim_states.append(env.get_sim_state())

env.seed(seed)
env.reset()
obs = env.set_init_state(suite.get_task_init_states(task)[init_state])
for _ in range(10):
    obs, *_ = env.step([0.0] * 6 + [-1.0])
record(obs)
for action in np.load(sys.argv[4]):
    obs, *_ = env.step(action.astype(np.float64))
    record(obs)
np.savez(sys.argv[5], images=images, states=states, sim_states=sim_states)
env.close()
"""


def stock_command(*arguments: object) -> list[str]:
    return [sys.executable, "-c", STOCK, *map(str, arguments)]
