"""Small table-top environments and requests for them."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torchrl.envs.utils import RandomPolicy

from wamrl_torchrl import schema
from wamrl_torchrl.envs.tabletop import TableTopEnv

SMALL = (32, 64)
#: What an environment and a policy without a chain can fill of a record.
ENV_PART = (schema.IMAGE, *schema.EPISODE_KEYS, schema.CHUNK_INDEX, schema.ACTION)
ENV_PART = (*ENV_PART, *(("next", key) for key in (*schema.OUTCOME_KEYS, "reward", schema.REWARD_TASK, "done")))
OBSERVED = (schema.IMAGE, schema.STATE, *schema.EPISODE_KEYS, schema.CHUNK_INDEX)


def make_env(num_envs: int = 4, **options) -> TableTopEnv:
    return TableTopEnv(num_envs, image_size=SMALL, **options)


def random_policy(num_envs: int = 4) -> RandomPolicy:
    return RandomPolicy(make_env(num_envs).action_spec)


def request(rows: list[list[int]]) -> TensorDict:
    ids = torch.tensor(rows)
    return TensorDict({key: ids[:, i : i + 1] for i, key in enumerate(schema.EPISODE_KEYS)}, batch_size=[len(rows)])


def chunks(count: int) -> torch.Tensor:
    return 2 * torch.rand(count, schema.CHUNK, schema.ACTION_DIM) - 1


def still(count: int) -> torch.Tensor:
    """Chunks that change nothing about an open gripper."""
    out = torch.zeros(count, schema.CHUNK, schema.ACTION_DIM)
    out[..., 6] = -1.0
    return out
