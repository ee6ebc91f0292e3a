"""A scripted expert for the table top, and its demonstrations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from wamrl_torchrl.envs import tabletop_world as world
from wamrl_torchrl.envs.tabletop_render import render
from wamrl_torchrl.schema import ACTION_DIM

HOVER = 0.08  # tip height on the way to an object or a goal
ALIGNED = 0.004  # horizontal error, per axis, below which the gripper acts on the object
NEAR_MARGIN = 0.008  # it goes down from so much further off
CLEARANCE_MARGIN = 0.002  # it closes, or lets go, at a height error so much smaller
NOISE_MEMORY = 0.8  # correlation of the noise between two actions
NOISE_AT_CONTACT = 0.3  # factor on the noise near the object and near the goal, where it would only spoil the demo


def _aim(states: Tensor, task_ids: Tensor, grasp_offset: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Where the tip should come to act, float64 [M,3]; its horizontal error, [M]; does it hold the object, bool [M]."""
    tip, item = states[:, world.POSITION], world.target_object(states, task_ids)
    goal = torch.nn.functional.pad(world.target_goal(states, task_ids), (0, 1), value=world.OBJECT_HALF)
    holds = states[:, world.HELD] == (task_ids // len(world.GOALS)).double()
    # A held object hangs off-centre in the grip by up to the grasp tolerance: the object is what must reach the goal.
    grasp = item + torch.tensor([*grasp_offset, 0.0], dtype=item.dtype)
    aim = torch.where(holds[:, None], tip + goal - item, grasp)
    return aim, (aim - tip)[:, :2].abs().amax(-1), holds


def _spread(tip: Tensor, keys: Sequence[Tensor], seed: int, most: float) -> Tensor:
    """The tip [M,3] displaced by up to ``most`` along each axis, within the workspace."""
    # Behind the numbers that the noise takes.
    shift = most * (2 * world.uniform_hash(torch.tensor(seed), *keys, torch.arange(-3, 0)) - 1)
    low, high = torch.tensor((world.WORKSPACE_LOW, world.WORKSPACE_HIGH), dtype=torch.float64)
    return torch.minimum(torch.maximum(tip + shift, low), high)


def expert_action(
    states: Tensor,
    task_ids: Tensor,
    *,
    grasp_offset: Sequence[float] = (0.0, 0.0),
    aligned: float = ALIGNED,
) -> Tensor:
    """The expert's action, a function of the present state alone, so that it recovers from any error.

    Args:
        states: float64 [M, STATE_DIM].
        task_ids: int64 [M].

    Keyword Args:
        grasp_offset: where it grasps, x and y from the object's centre (m).
        aligned: horizontal error, per axis, at which it acts on the object (m).

    Returns:
        Float32 [M,7]: over the object, down, close, up, over the goal, down, open.
    """
    tip, near = states[:, world.POSITION], aligned + NEAR_MARGIN
    aim, error, holds = _aim(states, task_ids, grasp_offset)
    below = aim[:, 2] - tip[:, 2]
    delta = aim - tip
    delta[:, 2] = torch.where(error <= near, below, HOVER - tip[:, 2])
    # Settle over the spot before going down.
    delta[:, 2] = torch.where((error > aligned) & (error <= near), delta[:, 2].clamp(min=0.0), delta[:, 2])
    # Lift before travelling, lest the block be dragged through the others.
    low = holds & (error > near) & (tip[:, 2] < HOVER - world.POSITION_STEP)
    delta[:, :2] = torch.where(low[:, None], 0.0, delta[:, :2])

    arrived = (error <= aligned) & (below.abs() <= aligned - CLEARANCE_MARGIN)
    # Fingers that met nothing open again until they can meet something; a wrong object is let go.
    closes = torch.where(holds, ~arrived, arrived & (states[:, world.WIDTH] > world.OBJECT_HALF))
    closes &= holds | (states[:, world.HELD] < 0)
    actions = torch.zeros(len(states), ACTION_DIM, dtype=torch.float64)
    actions[:, :3] = (delta / world.POSITION_STEP).clamp(-1.0, 1.0)
    actions[:, 6] = torch.where(closes, 1.0, -1.0)
    return actions.float()


def demonstrate(
    episodes: Tensor,
    initial_states: Tensor,
    *,
    max_episode_steps: int,
    image_size: tuple[int, int],
    noise: float = 0.0,
    grasp_offset: Sequence[float] = (0.0, 0.0),
    start_spread: float = 0.0,
    aligned: float = ALIGNED,
    seed: int = 0,
    frame_stride: int = 4,
    render_frames: bool = True,
) -> list[TensorDict]:
    """Run the expert until it succeeds or the horizon ends.

    Args:
        episodes: int64 [M,5], columns of ``schema.EPISODE_KEYS``.
        initial_states: float64 [M, STATE_DIM].

    Keyword Args:
        max_episode_steps: horizon in actions.
        image_size: height and width of the frames.
        noise: standard deviation of the noise added to the executed position deltas, in units of an action.
        grasp_offset: where the expert grasps, x and y from the object's centre (m). Near the tolerance it still
            succeeds, but whoever imitates it with an error does not: a flaw that reinforcement can correct.
        start_spread: the gripper starts up to so far from where it would, along each axis and within its workspace
            (m), so that whoever imitates the expert knows the way back from anywhere.
        aligned: horizontal error, per axis, at which the expert acts (m). A policy that cannot see where an exacting
            expert would act hovers between going on and acting; a content one is easier to imitate.
        seed: of the noise; an episode's noise depends on it and on the episode's five ids alone.
        frame_stride: actions between two frames.
        render_frames: leave ``frames`` out when false.

    Returns:
        One TensorDict (batch size ``[]``) per episode of T actions: ``frames`` uint8 [F,3,H,W] after 0, stride, ...
        actions; ``states`` float32 [T+1,8]; ``actions`` float32 [T,7], the expert's choice in every state;
        ``executed_actions`` float32 [T,7], with the noise; ``sim_states`` float64 [T+1,D]; ``task_id``,
        ``init_state_id``, ``env_seed`` int64 [1]; ``success`` bool [1].

    Raises:
        ValueError: ``noise`` or ``start_spread`` is negative, ``aligned`` out of range, ``grasp_offset`` out of reach,
            or ``frame_stride`` less than 1.
    """
    if noise < 0 or start_spread < 0:
        raise ValueError(f"noise and start_spread must not be negative, got {noise} and {start_spread}")
    most = min(world.GRASP_TOLERANCE)
    if not ALIGNED <= aligned < most:
        raise ValueError(f"aligned must lie in {ALIGNED}..{most} m (excluded), the tolerance of a grasp: got {aligned}")
    reach = [tolerance - aligned for tolerance in world.GRASP_TOLERANCE[:2]]
    if len(grasp_offset) != 2 or any(abs(part) > most for part, most in zip(grasp_offset, reach, strict=True)):
        raise ValueError(
            f"grasp_offset must be x and y (m) of at most {reach}, or nothing is grasped: got {grasp_offset}"
        )
    if frame_stride < 1:
        raise ValueError(f"frame_stride must be at least 1, got {frame_stride}")
    count, task_ids = len(episodes), episodes[:, 0]
    state, success = initial_states.clone(), torch.zeros(count, dtype=torch.bool)
    lengths = torch.zeros(count, dtype=torch.int64)
    drift = torch.zeros(count, 3, dtype=torch.float64)
    keys = [column[:, None] for column in episodes.unbind(-1)]
    state[:, world.POSITION] = _spread(state[:, world.POSITION], keys, seed, start_spread)
    trail, chosen, executed = [state], [], []
    for step in range(max_episode_steps):
        action = expert_action(state, task_ids, grasp_offset=grasp_offset, aligned=aligned)
        # Uniform innovations whose stationary standard deviation is `noise`.
        pulse = 2 * world.uniform_hash(torch.tensor(seed), *keys, torch.arange(3 * step, 3 * step + 3)) - 1
        drift = NOISE_MEMORY * drift + (3 * (1 - NOISE_MEMORY**2)) ** 0.5 * noise * pulse
        near = _aim(state, task_ids, grasp_offset)[1][:, None] <= aligned + NEAR_MARGIN
        taken = action.clone()
        taken[:, :3] = (action[:, :3] + torch.where(near, NOISE_AT_CONTACT * drift, drift).float()).clamp(-1.0, 1.0)
        state = torch.where(success[:, None], state, world.advance(state, taken))
        lengths += ~success
        success = success | world.succeeded(state, task_ids)
        trail.append(state)
        chosen.append(action)
        executed.append(taken)
        if bool(success.all()):
            break
    sim_states, actions, executed_actions = torch.stack(trail, 1), torch.stack(chosen, 1), torch.stack(executed, 1)
    proprioception = world.proprioception(sim_states)
    demos = []
    for row, length in enumerate(lengths.tolist()):
        demo = TensorDict({
            "states": proprioception[row, : length + 1].clone(),
            "actions": actions[row, :length].clone(),
            "executed_actions": executed_actions[row, :length].clone(),
            "sim_states": sim_states[row, : length + 1].clone(),
            "task_id": episodes[row, 0:1].clone(),
            "init_state_id": episodes[row, 1:2].clone(),
            "env_seed": episodes[row, 2:3].clone(),
            "success": success[row : row + 1].clone(),
        })  # fmt: skip
        demos.append(demo)
    if render_frames and demos:
        shown = [demo["sim_states"][::frame_stride] for demo in demos]
        frames = render(torch.cat(shown), image_size).split([len(states) for states in shown])
        for demo, clip in zip(demos, frames, strict=True):
            demo["frames"] = clip.clone()
    return demos
