"""The chunk environment: what LIBERO and TableTop share, from specs to episode identity.

A step takes a chunk of 32 actions and executes the first ``replan_steps`` of them, so one environment step is one
decision of the policy. TorchRL's ``MultiAction`` is not used: it loses the reward of a success in mid-chunk.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.data import Binary, Bounded, Composite, Unbounded
from torchrl.envs import EnvBase

from wamrl_torchrl import schema
from wamrl_torchrl.data.rows import put


class Outcome(NamedTuple):
    """What executing a chunk gave, one row for each of the M slots that run an episode."""

    executed: Tensor  # int64 [M], actions executed, at most replan_steps
    success: Tensor  # bool [M]
    future_frames: Tensor | None  # uint8 [M,F,3,H,W], frames at the offsets that were reached, zeros elsewhere
    sim_states: Tensor | None  # float64 [M,replan_steps+1,D], or None where there is no simulator
    lost: Tensor | None = None  # bool [M], simulators that were lost; None where none can be


class ChunkEnv(EnvBase):
    """Batched environment of N slots with one action chunk per step.

    A slot runs one episode at a time. Which one is said at reset by :data:`wamrl_torchrl.schema.EPISODE_KEYS` in the
    reset tensordict, each int64 ``[N,1]``; without them the environment deals random episodes from its own seed. A
    tensordict that merely carries back the ids of the episode that a slot has just run (as after an automatic reset) is
    an observation and not a request, so the slot is dealt a new episode. ``episode_id`` ``-1`` parks a slot: nothing is
    simulated, and every step of it is truncated with an empty ``executed_mask`` until it is reset to an episode,
    dealt or asked for; asking again to park it keeps it parked.

    A step in which a slot's simulator was lost has ``("next", "invalid")`` set: nothing was executed, the episode is
    truncated and void, and whoever dealt it should deal it again: the same five ids give the same episode, and are no
    mere echo then.

    Subclasses implement :meth:`_start_episodes`, :meth:`_execute`, :meth:`_observe` and :meth:`_draw_episodes`, and
    :meth:`_await_starts` if an episode's start takes time.

    Args:
        num_envs: slots N; the batch size is ``[N]``.

    Keyword Args:
        image_size: height and width of the picture (both cameras side by side).
        replan_steps: actions executed per chunk, 1 to 32.
        max_episode_steps: an episode is truncated after so many executed actions; one number, or one per task id.
        frame_offsets: executed actions after which a future frame is returned; increasing, from 1 to ``replan_steps``,
            none for ``()``, all for ``"every"``.
        images: return pictures. Without them nothing is rendered: the observation has no ``image``, and a step neither
            ``future_frames`` nor ``future_mask``, whatever ``frame_offsets`` says.
        background_reset: a reset of some slots does not wait for them while others run an episode. A slot whose
            episode is not ready yet is :attr:`pending`: it looks parked, and begins at a later reset of it (every step
            of it ends, so a collector asks for one each time). ``reset()`` without a mask waits for all.
        sim_state_dim: width D of a stored simulator state, or None for none.

    Raises:
        ValueError: an option is out of range, or at ``step`` a chunk has the wrong shape or is not finite.
    """

    def __init__(
        self,
        num_envs: int,
        *,
        image_size: tuple[int, int],
        replan_steps: int,
        max_episode_steps: int | Sequence[int],
        frame_offsets: Sequence[int] | Literal["every"] = schema.FRAME_OFFSETS,
        images: bool = True,
        sim_state_dim: int | None = None,
        background_reset: bool = False,
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs must be at least 1, got {num_envs}")
        if not 1 <= replan_steps <= schema.CHUNK:
            raise ValueError(f"replan_steps must lie in 1..{schema.CHUNK} (the chunk), got {replan_steps}")
        every = range(1, replan_steps + 1)
        offsets = tuple(every if frame_offsets == "every" else frame_offsets) if images else ()
        if not all(1 <= o <= replan_steps for o in offsets) or list(offsets) != sorted(set(offsets)):
            raise ValueError(
                f"frame_offsets must increase within 1..replan_steps={replan_steps} (or be 'every'), got {offsets}"
            )
        limits = [max_episode_steps] if isinstance(max_episode_steps, int) else list(max_episode_steps)
        if not limits or min(limits) < 1:
            raise ValueError(f"max_episode_steps must be at least 1, got {max_episode_steps}")
        super().__init__(device="cpu", batch_size=[num_envs])
        self.num_envs = num_envs
        height, width = image_size
        self.image_size = (height, width)
        self.replan_steps = replan_steps
        self.max_episode_steps = max_episode_steps if isinstance(max_episode_steps, int) else tuple(limits)
        self.images = images
        self.frame_offsets = offsets
        self._offsets = torch.tensor(offsets, dtype=torch.int64)
        self._sim_state_dim = sim_state_dim
        self.background_reset = background_reset
        self._episodes = torch.full((num_envs, len(schema.EPISODE_KEYS)), schema.PARKED, dtype=torch.int64)
        self._starting = self._episodes.clone()  # episodes of the slots that are pending
        self._slot_tasks = torch.full((num_envs,), -1, dtype=torch.int64)
        self._lost = torch.zeros(num_envs, dtype=torch.bool)  # slots whose last step lost their simulator
        self._steps = torch.zeros(num_envs, dtype=torch.int64)
        self._chunk_index = torch.zeros(num_envs, dtype=torch.int64)
        self._next_episode_id = 0
        self._generator = torch.Generator()
        self._make_specs()
        self.set_seed(0)

    # ---- what a subclass provides -------------------------------------------------------------------------------
    @abc.abstractmethod
    def _start_episodes(self, slots: Tensor, episodes: Tensor) -> None:
        """Start ``episodes`` (int64 [M,5], columns of ``EPISODE_KEYS``) in ``slots`` (int64 [M]); need not wait."""

    def _await_starts(self, slots: Tensor, at_least: int) -> Tensor:  # noqa: ARG002 (for those that wait)
        """Those of ``slots`` (int64 [M], all started) whose episode is ready; waits until ``at_least`` are."""
        return slots

    @abc.abstractmethod
    def _execute(self, slots: Tensor, actions: Tensor, limits: Tensor) -> Outcome:
        """Execute ``actions`` (float32 [M,32,7]) in ``slots``, at most ``limits`` (int64 [M]) each; M rows back."""

    @abc.abstractmethod
    def _observe(self) -> tuple[Tensor | None, Tensor]:
        """Image uint8 [N,3,H,W] (None without images) and state float32 [N,8] of all slots now.

        They are tensors that later steps leave alone.
        """

    @abc.abstractmethod
    def _draw_episodes(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw ``count`` random (task, init state, env seed), int64 [count,3]."""

    # ---- specs --------------------------------------------------------------------------------------------------
    def _make_specs(self) -> None:
        batch, (height, width) = (self.num_envs,), self.image_size
        ids = {key: Unbounded((*batch, 1), dtype=torch.int64) for key in (*schema.EPISODE_KEYS, schema.CHUNK_INDEX)}
        frames = (*batch, len(self.frame_offsets), 3, height, width)
        observation = Composite(
            observation=Composite(
                image=Bounded(0, 255, (*batch, 3, height, width), dtype=torch.uint8),
                state=Unbounded((*batch, schema.STATE_DIM), dtype=torch.float32),
                shape=batch,
            ),
            **ids,
            **{
                schema.FUTURE_FRAMES: Bounded(0, 255, frames, dtype=torch.uint8),
                schema.FUTURE_MASK: Binary(shape=(*batch, len(self.frame_offsets)), dtype=torch.bool),
                schema.EXECUTED_MASK: Binary(shape=(*batch, schema.CHUNK), dtype=torch.bool),
                schema.SUCCESS: Binary(shape=(*batch, 1), dtype=torch.bool),
                schema.INVALID: Binary(shape=(*batch, 1), dtype=torch.bool),
            },
            shape=batch,
        )
        if not self.images:
            for key in (schema.IMAGE, schema.FUTURE_FRAMES, schema.FUTURE_MASK):
                del observation[key]
        if self._sim_state_dim is not None:
            shape = (*batch, self.replan_steps + 1, self._sim_state_dim)
            observation[schema.SIM_STATES] = Unbounded(shape, dtype=torch.float64)
        self.observation_spec = observation
        # The ids are state as well: a wrapper such as TransformedEnv forwards to reset only what the state spec names.
        self.state_spec = Composite({key: ids[key].clone() for key in schema.EPISODE_KEYS}, shape=batch)
        self.action_spec = Bounded(-1.0, 1.0, (*batch, schema.CHUNK, schema.ACTION_DIM), dtype=torch.float32)
        self.reward_spec = Composite(
            {key: Unbounded((*batch, 1), dtype=torch.float32) for key in ("reward", schema.REWARD_TASK)}, shape=batch
        )
        done = {key: Binary(shape=(*batch, 1), dtype=torch.bool) for key in ("done", "terminated", "truncated")}
        self.done_spec = Composite(done, shape=batch)

    def _set_seed(self, seed: int | None) -> None:
        self._generator.manual_seed(0 if seed is None else seed)

    # ---- episodes -----------------------------------------------------------------------------------------------
    @property
    def parked(self) -> Tensor:
        """Bool [N]: slots that run no episode, or none yet."""
        return self._episodes[:, -1] == schema.PARKED

    @property
    def pending(self) -> Tensor:
        """Bool [N]: slots whose episode is being started in the background; they look parked until a later reset."""
        return self._starting[:, -1] != schema.PARKED

    @property
    def slot_tasks(self) -> Tensor:
        """Int64 [N]: the task that each slot was last given, -1 if none; changing it may be expensive."""
        return self._slot_tasks.clone()

    def _requested_episodes(self, tensordict: TensorDictBase | None, slots: Tensor) -> Tensor:
        """Episodes to start in ``slots``: those asked for, else freshly dealt ones; int64 [M,5]."""
        keys = set() if tensordict is None else set(tensordict.keys())
        have = [key for key in schema.EPISODE_KEYS if key in keys]
        columns = [schema.EPISODE_KEYS.index(key) for key in have]
        dealt = torch.empty(len(slots), len(schema.EPISODE_KEYS), dtype=torch.int64)
        dealt[:, :3] = self._draw_episodes(len(slots), self._generator)
        # A dealt episode is a group of its own.
        dealt[:, 3:] = (self._next_episode_id + torch.arange(len(slots)))[:, None]
        self._next_episode_id += len(slots)
        if tensordict is None or not have:
            return dealt
        asked = torch.stack([tensordict.get(key).reshape(self.num_envs) for key in have], -1)[slots]
        is_echo = (asked == self._episodes[slots][:, columns]).all(-1, keepdim=True)
        is_echo &= torch.tensor(schema.EPISODE_ID in have) & ~(self.parked | self._lost)[slots, None]
        dealt[:, columns] = torch.where(is_echo, dealt[:, columns], asked)
        return dealt

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs) -> TensorDictBase:  # noqa: ARG002
        mask = None if tensordict is None else tensordict.get("_reset", None)
        everything = mask is None
        mask = torch.ones(self.num_envs, dtype=torch.bool) if mask is None else mask.reshape(self.num_envs)
        if everything:
            self._begin(
                mask, wait_for="all"
            )  # what is being started is given up, but a simulator finishes what it does
        self._check_waiting(tensordict, (mask & self.pending).nonzero().squeeze(-1))
        slots = (mask & ~self.pending).nonzero().squeeze(-1)
        episodes = self._requested_episodes(tensordict, slots)
        busy = episodes[:, -1] != schema.PARKED
        self._start_episodes(slots[busy], episodes[busy])
        # Only now: a request that is refused leaves the slots as they were.
        self._slot_tasks[slots[busy]] = episodes[busy, 0]
        self._starting[slots] = episodes
        self._episodes[slots] = torch.where(busy[:, None], schema.PARKED, episodes)
        self._steps[slots] = 0
        self._chunk_index[slots] = 0
        if everything or not self.background_reset:
            self._begin(mask, wait_for="all")
        else:
            # While nobody runs there is nothing to go on with.
            self._begin(mask, wait_for="none" if bool((~self.parked).any()) else "one")
        out = self.observation_spec.zero()
        out.update(self._observation())
        return out.update(self.done_spec.zero())

    def _begin(self, mask: Tensor, *, wait_for: Literal["none", "one", "all"]) -> None:
        """Let pending slots of ``mask`` (bool [N]) whose episode is ready begin it."""
        slots = (self.pending & mask).nonzero().squeeze(-1)
        if len(slots):
            ready = self._await_starts(slots, {"none": 0, "one": 1, "all": len(slots)}[wait_for])
            self._episodes[ready] = self._starting[ready]
            self._starting[ready] = schema.PARKED

    def _check_waiting(self, tensordict: TensorDictBase | None, slots: Tensor) -> None:
        asked = None if tensordict is None else tensordict.get(schema.EPISODE_ID, None)
        if asked is None:
            return
        other = slots[asked.reshape(self.num_envs)[slots] != schema.PARKED].tolist()
        if other:
            raise ValueError(
                f"slots {other} are still starting an episode and cannot be given another: ask for {schema.EPISODE_ID} "
                f"{schema.PARKED} where `pending` is set"
            )

    def _observation(self) -> TensorDict:
        image, state = self._observe()
        out = TensorDict({"observation": TensorDict({"state": state}, batch_size=self.batch_size)})
        if image is not None:
            out.set(schema.IMAGE, image)
        for column, key in enumerate(schema.EPISODE_KEYS):
            out.set(key, self._episodes[:, column : column + 1].clone())
        out.set(schema.CHUNK_INDEX, self._chunk_index[:, None].clone())
        return out.auto_batch_size_(1)

    # ---- one macro-step -----------------------------------------------------------------------------------------
    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        actions = tensordict.get(self.action_key)
        self._check_actions(actions)
        busy = ~self.parked
        slots = busy.nonzero().squeeze(-1)
        horizons = torch.zeros(self.num_envs, dtype=torch.int64)
        horizons[slots] = self._horizons(self._episodes[slots, 0])
        limits = (horizons - self._steps)[slots].clamp(max=self.replan_steps)
        outcome = self._execute(slots, actions[slots], limits)

        executed = torch.zeros(self.num_envs, dtype=torch.int64)
        success = torch.zeros(self.num_envs, dtype=torch.bool)
        self._lost[:] = False
        if outcome.lost is not None:
            self._lost[slots] = outcome.lost
        lost = self._lost.clone()
        executed[slots] = outcome.executed
        success[slots] = outcome.success
        self._steps += executed
        self._chunk_index[slots] += 1
        truncated = ~busy | lost | (~success & (self._steps >= horizons))

        out = self._observation()
        reward = success[:, None].float()
        out.update({
            schema.EXECUTED_MASK: torch.arange(schema.CHUNK) < executed[:, None],
            schema.SUCCESS: success[:, None],
            schema.INVALID: lost[:, None],
            schema.REWARD_TASK: reward,
            "reward": reward.clone(),
            "terminated": success[:, None].clone(),
            "truncated": truncated[:, None],
            "done": (success | truncated)[:, None],
        })  # fmt: skip
        if outcome.future_frames is not None:
            frames = outcome.future_frames
            if len(slots) < self.num_envs:
                frames = torch.zeros((self.num_envs, *frames.shape[1:]), dtype=torch.uint8)
                put(frames, slots, outcome.future_frames)
            out.set(schema.FUTURE_FRAMES, frames)
            out.set(schema.FUTURE_MASK, executed[:, None] >= self._offsets)
        if outcome.sim_states is not None:
            states = torch.zeros((self.num_envs, *outcome.sim_states.shape[1:]), dtype=torch.float64)
            put(states, slots, outcome.sim_states)
            out.set(schema.SIM_STATES, states)
        return out

    def _horizons(self, tasks: Tensor) -> Tensor:
        """Limit in executed actions of an episode of each of ``tasks`` (int64 [M]), int64 [M]."""
        limits = torch.as_tensor(self.max_episode_steps)
        return limits.expand(len(tasks)) if limits.ndim == 0 else limits[tasks]

    def _check_actions(self, actions: Tensor) -> None:
        want = (self.num_envs, schema.CHUNK, schema.ACTION_DIM)
        if tuple(actions.shape) != want:
            raise ValueError(f"{self.action_key!r} must have shape {want}, found {tuple(actions.shape)}")
        finite = torch.isfinite(actions).flatten(1).all(-1)
        if not bool(finite.all()):
            slot = int((~finite).nonzero()[0])
            ids = dict(zip(schema.EPISODE_KEYS, self._episodes[slot].tolist(), strict=True))
            raise ValueError(f"{self.action_key!r} holds NaN or infinite values in slot {slot} ({ids})")
