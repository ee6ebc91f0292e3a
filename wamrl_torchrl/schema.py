"""The data contract: the keys, dtypes and shapes of one macro-step, and its validation.

One environment step is one decision: the policy emits a chunk of :data:`CHUNK` actions, the environment executes the
first ``replan_steps`` of them and answers with outputs of fixed shape and masks. Every part of the package reads and
writes the keys below, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from tensordict import NestedKey, TensorDictBase

CHUNK = 32  # actions in a chunk
ACTION_DIM = 7  # 6-d end-effector delta and gripper, in [-1, 1]
STATE_DIM = 8  # end-effector position 3, axis-angle 3, gripper fingers 2
FRAME_OFFSETS = (4, 8)  # executed actions after which a future frame is returned
VIDEO_STRIDE = 4  # actions between two frames of the video expert
VIDEO_FRAMES = CHUNK // VIDEO_STRIDE + 1  # 9 frames cover a chunk: 1 + 4n, as the causal codec asks

# Written by the environment, at reset and after every step.
IMAGE: NestedKey = ("observation", "image")
STATE: NestedKey = ("observation", "state")
PROPRIO: NestedKey = ("observation", "proprio")
TASK_ID = "task_id"
INIT_STATE_ID = "init_state_id"
ENV_SEED = "env_seed"
GROUP_ID = "group_id"
EPISODE_ID = "episode_id"
CHUNK_INDEX = "chunk_index"

# Written by the policy.
ACTION = "action"
CHAIN = "chain"
K_STAR = "k_star"
LOG_PROB = "action_log_prob"
LOG_PROB_ROWS = "log_prob_rows"
NOISE_SEED = "noise_seed"
POLICY_VERSION = "policy_version"
VIDEO_LATENTS = "video_latents"  # idm mode only: the imagined future that the actions saw

# Written by the environment as the outcome of a step; the record keeps them under "next".
FUTURE_FRAMES = "future_frames"
FUTURE_MASK = "future_mask"
EXECUTED_MASK = "executed_mask"
SIM_STATES = "sim_states"
SUCCESS = "success"
REWARD_TASK = "reward_task"
INVALID = "invalid"  # the simulator was lost in this step: the episode is void, and to be run again

# Written by the learner.
REWARD_REC: NestedKey = ("next", "reward_rec")
REWARD_REC_MASK: NestedKey = ("next", "reward_rec_mask")
REWARD_REC_RAW: NestedKey = ("next", "reward_rec_raw")  # before its scale is taken out
REWARD_REC_COPY: NestedKey = ("next", "reward_rec_copy")  # what a copy of the decision's picture would have had
RETURN = "return"
ADVANTAGE = "advantage"

#: What names an episode. ``(task, init state, env seed)`` is the true initial condition: LIBERO draws fixture poses
#: from the seed and an init state does not restore them. ``group_id`` is shared by the episodes an advantage compares,
#: ``episode_id`` is unique, or :data:`PARKED` in a slot that has nothing to run.
EPISODE_KEYS = (TASK_ID, INIT_STATE_ID, ENV_SEED, GROUP_ID, EPISODE_ID)
PARKED = -1

#: Init states that a task has of its own, as in LIBERO; ids from here on name start states given to an environment.
PLAIN_INIT_STATES = 50

#: Outcomes of a step that a record keeps only under "next".
OUTCOME_KEYS = (FUTURE_FRAMES, FUTURE_MASK, EXECUTED_MASK, SIM_STATES, SUCCESS, INVALID)

#: ``key: (dtype, event shape)``; a letter stands for a size that the configuration fixes: ``H,W`` picture, ``K`` points
#: of a chain, ``S`` stochastic steps, ``F`` frame offsets, ``N`` simulator states of width ``D``, ``C,L,h,w`` latents.
MACRO_STEP: dict[NestedKey, tuple[torch.dtype, tuple[int | str, ...]]] = {
    IMAGE: (torch.uint8, (3, "H", "W")),
    STATE: (torch.float32, (STATE_DIM,)),
    PROPRIO: (torch.float32, (STATE_DIM,)),
    **dict.fromkeys((*EPISODE_KEYS, CHUNK_INDEX, NOISE_SEED, POLICY_VERSION), (torch.int64, (1,))),
    ACTION: (torch.float32, (CHUNK, ACTION_DIM)),
    CHAIN: (torch.float32, ("K", CHUNK, ACTION_DIM)),
    K_STAR: (torch.int64, ("S",)),
    LOG_PROB: (torch.float32, ("S",)),
    LOG_PROB_ROWS: (torch.float32, ("S", CHUNK)),
    VIDEO_LATENTS: (torch.bfloat16, ("C", "L", "h", "w")),
    ("next", FUTURE_FRAMES): (torch.uint8, ("F", 3, "H", "W")),
    ("next", FUTURE_MASK): (torch.bool, ("F",)),
    ("next", EXECUTED_MASK): (torch.bool, (CHUNK,)),
    ("next", SIM_STATES): (torch.float64, ("N", "D")),
    ("next", SUCCESS): (torch.bool, (1,)),
    ("next", INVALID): (torch.bool, (1,)),
    ("next", REWARD_TASK): (torch.float32, (1,)),
    ("next", "reward"): (torch.float32, (1,)),
    ("next", "done"): (torch.bool, (1,)),
    ("next", "terminated"): (torch.bool, (1,)),
    ("next", "truncated"): (torch.bool, (1,)),
    **dict.fromkeys((REWARD_REC, REWARD_REC_RAW, REWARD_REC_COPY), (torch.float32, (1,))),
    REWARD_REC_MASK: (torch.bool, (1,)),
    RETURN: (torch.float32, (1,)),
    ADVANTAGE: (torch.float32, (1,)),
}

#: Without these a record cannot be replayed: the log-prob could not be recomputed from it.
REQUIRED: tuple[NestedKey, ...] = (
    IMAGE,
    PROPRIO,
    *EPISODE_KEYS,
    CHUNK_INDEX,
    ACTION,
    CHAIN,
    K_STAR,
    LOG_PROB,
    LOG_PROB_ROWS,
    NOISE_SEED,
    ("next", EXECUTED_MASK),
    ("next", SUCCESS),
    ("next", "done"),
)


def validate_macro_step(record: TensorDictBase, *, required: Iterable[NestedKey] = REQUIRED) -> None:
    """Check a batch of macro-steps against the contract.

    Args:
        record: macro-steps of any batch size, as a collector yields them.

    Keyword Args:
        required: keys that must be there. Every other key of :data:`MACRO_STEP` is checked when present.

    Raises:
        KeyError: a required key is missing.
        ValueError: a key has the wrong dtype or shape, two keys disagree on a shared size, a float is not finite, or
            the executed actions are not a prefix of the chunk. The message names the key and what was found.
    """
    missing = [key for key in required if record.get(key, None) is None]
    if missing:
        have = sorted(str(key) for key in record.keys(True, True))
        raise KeyError(f"macro-step record lacks {missing}; it has {have}")
    sizes: dict[str, tuple[int, NestedKey]] = {}
    for key, (dtype, event_shape) in MACRO_STEP.items():
        value = record.get(key, None)
        if value is None:
            continue
        if value.dtype != dtype:
            raise ValueError(f"{key!r} must be {dtype}, found {value.dtype}")
        found = tuple(value.shape[record.ndim :])
        if len(found) != len(event_shape):
            raise ValueError(f"{key!r} must have event shape {event_shape}, found {found}")
        for want, have in zip(event_shape, found, strict=True):
            name = str(want)
            size, first = sizes.setdefault(name, (int(want) if isinstance(want, int) else have, key))
            if have != size:
                raise ValueError(f"{key!r} has {name}={have} in shape {found}, but {first!r} says {name}={size}")
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ValueError(f"{key!r} holds values that are not finite")
    executed = record.get(("next", EXECUTED_MASK), None)
    if executed is not None and bool((executed[..., 1:] & ~executed[..., :-1]).any()):
        raise ValueError(f"('next', {EXECUTED_MASK!r}) must mark a prefix of the chunk")
