"""Whole episodes of variable length, as video SFT and behaviour cloning need them, and windows sampled from them.

An episode is a tensordict without batch dims. It has ``T`` actions and ``F = T // 4 + 1`` frames, at steps 0, 4, ...:

==================  =======================  ===========================================================================
``frames``          uint8 ``[F,3,H,W]``      picture at every 4th step
``states``          float32 ``[F,8]``        raw state at the same steps
``is_decision``     bool ``[F]``             whether a window may start there
``actions``         float32 ``[T,7]``        action to learn, environment convention; for noisy demonstrations the clean
                                             label and not what was executed
``task_id``         int64 ``[1]``            with ``init_state_id`` and ``env_seed``: the initial condition
``success``         bool ``[1]``             whether the episode ended in success
``sim_states``      float64 ``[T+1,D]``      optional: simulator state at every step
==================  =======================  ===========================================================================

A demonstration knows its state at every step: it stores ``states[::4]`` and all decisions. A rollout observes the state
where a chunk starts and frames between; there ``is_decision`` is False and ``states`` repeats the last one observed.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from wamrl_torchrl import schema
from wamrl_torchrl.data.rows import put, take, take_rows
from wamrl_torchrl.tensor_files import read_safetensors

STRIDE = schema.VIDEO_STRIDE
_IDS = (schema.TASK_ID, schema.INIT_STATE_ID, schema.ENV_SEED)
_EPISODE: dict[str, tuple[torch.dtype, tuple[int | str, ...]]] = {
    "frames": (torch.uint8, ("F", 3, "H", "W")),
    "states": (torch.float32, ("F", schema.STATE_DIM)),
    "is_decision": (torch.bool, ("F",)),
    "actions": (torch.float32, ("T", schema.ACTION_DIM)),
    **dict.fromkeys(_IDS, (torch.int64, (1,))),
    schema.SUCCESS: (torch.bool, (1,)),
    schema.SIM_STATES: (torch.float64, ("T+1", "D")),
}


def validate_episode(episode: TensorDictBase) -> None:
    """Check an episode against the layout of this module.

    Raises:
        KeyError: a key is missing.
        ValueError: an unknown key, a wrong dtype or shape, lengths that do not fit each other, values that are not
            finite, or no decision that an action follows. The message names the key and what was found.
    """
    have = set(episode.keys())
    missing = [key for key in _EPISODE if key != schema.SIM_STATES and key not in have]
    if missing:
        raise KeyError(f"episode lacks {missing}; it has {sorted(have)}")
    unknown = sorted(have - set(_EPISODE))
    if unknown:
        raise ValueError(f"episode has unknown keys {unknown}; known are {list(_EPISODE)}")
    steps = episode.get("actions").shape[0] if episode.get("actions").ndim else 0
    if steps < 1:
        raise ValueError("'actions' must hold at least one action")
    sizes: dict[str, int] = {"T": steps, "T+1": steps + 1, "F": steps // STRIDE + 1}
    for key, value in episode.items():
        dtype, shape = _EPISODE[key]
        if value.dtype != dtype or value.ndim != len(shape):
            raise ValueError(f"{key!r} must be {dtype} {shape}, found {value.dtype} {tuple(value.shape)}")
        for want, have in zip(shape, value.shape, strict=True):
            size = want if isinstance(want, int) else sizes.get(want, have)
            if have != size:
                raise ValueError(
                    f"{key!r} must be {shape}, found {tuple(value.shape)}; with T={steps} actions {want}={size}"
                )
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ValueError(f"{key!r} holds values that are not finite")
    if not bool(_starts(episode).any()):
        raise ValueError("'is_decision' marks no frame that an action follows, so no window could start here")


def _starts(episode: TensorDictBase) -> Tensor:
    """Bool [F]: decisions that at least one action follows."""
    is_decision = episode.get("is_decision")
    return is_decision & (STRIDE * torch.arange(len(is_decision)) < len(episode.get("actions")))


class _Flat(NamedTuple):
    """All episodes end to end, and the rows where a window may start."""

    frames: Tensor  # uint8 [sum F,3,H,W]
    states: Tensor  # float32 [sum F,8]
    actions: Tensor  # float32 [sum T,7]
    task_id: Tensor  # int64 [W,1]
    frame: Tensor  # int64 [W], row of the first frame
    last_frame: Tensor  # int64 [W], last row of the same episode
    action: Tensor  # int64 [W], row of the first action
    last_action: Tensor  # int64 [W], last row of the same episode


class EpisodeStore:
    """Bounded store of episodes in memory; the oldest is dropped.

    Frames are kept once: the first sampling after an addition lays all episodes end to end, and the episodes become
    views of that.

    Keyword Args:
        max_episodes: capacity; unbounded if None.

    Raises:
        ValueError: ``max_episodes`` below 1.
    """

    def __init__(self, *, max_episodes: int | None = None) -> None:
        if max_episodes is not None and max_episodes < 1:
            raise ValueError(f"max_episodes must be at least 1, got {max_episodes}")
        self._episodes: deque[TensorDictBase] = deque(maxlen=max_episodes)
        self._flat: _Flat | None = None
        self._device = torch.device("cpu")

    def __len__(self) -> int:
        return len(self._episodes)

    def __getitem__(self, index: int) -> TensorDictBase:
        return self._episodes[index]

    def __iter__(self) -> Iterator[TensorDictBase]:
        return iter(self._episodes)

    def add(self, episode: TensorDictBase) -> None:
        """Add an episode, oldest out.

        Raises:
            KeyError, ValueError: see :func:`validate_episode`; also pictures of another size than the store holds.
        """
        validate_episode(episode)
        size = tuple(episode.get("frames").shape[1:])
        if self._episodes and size != tuple(self._episodes[0].get("frames").shape[1:]):
            held = tuple(self._episodes[0].get("frames").shape[1:])
            raise ValueError(f"'frames' are {size}, the store holds {held}; one store keeps pictures of one size")
        self._episodes.append(episode.cpu().copy())
        self._flat = None

    # ---- sampling -----------------------------------------------------------------------------------------------
    @property
    def nbytes(self) -> int:
        """Bytes of all pictures, next to which the rest is nothing."""
        return sum(episode.get("frames").nbytes for episode in self._episodes)

    def sample_on(self, device: torch.device) -> None:
        """Cut windows on ``device`` from now on, from a copy of the episodes there; the same windows are drawn."""
        self._device, self._flat = device, None

    def _lay_out(self) -> _Flat:
        if self._flat is not None:
            return self._flat
        flat = {key: torch.cat([e.get(key) for e in self._episodes]) for key in ("frames", "states", "actions")}
        lengths = {key: torch.tensor([len(e.get(key)) for e in self._episodes]) for key in ("frames", "actions")}
        for key, sizes in lengths.items():
            for episode, view in zip(self._episodes, flat[key].split(sizes.tolist()), strict=True):
                episode.set(key, view)
        starts = torch.cat([_starts(episode) for episode in self._episodes])
        frame = starts.nonzero().squeeze(-1)
        episode_of = torch.repeat_interleave(torch.arange(len(self)), lengths["frames"])[frame]
        end_frame, end_action = lengths["frames"].cumsum(0), lengths["actions"].cumsum(0)
        step = STRIDE * (frame - (end_frame - lengths["frames"])[episode_of])
        self._flat = _Flat(
            **flat,
            task_id=torch.stack([episode.get(schema.TASK_ID) for episode in self._episodes])[episode_of],
            frame=frame,
            last_frame=end_frame[episode_of] - 1,
            action=(end_action - lengths["actions"])[episode_of] + step,
            last_action=end_action[episode_of] - 1,
        )
        self._flat = _Flat(*(tensor.to(self._device) for tensor in self._flat))
        return self._flat

    @property
    def num_windows(self) -> int:
        """Number of different windows."""
        return len(self._lay_out().frame) if self._episodes else 0

    def sample_windows(self, batch_size: int, *, generator: torch.Generator, video: bool = True) -> TensorDict:
        """Sample decision windows with replacement, uniformly over all decisions of all episodes.

        Args:
            batch_size: number of windows B.

        Keyword Args:
            generator: source of the choice.
            video: give ``video`` and ``image_is_pad`` as well, nine times the pixels of the picture.

        Returns:
            Tensordict [B], on the CPU or where :meth:`sample_on` says, with the picture ``("observation","image")``
            uint8 [B,3,H,W] and ``("observation","state")`` [B,8] at the start, ``task_id`` [B,1], ``video`` uint8
            [B,9,3,H,W] (steps 0, 4, ..., 32 of the window), ``image_is_pad`` bool [B,9], ``actions`` float32 [B,32,7]
            and ``action_is_pad`` bool [B,32]. Beyond the episode's end the last frame is repeated; padded actions stand
            still and keep the last gripper command.

        Raises:
            ValueError: the store is empty.
        """
        if not self._episodes:
            raise ValueError("cannot sample windows from an empty episode store; add episodes first")
        flat = self._lay_out()
        chosen = torch.randint(len(flat.frame), (batch_size,), generator=generator).to(self._device)
        first = flat.frame[chosen]
        frames = first[:, None] + torch.arange(schema.VIDEO_FRAMES, device=self._device)
        actions = flat.action[chosen, None] + torch.arange(schema.CHUNK, device=self._device)
        last_frame, last_action = flat.last_frame[chosen, None], flat.last_action[chosen, None]
        action_is_pad = actions > last_action
        chunk = flat.actions[torch.minimum(actions, last_action)]
        chunk[..., :-1].masked_fill_(action_is_pad[..., None], 0)
        windows = TensorDict(
            {
                "observation": {"image": take(flat.frames, first), "state": flat.states[first]},
                schema.TASK_ID: flat.task_id[chosen],
                "actions": chunk,
                "action_is_pad": action_is_pad,
            },
            batch_size=[batch_size],
        )
        if video:
            windows.set("video", take(flat.frames, torch.minimum(frames, last_frame)))
            windows.set("image_is_pad", frames > last_frame)
        return windows

    # ---- disk ---------------------------------------------------------------------------------------------------
    def save(self, directory: str | Path) -> None:
        """Write one safetensors file per episode into a new ``directory``.

        The directory appears under its name when all of it is on the disk, so an interrupted save leaves nothing that
        :meth:`load` would take for a store.

        Raises:
            FileExistsError: ``directory`` exists.
        """
        directory = Path(directory)
        if directory.exists():
            raise FileExistsError(f"{directory} exists; save an episode store to a new directory")
        directory.parent.mkdir(parents=True, exist_ok=True)
        unfinished = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}")
        unfinished.mkdir()
        try:
            for number, episode in enumerate(self._episodes):
                path = unfinished / f"episode_{number:06d}.safetensors"
                save_file({key: value.contiguous() for key, value in episode.items()}, path)
                _sync(path)
            _sync(unfinished)
            unfinished.rename(directory)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)  # there is none after the rename
        _sync(directory.parent)

    @classmethod
    def load(cls, directory: str | Path, *, max_episodes: int | None = None) -> EpisodeStore:
        """Read what :meth:`save` wrote.

        Args:
            directory: where the store was saved.

        Keyword Args:
            max_episodes: capacity of the new store; the newest episodes are read.

        Raises:
            FileNotFoundError: no such directory, or no episode in it.
            ValueError: a file is damaged or not an episode; the message names it.
        """
        paths = sorted(Path(directory).glob("episode_*.safetensors"))
        if not paths:
            raise FileNotFoundError(f"{directory} holds no episode_*.safetensors; it is not a saved episode store")
        store = cls(max_episodes=max_episodes)
        for path in paths if max_episodes is None else paths[-max_episodes:]:
            tensors = read_safetensors(path)
            try:
                store.add(TensorDict(tensors, batch_size=[]))
            except (KeyError, ValueError) as error:
                raise ValueError(f"{path} is not an episode: {error}") from error
        return store


def _sync(path: Path) -> None:
    """Wait until a file's content, or a directory's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- from a rollout ---------------------------------------------------------------------------------------------
_SIM_STATES = ("next", schema.SIM_STATES)
_ROLLOUT = (*_IDS, schema.EPISODE_ID, schema.CHUNK_INDEX, schema.STATE, schema.ACTION)
_ROLLOUT = (*_ROLLOUT, *(("next", key) for key in ("done", schema.SUCCESS, schema.EXECUTED_MASK)))
_LIVE = (schema.IMAGE, ("next", schema.FUTURE_MASK), ("next", schema.FUTURE_FRAMES))


def _check_rollout(rows: TensorDictBase) -> None:
    """Check that whole episodes follow one another."""
    done, chunk = rows.get(("next", "done")).squeeze(-1), rows.get(schema.CHUNK_INDEX).squeeze(-1)
    starts = torch.cat([done.new_ones(1), done[:-1]])
    same = rows.get(schema.EPISODE_ID).squeeze(-1)
    broken = torch.where(starts, chunk != 0, (chunk != chunk.roll(1) + 1) | (same != same.roll(1)))
    if bool(broken.any()) or not bool(done[-1]):
        row = int(broken.nonzero()[0]) if bool(broken.any()) else len(done)
        raise ValueError(
            f"the rollout must hold whole episodes one after another, each ending with ('next', 'done'); it breaks at "
            f"row {row} of {len(done)} (parked rows not counted). Collect with trajs_per_batch and traj_format='cat'"
        )


def _live_frames(rows: TensorDictBase, row: Tensor, offset: Tensor, offsets: tuple[int, ...]) -> Tensor:
    """Frames ``offset`` (int64 [F]) actions into the chunks of rows ``row`` (int64 [F]), uint8 [F,3,H,W]."""
    mask, future = rows.get(("next", schema.FUTURE_MASK)), rows.get(("next", schema.FUTURE_FRAMES))
    if mask.shape[-1] != len(offsets):
        raise ValueError(f"('next', {schema.FUTURE_MASK!r}) has {mask.shape[-1]} frames, but frame_offsets={offsets}")
    longest = int(rows.get(("next", schema.EXECUTED_MASK)).sum(-1).max())
    lacking = sorted({*offset.tolist(), *range(STRIDE, longest + 1, STRIDE)} - {0, *offsets})
    if lacking:
        raise ValueError(
            f"frame_offsets={offsets} lack {lacking}: video needs the frame at every {STRIDE}th step of an episode. "
            f"Set the environment's replan_steps to a multiple of {STRIDE} and its frame_offsets to (4, 8, ..., "
            "replan_steps), or its frame_offsets to 'every', or render the frames afterwards"
        )
    column = torch.zeros(schema.CHUNK + 1, dtype=torch.int64)
    column[list(offsets)] = torch.arange(len(offsets))
    later = offset > 0
    row_later, column_later = row[later], column[offset[later]]
    if not bool(mask[row_later, column_later].all()):
        raise ValueError(
            f"('next', {schema.FUTURE_MASK!r}) lacks frames that frame_offsets={offsets} should give; pass the "
            "frame_offsets of the environment that was collected from"
        )
    frames = future.new_empty(len(row), *future.shape[2:])
    put(frames, later.nonzero().squeeze(-1), take(future.flatten(0, 1), row_later * len(offsets) + column_later))
    put(frames, (~later).nonzero().squeeze(-1), take(rows.get(schema.IMAGE), row[~later]))
    return frames


def episodes_from_rollout(
    rollout: TensorDictBase,
    *,
    frame_offsets: Sequence[int] = schema.FRAME_OFFSETS,
    only_success: bool = True,
    render: Callable[[list[TensorDictBase]], list[Tensor]] | None = None,
) -> list[TensorDict]:
    """Cut collected macro-steps into episodes for an :class:`EpisodeStore`.

    The frames are those that the environment returned: a chunk's own picture at its start, its future frames behind it.
    So there must be one at every 4th step of an episode: ``replan_steps`` a multiple of 4 and ``frame_offsets``
    (4, 8, ..., replan_steps), such as 8 and the default offsets. With ``render`` they are drawn now, from the
    simulator's states, and any ``replan_steps`` and ``frame_offsets`` will do; a window can start where a decision lies
    on the grid of every 4th step.

    Args:
        rollout: macro-steps [N] with the keys of :mod:`wamrl_torchrl.schema`; the rows of an episode in order and next
            to each other, whole episodes only. Rows of parked slots are left out.

    Keyword Args:
        frame_offsets: those of the environment that was collected from; not read with ``render``.
        only_success: leave out episodes without success.
        render: draws frames; called once with the episodes (``task_id``, ``env_seed``, and ``sim_states`` of the steps
            wanted) and returns uint8 ``[F,3,H,W]`` of each, as :meth:`wamrl_torchrl.envs.libero.LiberoEnv.render` does.

    Returns:
        Episodes in the layout of this module, in the order of the rollout; with ``sim_states`` if the rollout has them.

    Raises:
        KeyError: the rollout lacks a key.
        ValueError: the rollout is not [N], holds parts of episodes, or lacks frames; the message says what to change.
    """
    if rollout.ndim != 1:
        raise ValueError(f"the rollout must have batch size [N], found {list(rollout.batch_size)}; reshape(-1) it")
    source = _LIVE if render is None else (_SIM_STATES,)
    rollout = rollout.select(*_ROLLOUT, *source).update(rollout.select(_SIM_STATES, strict=False)).cpu()
    rows = take_rows(rollout, rollout.get(schema.EPISODE_ID).squeeze(-1) != schema.PARKED)
    if len(rows) == 0:
        return []
    _check_rollout(rows)

    done = rows.get(("next", "done")).squeeze(-1)
    success = rows.get(("next", schema.SUCCESS)).squeeze(-1)
    episode = torch.cat([done.new_zeros(1), done[:-1]]).cumsum(0)
    if only_success:
        kept = success[done][episode]
        rows, done, success, episode = take_rows(rows, kept), done[kept], success[kept], episode[kept]
        if len(rows) == 0:
            return []
    executed_mask = rows.get(("next", schema.EXECUTED_MASK))
    executed, start = executed_mask.sum(-1), rows.get(schema.CHUNK_INDEX).squeeze(-1) == 0

    # The grid of every 4th step of every episode, end to end: which row a step belongs to, and how far into its chunk
    # it is. The step behind the last action belongs to the last row.
    first, last = start.nonzero().squeeze(-1), done.nonzero().squeeze(-1)
    row_step = executed.cumsum(0) - executed  # action number of a row's first action, over all episodes
    steps = executed.cumsum(0)[last] - row_step[first]
    sizes = steps // STRIDE + 1
    owner = torch.repeat_interleave(torch.arange(len(first)), sizes)
    step = STRIDE * (torch.arange(len(owner)) - (sizes.cumsum(0) - sizes)[owner])
    at = row_step[first[owner]] + step
    row = torch.minimum(torch.searchsorted(row_step, at, right=True) - 1, last[owner])
    offset = at - row_step[row]

    flat = {
        "states": rows.get(schema.STATE)[row],
        "is_decision": offset == 0,
        "actions": rows.get(schema.ACTION)[executed_mask],
    }
    lengths = {"states": sizes, "is_decision": sizes, "actions": steps}
    if render is None:
        flat["frames"], lengths["frames"] = _live_frames(rows, row, offset, tuple(frame_offsets)), sizes
    sim_states = rows.get(_SIM_STATES, None)
    if sim_states is not None:
        column = torch.arange(sim_states.shape[1])
        recorded = torch.where(column == 0, start[:, None], column <= executed[:, None])
        flat[schema.SIM_STATES], lengths[schema.SIM_STATES] = sim_states[recorded], steps + 1
    parts = {key: value.split(lengths[key].tolist()) for key, value in flat.items()}
    parts |= {key: rows.get(key)[start].unbind() for key in _IDS}
    parts[schema.SUCCESS] = success[done][:, None].unbind()
    count = range(len(first))
    episodes = [TensorDict({key: value[i] for key, value in parts.items()}, batch_size=[]) for i in count]
    if render is not None:
        wanted = [e.select(*_IDS).set(schema.SIM_STATES, e.get(schema.SIM_STATES)[::STRIDE]) for e in episodes]
        for one, frames in zip(episodes, render(wanted), strict=True):
            one.set("frames", frames)
    return episodes
