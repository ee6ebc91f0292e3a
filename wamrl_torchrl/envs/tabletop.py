"""A reach-grasp-place world without a simulator, with the contract of LIBERO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from wamrl_torchrl import schema
from wamrl_torchrl.envs import tabletop_expert
from wamrl_torchrl.envs import tabletop_world as world
from wamrl_torchrl.envs.chunk import ChunkEnv, Outcome
from wamrl_torchrl.envs.tabletop_render import render
from wamrl_torchrl.envs.tabletop_world import TABLETOP_INSTRUCTIONS

__all__ = ["MAX_EPISODE_STEPS", "TABLETOP_INSTRUCTIONS", "TableTopEnv"]

MAX_EPISODE_STEPS = 64  # default horizon, in executed actions


class TableTopEnv(ChunkEnv):
    """Batched table-top world: three blocks, two plates, a gripper seen by two cameras, six tasks given by instruction.

    It stands in for LIBERO wherever no simulator is wanted: same keys, same actions, same meaning of the ids. All slots
    advance and are painted together. A good policy needs 3 to 6 chunks of 8 actions; grasping asks for a precision of
    20 mm, and a missed grasp can be tried again within the horizon. Episodes with the same task, init state, env seed
    and actions are equal bit for bit, in any slot and beside any others. See
    :mod:`wamrl_torchrl.envs.tabletop_world` for the layouts and the physics.

    ``sim_states`` of a step hold the world before it and after each executed action; behind the last executed action
    the last state is repeated.

    Args:
        num_envs: slots N.

    Keyword Args:
        task_ids: tasks that random episodes are dealt from, positions in :data:`TABLETOP_INSTRUCTIONS`; None for all.
        init_state_ids: init states that random episodes are dealt from. By convention 0..39 train and 40..49 are held
            out; any id from 0 on is a layout of its own.
        start_states: states to start from by task: init state id ``50 + j`` stands for ``start_states[task_id][j]``,
            float64 [D] as in ``sim_states``, whatever the env seed; plain ids then end at 49.
        replan_steps: actions executed per chunk.
        frame_offsets: executed actions after which a future frame is returned; ``"every"`` for all.
        images: return pictures; nothing is painted without.
        max_episode_steps: an episode is truncated after so many executed actions.
        image_size: height and width of the two views together, multiples of 32.

    Raises:
        ValueError: an option or an episode id is out of range, or ``start_states`` has the wrong shape.
        KeyError: an episode names a start state of a task that ``start_states`` lacks.
    """

    max_episode_steps: int

    def __init__(
        self,
        num_envs: int,
        *,
        task_ids: Sequence[int] | None = None,
        init_state_ids: Sequence[int] = range(40),
        start_states: Mapping[int, Tensor] | None = None,
        replan_steps: int = 8,
        frame_offsets: Sequence[int] | Literal["every"] = schema.FRAME_OFFSETS,
        images: bool = True,
        max_episode_steps: int = MAX_EPISODE_STEPS,
        image_size: tuple[int, int] = (64, 128),
    ) -> None:
        if len(image_size) != 2 or any(size < 32 or size % 32 for size in image_size):
            raise ValueError(f"image_size must be (height, width) in multiples of 32, got {tuple(image_size)}")
        height, width = image_size
        super().__init__(
            num_envs,
            image_size=(height, width),
            replan_steps=replan_steps,
            max_episode_steps=max_episode_steps,
            frame_offsets=frame_offsets,
            images=images,
            sim_state_dim=world.STATE_DIM,
        )
        self.task_ids = tuple(range(len(TABLETOP_INSTRUCTIONS)) if task_ids is None else task_ids)
        self.init_state_ids = tuple(init_state_ids)
        self.start_states = None if start_states is None else dict(start_states)
        if not self.task_ids or not self.init_state_ids:
            raise ValueError("task_ids and init_state_ids must not be empty")
        for task_id, stored in (self.start_states or {}).items():
            if stored.dtype != torch.float64 or stored.ndim != 2 or stored.shape[1] != world.STATE_DIM:
                want = f"float64 [M,{world.STATE_DIM}]"
                raise ValueError(f"start_states[{task_id}] must be {want}, found {stored.dtype} {tuple(stored.shape)}")
        dealt = torch.cartesian_prod(torch.tensor(self.task_ids), torch.tensor(self.init_state_ids))
        self._initial_states(torch.nn.functional.pad(dealt, (0, 3)))  # refuses what could not be dealt
        self._world = torch.zeros(num_envs, world.STATE_DIM, dtype=torch.float64)
        self._image = torch.zeros(num_envs, 3, height, width, dtype=torch.uint8)

    def demonstrate(
        self,
        episodes: Tensor,
        *,
        noise: float = 0.0,
        grasp_offset: Sequence[float] = (0.0, 0.0),
        start_spread: float = 0.0,
        aligned: float = tabletop_expert.ALIGNED,
        seed: int = 0,
        frame_stride: int = schema.VIDEO_STRIDE,
        render: bool = True,
    ) -> list[TensorDict]:
        """Let the scripted expert run ``episodes`` (int64 [M,5], columns of ``schema.EPISODE_KEYS``), all at once.

        The slots of the environment are not touched. The options and the result are those of
        :func:`wamrl_torchrl.envs.tabletop_expert.demonstrate`.
        """
        return tabletop_expert.demonstrate(
            episodes,
            self._initial_states(episodes),
            max_episode_steps=self.max_episode_steps,
            image_size=self.image_size,
            noise=noise,
            grasp_offset=grasp_offset,
            start_spread=start_spread,
            aligned=aligned,
            seed=seed,
            frame_stride=frame_stride,
            render_frames=render,
        )

    def iter_demonstrations(self, episodes: Tensor, **options) -> Iterator[tuple[int, TensorDict]]:
        """Yield (row of ``episodes``, demonstration); the options are those of :meth:`demonstrate`."""
        yield from enumerate(self.demonstrate(episodes, **options))

    def _initial_states(self, episodes: Tensor) -> Tensor:
        """World states at the start of ``episodes`` (int64 [M,5]); refuses ids that name nothing."""
        task_ids, init_ids, env_seeds = episodes[:, :3].unbind(-1)
        unknown = task_ids[(task_ids < 0) | (task_ids >= len(TABLETOP_INSTRUCTIONS))].tolist()
        if unknown:
            raise ValueError(f"{schema.TASK_ID} must lie in 0..{len(TABLETOP_INSTRUCTIONS) - 1}, got {unknown}")
        if bool((init_ids < 0).any()):
            raise ValueError(f"{schema.INIT_STATE_ID} must not be negative, got {init_ids[init_ids < 0].tolist()}")
        states = world.initial_states(task_ids, init_ids, env_seeds)
        if self.start_states is None:
            return states
        for task_id in task_ids[init_ids >= schema.PLAIN_INIT_STATES].unique().tolist():
            if task_id not in self.start_states:
                raise KeyError(
                    f"{schema.INIT_STATE_ID} >= {schema.PLAIN_INIT_STATES} names a row of start_states[{task_id}], "
                    f"but start_states has tasks {sorted(self.start_states)} only"
                )
            rows = ((task_ids == task_id) & (init_ids >= schema.PLAIN_INIT_STATES)).nonzero().squeeze(-1)
            stored, wanted = self.start_states[task_id], init_ids[rows] - schema.PLAIN_INIT_STATES
            if int(wanted.max()) >= len(stored):
                last = schema.PLAIN_INIT_STATES + len(stored) - 1
                found = schema.PLAIN_INIT_STATES + int(wanted.max())
                raise ValueError(f"{schema.INIT_STATE_ID} of task {task_id} must be at most {last}, got {found}")
            states[rows] = stored[wanted]
        return states

    # ---- what ChunkEnv asks for ---------------------------------------------------------------------------------
    def _draw_episodes(self, count: int, generator: torch.Generator) -> Tensor:
        columns = [
            torch.tensor(self.task_ids)[torch.randint(len(self.task_ids), (count,), generator=generator)],
            torch.tensor(self.init_state_ids)[torch.randint(len(self.init_state_ids), (count,), generator=generator)],
            torch.randint(2**31 - 1, (count,), generator=generator),
        ]
        return torch.stack(columns, -1)

    def _start_episodes(self, slots: Tensor, episodes: Tensor) -> None:
        self._world[slots] = self._initial_states(episodes)
        if self.images:
            self._image[slots] = render(self._world[slots], self.image_size)

    def _execute(self, slots: Tensor, actions: Tensor, limits: Tensor) -> Outcome:
        task_ids = self._episodes[slots, 0]
        state = self._world[slots]
        executed, success = torch.zeros_like(limits), torch.zeros(len(slots), dtype=torch.bool)
        trail = [state]
        for step in range(self.replan_steps):
            runs = (step < limits) & ~success
            state = torch.where(runs[:, None], world.advance(state, actions[:, step]), state)
            executed += runs
            success |= runs & world.succeeded(state, task_ids)
            trail.append(state)
        self._world[slots] = state
        sim_states = torch.stack(trail, 1)
        frames = self._render_outcome(slots, sim_states, executed) if self.images else None
        return Outcome(executed, success, frames, sim_states)

    def _render_outcome(self, slots: Tensor, sim_states: Tensor, executed: Tensor) -> Tensor:
        """Paint the frames that were reached, uint8 [M,F,3,H,W], and the last one into the slots' observation."""
        count, offsets = len(slots), self._offsets
        future = torch.zeros((count, len(offsets), *self._image.shape[1:]), dtype=torch.uint8)
        row, column = (executed[:, None] >= offsets).nonzero(as_tuple=True)
        at_offset = executed[:, None] == offsets
        # The last frame is painted only where it is not a future frame already.
        apart = (~at_offset.any(-1)).nonzero().squeeze(-1)
        wanted = torch.cat([sim_states[row, offsets[column]], sim_states[apart, executed[apart]]])
        frames = render(wanted, self.image_size)
        future[row, column] = frames[: len(row)]
        self._image[slots[apart]] = frames[len(row) :]
        same, column = at_offset.nonzero(as_tuple=True)
        self._image[slots[same]] = future[same, column]
        return future

    def _observe(self) -> tuple[Tensor | None, Tensor]:
        return self._image.clone() if self.images else None, world.proprioception(self._world)
