"""Episodes and worlds of the table top."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from wamrl_torchrl import schema
from wamrl_torchrl.envs import tabletop_world as world
from wamrl_torchrl.envs.tabletop import TABLETOP_INSTRUCTIONS

TASKS = len(TABLETOP_INSTRUCTIONS)


def episodes_of(count: int, *, init_from: int = 0) -> torch.Tensor:
    index = torch.arange(count)
    return torch.stack([index % TASKS, init_from + index // TASKS, 1000 + index, index, index], -1)


def request(episodes: torch.Tensor) -> TensorDict:
    columns = {key: episodes[:, i : i + 1] for i, key in enumerate(schema.EPISODE_KEYS)}
    return TensorDict(columns, batch_size=[len(episodes)])


def states_of(episodes: torch.Tensor) -> torch.Tensor:
    return world.initial_states(*episodes[:, :3].unbind(-1))


def action(*, move: tuple[float, float, float] = (0.0, 0.0, 0.0), gripper: float = -1.0) -> torch.Tensor:
    return torch.tensor([[*move, 0.0, 0.0, 0.0, gripper]])


def above_object(index: int, *, offset: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> torch.Tensor:
    """The world of an episode with the tip moved to an object, plus ``offset``."""
    state = states_of(episodes_of(1))
    item = state[:, world.OBJECT_POSITIONS].unflatten(-1, (3, 3))[:, index]
    state[:, world.POSITION] = item + torch.tensor(offset, dtype=torch.float64)
    return state


def close_gripper(state: torch.Tensor, count: int = 3) -> torch.Tensor:
    for _ in range(count):
        state = world.advance(state, action(gripper=1.0))
    return state
