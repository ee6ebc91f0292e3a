"""LIBERO as a batched TorchRL environment: one simulator process per slot, one action chunk per step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from wamrl_torchrl import schema
from wamrl_torchrl.data.rows import take
from wamrl_torchrl.envs.chunk import ChunkEnv, Outcome
from wamrl_torchrl.envs.episodes import describe_episode
from wamrl_torchrl.envs.libero_gl import check_gl, choose_devices, render_threads, worker_environment
from wamrl_torchrl.envs.libero_goals import require_expert
from wamrl_torchrl.envs.libero_jobs import Job, read_stored, render_jobs, run_jobs
from wamrl_torchrl.envs.libero_pool import Lost, SimPool
from wamrl_torchrl.envs.libero_suites import load_suite
from wamrl_torchrl.envs.libero_worker import Layout

IMAGE_SIZE = (224, 448)
TRAIN_INIT_STATES = range(40)
MAX_ENV_SEED = 2**32 - 1


class LiberoEnv(ChunkEnv):
    """LIBERO with an action chunk per step, N simulators that run side by side.

    States and frames are bit-equal to those of LIBERO's own ``OffScreenRenderEnv`` under the usual protocol (seed, hard
    reset, init state, no-ops, one action at a time, both cameras), at a fraction of the cost: frames are rendered only
    where they are returned, and a reset keeps the compiled model. For given (task, init state, env seed, actions) they
    are the same whatever ran before and in which process; across machines they differ slightly with processor and
    OpenGL driver.

    Slots are dealt random tasks, unless the reset tensordict says otherwise (see :class:`ChunkEnv`). A slot that
    changes its task compiles a model, which takes seconds: keep a slot on a task where you can. ``init_state_id`` below
    50 is one of the task's own (LIBERO's have 50, some perturbed ones 10); ``50 + j`` is ``start_states[task_id][j]``.

    The processes are started by the constructor, in any kind of process (a collector's worker too), and end with
    :meth:`close`, with the environment object, or with the process that holds it. Needs the extra ``libero``.

    Args:
        suite: ``libero_spatial``, ``libero_object``, ``libero_goal``, ``libero_10`` or ``libero_90``; a perturbed suite
            (``libero_goal_swap``, ...), a folder of tasks, or a mix of several
            (see :func:`~wamrl_torchrl.envs.libero_suites.load_suite`).
        num_envs: slots N. A rendering slot takes about 2 GB of memory and one core.

    Keyword Args:
        task_ids: tasks to deal; all of the suite by default. A reset may ask for any task of the suite.
        replan_steps: actions executed per chunk.
        frame_offsets: executed actions after which a future frame is returned: increasing numbers, ``()`` for none,
            ``"every"`` for all. Frames of the rest can be had afterwards, see :meth:`render`.
        images: return pictures. Without them nothing is rendered and no OpenGL context is made: the observation has no
            ``image``, a step has no ``future_frames`` and ``future_mask``; states are the same to the bit.
        max_episode_steps: limit in executed actions, settling not counted; one number, or one per task of the suite. By
            default every task has that of its suite (:data:`~wamrl_torchrl.envs.libero_suites.SUITES`).
        settle_steps: no-op actions after a reset, while the objects come to rest. FastWAM evaluates with 30.
        resize: ``"render256"`` renders at 256 and resizes to 224, as the released model saw its frames; ``"render224"``
            renders at 224 directly.
        physics: ``"exact"`` gives LIBERO's states to the bit. ``"fast"`` halves the cost of a step: it solves the
            dynamics of a physics step once, where robosuite does so three times over. Objects that touch then differ by
            micrometres at first, and with time by as much as any small disturbance grows to.
        init_state_ids: init states to deal; 0 to 39 by default. 40 to 49 are held out for evaluation.
        start_states: for a task id, further states to start from, float64 ``[M,n]``: rows of ``sim_states`` as this
            environment returns them, or flattened MuJoCo states (time, qpos, qvel). No settling takes place.
        sim_states: return ``sim_states`` float64 ``[N,replan_steps+1,D]``: before the chunk and after every executed
            action, the last one repeated. A row holds time, qpos, qvel; gripper command 2, orientation aimed at 9; what
            the picture shows, a physics step or two earlier, for :meth:`render`: qpos, alphas of visual sites; zeros.
        background_reset: a slot that is reset does not hold up those that run; see :class:`ChunkEnv`.
        render_devices: with a GPU, the EGL numbers of those to render on, dealt to the slots in turn; by default the
            first one that is visible (see :func:`~wamrl_torchrl.envs.libero_gl.choose_devices`).
        timeout_s: longest time for a simulator to start, reset (compiling a model included) or demonstrate, in seconds.
        step_timeout_s: longest time for a chunk, in seconds.
        max_failures: a simulator that dies or hangs is replaced, its start of an episode repeated, and its open episode
            void (``("next", "invalid")``); after so many in one slot without a whole episode between them the
            environment gives up.

    Raises:
        ImportError: LIBERO is not installed.
        FileNotFoundError: the suite lacks files.
        RuntimeError: wrong versions, missing assets, no OpenGL; a simulator failed, or too many died or did not answer.
            The message names slot, pid, task and phase, and the environment is closed.
        ValueError: an option or an id is out of range.

    Examples:
        >>> env = LiberoEnv("libero_spatial", 2, task_ids=[0, 2])  # doctest: +SKIP
        >>> env.rollout(3)["next", "observation", "image"].shape  # doctest: +SKIP
        torch.Size([2, 3, 3, 224, 448])
    """

    def __init__(
        self,
        suite: str,
        num_envs: int,
        *,
        task_ids: Sequence[int] | None = None,
        replan_steps: int = 10,
        frame_offsets: Sequence[int] | Literal["every"] = schema.FRAME_OFFSETS,
        images: bool = True,
        max_episode_steps: int | Sequence[int] | None = None,
        settle_steps: int = 10,
        resize: Literal["render256", "render224"] = "render256",
        physics: Literal["exact", "fast"] = "exact",
        init_state_ids: Sequence[int] = TRAIN_INIT_STATES,
        start_states: Mapping[int, Tensor] | None = None,
        sim_states: bool = True,
        background_reset: bool = False,
        render_devices: Sequence[int] | None = None,
        timeout_s: float = 300.0,
        step_timeout_s: float = 60.0,
        max_failures: int = 3,
    ) -> None:
        tasks = load_suite(suite)
        if resize not in ("render256", "render224"):
            raise ValueError(f"resize must be 'render256' or 'render224', got {resize!r}")
        if physics not in ("exact", "fast"):
            raise ValueError(f"physics must be 'exact' or 'fast', got {physics!r}")
        if settle_steps < 0:
            raise ValueError(f"settle_steps must not be negative, got {settle_steps}")
        if max_episode_steps is None:
            max_episode_steps = tasks.horizons if len(set(tasks.horizons)) > 1 else tasks.horizons[0]
        elif not isinstance(max_episode_steps, int) and len(max_episode_steps) != len(tasks):
            found = len(max_episode_steps)
            raise ValueError(
                f"max_episode_steps must be one limit, or one for each of the {len(tasks)} tasks, got {found}"
            )
        devices = choose_devices(render_devices)
        super().__init__(
            num_envs,
            image_size=IMAGE_SIZE,
            replan_steps=replan_steps,
            max_episode_steps=max_episode_steps,
            frame_offsets=frame_offsets,
            images=images,
            sim_state_dim=tasks.sim_state_dim if sim_states else None,
            background_reset=background_reset,
        )
        if max_failures < 1:
            raise ValueError(f"max_failures must be at least 1, got {max_failures}")
        self.suite = tasks
        self.settle_steps = settle_steps
        self._start_states = {} if start_states is None else dict(start_states)
        self._check_start_states()
        self.task_ids = list(range(len(tasks))) if task_ids is None else list(task_ids)
        self.init_state_ids = list(init_state_ids)
        if not self.task_ids or not self.init_state_ids:
            raise ValueError(f"nothing to deal: task_ids={self.task_ids}, init_state_ids={self.init_state_ids}")
        for task in self.task_ids:
            for init_state in self.init_state_ids:
                self._check_ids(task, init_state, 0)
        size = IMAGE_SIZE if images else (0, 0)
        layout = Layout(num_envs, len(self.frame_offsets), replan_steps + 1, tasks.sim_state_dim, *size)
        options = {"resize": resize, "physics": physics, "frame_offsets": self.frame_offsets, "images": images}
        threads = render_threads(num_envs)
        environs = [worker_environment(devices[slot % len(devices)], threads=threads) for slot in range(num_envs)]
        try:
            pool = SimPool(layout, options=options, environs=environs, timeout_s=timeout_s, max_failures=max_failures)
        except RuntimeError as error:
            opengl = check_gl(devices) if images else None
            if opengl is None or opengl.ok:
                raise
            raise RuntimeError(f"LIBERO cannot run: {opengl.check}: {opengl.detail}") from error
        self._pool = pool
        self._step_timeout_s = step_timeout_s
        self._starts: dict[int, dict] = {}  # what each slot's episode starts from, while it is being started
        self._has_episode = torch.zeros(num_envs, dtype=torch.bool)  # false in a simulator that took a lost one's place
        self._sim_states, self._states, self._images, self._frames = map(torch.from_numpy, pool.arrays)
        # Also when the environment is dropped without close(), and at exit.
        self._finalizer = weakref.finalize(self, pool.close)

    @property
    def instructions(self) -> list[str]:
        """Instruction of every task of the suite, indexed by task id."""
        return list(self.suite.instructions)

    # ---- what an episode starts from ----------------------------------------------------------------------------
    def _check_start_states(self) -> None:
        for task, states in self._start_states.items():
            self._check_task(task)
            narrow, wide = self.suite.init_states[task].shape[1], self.suite.sim_state_dim
            if states.ndim != 2 or states.dtype != torch.float64 or not narrow <= states.shape[1] <= wide:
                raise ValueError(
                    f"start_states[{task}] must be float64 [M,n] with {narrow} <= n <= {wide}, "
                    f"found {states.dtype} {list(states.shape)}"
                )

    def _check_task(self, task: int) -> None:
        if not 0 <= task < len(self.suite):
            raise ValueError(f"task_id {task} is out of range: {self.suite.name} has tasks 0 to {len(self.suite) - 1}")

    def _check_ids(self, task: int, init_state: int, env_seed: int) -> None:
        self._check_task(task)
        own, more = len(self.suite.init_states[task]), len(self._start_states.get(task, ()))
        first = schema.PLAIN_INIT_STATES
        if not (0 <= init_state < own or first <= init_state < first + more):
            ids = f"ids 0 to {own - 1}" + (f" and {first} to {first + more - 1}" if more else "")
            raise ValueError(
                f"init_state_id {init_state} is out of range for task {task} of {self.suite.name}, which has {own} "
                f"init states and {more} start states: {ids}"
            )
        if not 0 <= env_seed <= MAX_ENV_SEED:
            raise ValueError(f"env_seed {env_seed} is out of range 0 to {MAX_ENV_SEED}")

    def _start(self, task: int, init_state: int, env_seed: int) -> dict:
        """Arguments of :meth:`wamrl_torchrl.envs.libero_sim.LiberoSim.reset`."""
        self._check_ids(task, init_state, env_seed)
        is_own = init_state < schema.PLAIN_INIT_STATES
        if is_own:
            state = self.suite.init_states[task][init_state]
        else:
            state = self._start_states[task][init_state - schema.PLAIN_INIT_STATES].numpy()
        return {
            "bddl_file": self.suite.bddl_files[task],
            "env_seed": env_seed,
            "state": state,
            "settle_steps": self.settle_steps if is_own else 0,
            "resume": not is_own,
        }

    def _draw_episodes(self, count: int, generator: torch.Generator) -> Tensor:
        tasks, init_states = torch.tensor(self.task_ids), torch.tensor(self.init_state_ids)
        task = tasks[torch.randint(len(tasks), (count,), generator=generator)]
        init_state = init_states[torch.randint(len(init_states), (count,), generator=generator)]
        return torch.stack([task, init_state, torch.randint(MAX_ENV_SEED, (count,), generator=generator)], -1)

    # ---- the simulators -----------------------------------------------------------------------------------------
    def _what(self, phase: str, episode: Sequence[int]) -> str:
        return f"{phase} of {self.suite.name}, {describe_episode(episode)}"

    def _running_pool(self) -> SimPool:
        if not self._finalizer.alive or not self._pool.processes:
            raise RuntimeError("this LiberoEnv is closed; make a new one")
        return self._pool

    @property
    def losses(self) -> list[str]:
        """What happened to the simulators that were lost so far: slot, pid, task, phase and last words of each."""
        return list(self._pool.losses)

    def _start_episodes(self, slots: Tensor, episodes: Tensor) -> None:
        pool = self._running_pool()
        starts = [self._start(*episode[:3]) for episode in episodes.tolist()]  # all ids are checked before any starts
        for slot, episode, start in zip(slots.tolist(), episodes.tolist(), starts, strict=True):
            if self._has_episode[slot]:
                pool.forgive(slot)
            self._starts[slot] = {"what": self._what("reset", episode), "start": start}
            pool.submit(slot, "reset", **self._starts[slot])
        self._has_episode[slots] = False

    def _await_starts(self, slots: Tensor, at_least: int) -> Tensor:
        pool, waiting = self._running_pool(), slots.tolist()
        started: list[int] = []
        while True:
            for slot in pool.wait(waiting, at_least=at_least - len(started)):
                if isinstance(pool.take(slot), Lost):  # the one that took its place starts the same episode
                    pool.submit(slot, "reset", **self._starts[slot])
                else:
                    waiting.remove(slot)
                    started.append(slot)
            if len(started) >= at_least:
                break
        ready = torch.tensor(sorted(started), dtype=torch.int64)
        self._has_episode[ready] = True
        return ready

    def _execute(self, slots: Tensor, actions: Tensor, limits: Tensor) -> Outcome:
        pool = self._running_pool()
        chunks = actions[:, : self.replan_steps].numpy()
        running = self._has_episode[slots].tolist()
        for slot, chunk, limit, runs in zip(slots.tolist(), chunks, limits.tolist(), running, strict=True):
            if runs:
                what = self._what("step", self._episodes[slot].tolist())
                pool.submit(slot, "step", what, timeout_s=self._step_timeout_s, actions=chunk, limit=limit)
        executed = torch.zeros(len(slots), dtype=torch.int64)
        success, lost = torch.zeros(len(slots), dtype=torch.bool), ~self._has_episode[slots]
        pool.wait(slots[~lost].tolist())
        for row, slot in enumerate(slots.tolist()):
            reply = pool.take(slot) if running[row] else None
            if isinstance(reply, Lost):
                lost[row] = True
            elif reply is not None:
                executed[row], success[row] = reply
        self._has_episode[slots[lost]] = False
        frames = None
        if self.images:
            for slot in slots[lost].tolist():
                self._frames[slot].zero_()  # a lost simulator may have left half a picture
            frames = take(self._frames, slots)
        sim_states = None
        if self._sim_state_dim is not None:
            sim_states = take(self._sim_states, slots)
            sim_states[lost] = 0.0
        return Outcome(executed, success, frames, sim_states, lost)

    def demonstrate(
        self,
        episodes: Tensor,
        *,
        noise: float = 0.0,
        grasp_variation: float = 0.0,
        seed: int = 0,
        frame_stride: int = schema.VIDEO_STRIDE,
        render: bool = True,
    ) -> list[TensorDict]:
        """Let the scripted expert run ``episodes``; see :meth:`iter_demonstrations`, whose results are put in order."""
        demonstrations = self.iter_demonstrations(
            episodes,
            noise=noise,
            grasp_variation=grasp_variation,
            seed=seed,
            frame_stride=frame_stride,
            render=render,
        )
        finished = dict(demonstrations)
        return [finished[row] for row in range(len(episodes))]

    def iter_demonstrations(
        self,
        episodes: Tensor,
        *,
        noise: float = 0.0,
        grasp_variation: float = 0.0,
        seed: int = 0,
        frame_stride: int = schema.VIDEO_STRIDE,
        render: bool = True,
    ) -> Iterator[tuple[int, TensorDict]]:
        """Let the scripted expert run ``episodes`` on all slots, and yield each demonstration when it is finished.

        The episodes that the slots were running are lost: afterwards every slot is parked until the next reset. A
        demonstration depends on its row of ``episodes`` and on the options, not on the number of slots.

        Args:
            episodes: int64 ``[M,5]``, columns of ``schema.EPISODE_KEYS``; best sorted by task.

        Keyword Args:
            noise: an episode's standard deviation of the Ornstein-Uhlenbeck noise on the executed position actions is
                drawn uniformly from 0 to ``noise``, in units of an action.
            grasp_variation: size of the random variation of grasp, approach, lift and place. 0 is none, 1 up to 6 mm
                and 7 degrees in the grasp and 3 cm on the way there.
            seed: of noise and variation; those of an episode depend on it and on the episode's five ids alone.
            frame_stride: actions between two frames.
            render: leave ``frames`` out when false.

        Yields:
            Row of ``episodes``, and a TensorDict (batch size ``[]``) of an episode of T actions: ``frames`` uint8
            ``[F,3,224,448]`` after 0, stride, ... actions; ``states`` float32 ``[T+1,8]``; ``actions`` float32
            ``[T,7]``, the expert's choice in every state; ``executed_actions`` float32 ``[T,7]``, with the noise;
            ``sim_states`` float64 ``[T+1,D]``; ``task_id``, ``init_state_id``, ``env_seed`` int64 ``[1]``; ``success``
            bool ``[1]``.

        Raises:
            ValueError: a task has no expert (the message says which have), or an id or option is out of range.
            RuntimeError: a simulator failed; the environment is closed.
        """
        for name, value in (("noise", noise), ("grasp_variation", grasp_variation)):
            if value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        if frame_stride < 1:
            raise ValueError(f"frame_stride must be at least 1, got {frame_stride}")
        rows = episodes.tolist()
        if render and not self.images:
            raise ValueError("this LiberoEnv was made with images=False: nothing can be rendered, pass render=False")
        if schema.PARKED in (row[-1] for row in rows):
            raise ValueError(f"an episode to demonstrate has {schema.EPISODE_ID} {schema.PARKED}, which means none")
        starts = [self._start(*row[:3]) for row in rows]
        require_expert(self.suite, [row[0] for row in rows])
        options = {"noise": noise, "grasp_variation": grasp_variation, "frame_stride": frame_stride, "render": render}
        limits = self._horizons(episodes[:, 0]).tolist()
        jobs = [
            Job(
                row[0],
                "demonstrate",
                self._what("demonstrate", row),
                {"start": start, "seed": [seed, *row], "limit": limit, **options},
            )
            for row, start, limit in zip(rows, starts, limits, strict=True)
        ]
        for row, arrays in self._run_jobs(jobs):
            ids = dict(zip(schema.EPISODE_KEYS[:3], episodes[row, :3, None], strict=True))
            yield row, TensorDict({**{key: torch.from_numpy(value) for key, value in arrays.items()}, **ids})

    def _run_jobs(self, jobs: Sequence[Job]) -> Iterator[tuple[int, Any]]:
        """Run jobs on all slots, which are parked by it; yields index and result of each as it is finished."""
        pool = self._running_pool()
        self._begin(self.pending, wait_for="all")
        self._episodes[:] = schema.PARKED
        self._has_episode[:] = False
        yield from run_jobs(pool, jobs, self._slot_tasks)

    def _observe(self) -> tuple[Tensor | None, Tensor]:
        return self._images.clone() if self.images else None, self._states.clone()

    # ---- frames, afterwards -------------------------------------------------------------------------------------
    def render(self, episodes: Sequence[TensorDictBase]) -> list[Tensor]:
        """Frames of stored simulator states; see :meth:`iter_renders`, whose results are put in order."""
        finished = dict(self.iter_renders(episodes))
        return [finished[index] for index in range(len(episodes))]

    def iter_renders(self, episodes: Sequence[TensorDictBase]) -> Iterator[tuple[int, Tensor]]:
        """Render the stored states of ``episodes`` on all slots, and yield the frames of each when it is finished.

        They are bit-equal to those that the simulator showed live (on one machine; another OpenGL driver draws a little
        differently). The episodes that the slots were running are lost: afterwards every slot is parked until the next
        reset.

        Args:
            episodes: each with ``task_id`` and ``env_seed`` int64 ``[1]`` and ``sim_states`` float64 ``[T,D]``, as
                :meth:`demonstrate` and :func:`~wamrl_torchrl.data.episodes.episodes_from_rollout` give them. The rows
                may be any of an episode's, in any order, as this environment returned them.

        Yields:
            Index into ``episodes``, and its frames uint8 ``[T,3,224,448]``.

        Raises:
            KeyError: an episode lacks a key.
            ValueError: an id is out of range, ``sim_states`` has another width, dtype or no rows, or this environment
                was made with ``images=False``.
            RuntimeError: a simulator failed; the environment is closed.
        """
        if not self.images:
            raise ValueError("this LiberoEnv was made with images=False: nothing can be rendered, make another")
        jobs, places = [], []
        parts: list[list[Tensor | None]] = []
        for index, episode in enumerate(episodes):
            cut = self._render_jobs(index, episode)
            places += [(index, part) for part in range(len(cut))]
            parts.append([None] * len(cut))
            jobs += cut
        for job, frames in self._run_jobs(jobs):
            index, part = places[job]
            parts[index][part] = torch.from_numpy(frames)
            finished = [frames for frames in parts[index] if frames is not None]
            if len(finished) == len(parts[index]):
                parts[index] = []  # not needed any more
                yield index, torch.cat(finished)

    def _render_jobs(self, index: int, episode: TensorDictBase) -> list[Job]:
        task, env_seed, states = read_stored(episode, index=index, width=self.suite.sim_state_dim)
        self._check_ids(task, 0, env_seed)
        return render_jobs(self.suite, task, env_seed, states)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """End the simulator processes; the environment cannot be used afterwards."""
        super().close(raise_if_closed=raise_if_closed)
        self._finalizer()
        # Shared memory goes with the last that maps it, and a closed environment may be kept.
        self._sim_states = self._states = self._images = self._frames = torch.empty(0)
