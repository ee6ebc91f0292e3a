"""The world of :class:`wamrl_torchrl.envs.tabletop.TableTopEnv`: layouts, physics and success, for any number of rows.

A world state is one float64 row of :data:`STATE_DIM` numbers, and everything here is a pure function of such rows. Only
additions, multiplications and comparisons are used, which round the same way in every batch, so that a row evolves bit
for bit alike whatever the rows beside it. Lengths are metres; x points away from the viewer, y to the right, z up.
"""

from __future__ import annotations

import torch
from torch import Tensor

OBJECTS = ("red block", "green block", "blue block")
GOALS = ("yellow plate", "purple plate")
#: ``task_id`` is the position in this list.
TABLETOP_INSTRUCTIONS = [f"put the {item} on the {goal}" for item in OBJECTS for goal in GOALS]

# Columns of a world state.
POSITION = slice(0, 3)  # gripper tip
WIDTH = 3  # distance of each finger from the middle
HELD = 4  # number of the object in the grip, or -1
OBJECT_POSITIONS = slice(5, 14)  # centres, 3 per object
GOAL_POSITIONS = slice(14, 18)  # x and y, 2 per goal
STATE_DIM = 18

POSITION_STEP = 0.02  # gripper travel per action of size 1
WORKSPACE_LOW, WORKSPACE_HIGH = (-0.2, -0.2, 0.01), (0.2, 0.2, 0.22)
OPEN_WIDTH = 0.04
WIDTH_STEP = 0.008  # an open gripper meets an object at the third closing action
OBJECT_HALF = 0.02  # half the edge of a block: its height of rest, and the finger distance around it
GRASP_TOLERANCE = (0.02, 0.02, 0.02)  # of the tip from the object's centre when the fingers meet it
FALL_STEP = 0.04  # drop of a free object per action
GOAL_RADIUS = 0.045  # of a plate; an object lies on it if its centre does

HOME = (0.0, 0.0, 0.18)
#: Objects stand in the three cells of the near row, goals in two of the three of the far row.
NEAR_ROW, FAR_ROW, CELL, CELL_JITTER = -0.09, 0.09, 0.12, 0.022
HOME_JITTER = 0.02
SEED_JITTER = 0.008  # how far an environment seed moves the goals


def uniform_hash(*keys: Tensor) -> Tensor:
    """Float64 uniforms in [0, 1) that depend on nothing but the int64 ``keys`` (broadcast against each other)."""
    mask = 0xFFFFFFFF
    state = torch.zeros((), dtype=torch.int64)
    for key in keys:
        # The finaliser of MurmurHash3 on 32 bits; the low word of a product survives the overflow of int64.
        state = (state * 31 + key + 0x9E3779B9) & mask
        for multiplier, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13), (1, 16)):
            state = ((state ^ (state >> shift)) * multiplier) & mask
    return state.double() / (mask + 1)


def initial_states(task_ids: Tensor, init_state_ids: Tensor, env_seeds: Tensor) -> Tensor:
    """World states at the start of episodes.

    Args:
        task_ids: int64 [M].
        init_state_ids: int64 [M]; with the task it sets where the gripper, the objects and the goals are.
        env_seeds: int64 [M]; shifts the goals by at most :data:`SEED_JITTER`, as LIBERO draws fixtures from its seed.

    Returns:
        Float64 [M, STATE_DIM].
    """
    task, init, seed = task_ids[:, None], init_state_ids[:, None], env_seeds[:, None]
    near = uniform_hash(task, init, torch.arange(0, 3)).argsort(-1)[:, : len(OBJECTS)]
    far = uniform_hash(task, init, torch.arange(3, 6)).argsort(-1)[:, : len(GOALS)]
    y = CELL * (torch.cat([near, far], -1) - 1).double()
    x = torch.tensor([NEAR_ROW] * len(OBJECTS) + [FAR_ROW] * len(GOALS), dtype=torch.float64).expand_as(y)
    xy = torch.stack([x, y], -1).flatten(1)
    xy = xy + CELL_JITTER * (2 * uniform_hash(task, init, torch.arange(100, 100 + xy.shape[1])) - 1)
    goals = xy[:, 2 * len(OBJECTS) :]
    shift = SEED_JITTER * (2 * uniform_hash(task, init, seed, torch.arange(2 * len(GOALS))) - 1)
    states = torch.empty(len(task_ids), STATE_DIM, dtype=torch.float64)
    states[:, POSITION] = torch.tensor(HOME, dtype=torch.float64)
    states[:, POSITION] += HOME_JITTER * (2 * uniform_hash(task, init, torch.arange(200, 203)) - 1)
    states[:, WIDTH] = OPEN_WIDTH
    states[:, HELD] = -1
    objects = states[:, OBJECT_POSITIONS].unflatten(-1, (len(OBJECTS), 3))
    objects[..., :2] = xy[:, : 2 * len(OBJECTS)].unflatten(-1, (len(OBJECTS), 2))
    objects[..., 2] = OBJECT_HALF
    states[:, GOAL_POSITIONS] = goals + shift
    return states


def advance(states: Tensor, actions: Tensor) -> Tensor:
    """Execute one action in every row.

    The fingers grasp an object at the action that closes them to its width, and only if the tip is then within
    :data:`GRASP_TOLERANCE` of its centre; otherwise they close on nothing and have to open again. A held object moves
    with the gripper; opening lets it fall.

    Args:
        states: float64 [M, STATE_DIM].
        actions: float [M,7] in [-1, 1] (clipped): position delta, three ignored rotations, gripper by its sign, -1
            opens and 1 closes.

    Returns:
        Float64 [M, STATE_DIM], a new tensor.
    """
    actions = actions.double().clamp(-1.0, 1.0)
    low, high = torch.tensor((WORKSPACE_LOW, WORKSPACE_HIGH), dtype=torch.float64)
    before = states[:, POSITION]
    position = torch.minimum(torch.maximum(before + POSITION_STEP * actions[:, :3], low), high)
    held = states[:, HELD, None] == torch.arange(len(OBJECTS))
    objects = states[:, OBJECT_POSITIONS].unflatten(-1, (len(OBJECTS), 3))
    objects = torch.where(held[..., None], objects + (position - before)[:, None], objects)

    closing = actions[:, 6].sign()
    width = (states[:, WIDTH] - WIDTH_STEP * closing).clamp(0.0, OPEN_WIDTH)
    meets = (states[:, WIDTH] > OBJECT_HALF) & (width <= OBJECT_HALF)
    tolerance = torch.tensor(GRASP_TOLERANCE, dtype=torch.float64)
    within = ((objects - position[:, None]).abs() <= tolerance).all(-1)
    # Objects may lie on one another after a drop; the fingers take the first.
    first = within & (within.cumsum(-1) == 1)
    held = torch.where(meets[:, None], first, held & (width <= OBJECT_HALF)[:, None])
    grips = held.any(-1)
    objects[..., 2] = torch.where(held, objects[..., 2], objects[..., 2] - FALL_STEP).clamp(min=OBJECT_HALF)

    after = states.clone()
    after[:, POSITION] = position
    after[:, WIDTH] = torch.where(grips, OBJECT_HALF, width)
    after[:, HELD] = torch.where(grips, held.to(torch.int64).argmax(-1), -1).double()
    after[:, OBJECT_POSITIONS] = objects.flatten(1)
    return after


def target_object(states: Tensor, task_ids: Tensor) -> Tensor:
    """Centre of the object that the task names, float64 [M,3]."""
    objects = states[:, OBJECT_POSITIONS].unflatten(-1, (len(OBJECTS), 3))
    return objects[torch.arange(len(states)), task_ids // len(GOALS)]


def target_goal(states: Tensor, task_ids: Tensor) -> Tensor:
    """Centre of the goal that the task names, float64 [M,2]."""
    goals = states[:, GOAL_POSITIONS].unflatten(-1, (len(GOALS), 2))
    return goals[torch.arange(len(states)), task_ids % len(GOALS)]


def succeeded(states: Tensor, task_ids: Tensor) -> Tensor:
    """Bool [M]: the task's object lies on its goal and the gripper, empty, has let it go."""
    item = target_object(states, task_ids)
    offset = item[:, :2] - target_goal(states, task_ids)
    centred = offset[:, 0] * offset[:, 0] + offset[:, 1] * offset[:, 1] <= GOAL_RADIUS * GOAL_RADIUS
    return centred & (item[:, 2] <= OBJECT_HALF) & (states[:, HELD] < 0) & (states[:, WIDTH] > OBJECT_HALF)


def proprioception(states: Tensor) -> Tensor:
    """What the policy reads as its state: tip position, no rotation, and the two fingers; float32 [..., 8]."""
    out = states.new_zeros((*states.shape[:-1], 8))
    out[..., :3] = states[..., POSITION]
    out[..., 6] = states[..., WIDTH]
    out[..., 7] = -states[..., WIDTH]
    return out.float()
