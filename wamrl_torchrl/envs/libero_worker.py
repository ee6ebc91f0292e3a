"""A simulator process: what it is told, what it answers, and the memory that it shares with the environment.

A process is a fresh interpreter that is handed two descriptors: a socket, and anonymous shared memory that holds the
arrays of all slots. Nothing has a name, so nothing can be left behind: the memory goes when the last process that maps
it goes. Unlike a ``multiprocessing`` child, such a process can be started from a daemonic process, and imports neither
the user's main module nor torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

ORPHAN_POLL_S = 5.0
ORPHAN_GRACE_S = 20.0


class Layout(NamedTuple):
    """Sizes of the shared arrays: slots, frame offsets, stored states per step and their width, picture."""

    slots: int
    frames: int
    sim_states: int
    sim_state_dim: int
    height: int
    width: int

    def map(self, descriptor: int) -> Arrays:
        """Map the arrays; the first call on a fresh descriptor finds zeros."""
        picture = (3, self.height, self.width)
        arrays: list[tuple[Any, tuple[int, ...]]] = [
            (np.float64, (self.slots, self.sim_states, self.sim_state_dim)),
            (np.float32, (self.slots, 8)),
            (np.uint8, (self.slots, *picture)),
            (np.uint8, (self.slots, self.frames, *picture)),
        ]
        sizes = [int(np.prod(shape)) * np.dtype(dtype).itemsize for dtype, shape in arrays]
        if os.fstat(descriptor).st_size == 0:
            os.ftruncate(descriptor, sum(sizes))
        memory = mmap.mmap(descriptor, sum(sizes))
        starts = np.cumsum([0, *sizes[:-1]]).tolist()
        views = [np.ndarray(s, d, buffer=memory, offset=o) for (d, s), o in zip(arrays, starts, strict=True)]
        return Arrays(*views)


class Arrays(NamedTuple):
    """What workers write and the environment reads, one row per slot."""

    sim_states: np.ndarray  # float64 [N,R+1,D]
    state: np.ndarray  # float32 [N,8]
    image: np.ndarray  # uint8 [N,3,H,W]
    frames: np.ndarray  # uint8 [N,F,3,H,W]


# ---- the worker's side ----------------------------------------------------------------------------------------------
class Worker:
    """Answers the commands of one slot.

    Args:
        slot: row of the shared arrays.
        arrays: the shared arrays.
        resize: see :class:`~wamrl_torchrl.envs.libero_sim.LiberoSim`.
        physics: likewise.
        frame_offsets: executed actions after which a frame is kept.
        images: render; without, there is no OpenGL context and the arrays of pictures are empty.
    """

    def __init__(
        self, slot: int, arrays: Arrays, *, resize: Any, physics: Any, frame_offsets: Sequence[int], images: bool = True
    ) -> None:
        # Here and not above: the parent reads this file too, and must not start OpenGL.
        from wamrl_torchrl.envs.libero_sim import LiberoSim

        if images:
            LiberoSim.check_gl()
        self.sim = LiberoSim(resize=resize, physics=physics, images=images)
        self._has_images = images
        self._offsets = tuple(frame_offsets)
        self._sim_states, self._state = arrays.sim_states[slot], arrays.state[slot]
        self._image, self._frames = arrays.image[slot], arrays.frames[slot]

    def reset(self, *, start: dict[str, Any]) -> None:
        """Start an episode from ``LiberoSim.reset(**start)`` and show its first observation."""
        self.sim.reset(**start)
        if self._has_images:
            self.sim.write_image(self._image)
        self.sim.write_state(self._state)

    def step(self, *, actions: np.ndarray, limit: int) -> tuple[int, bool]:
        """Execute ``actions`` float32 ``[R,7]`` up to ``limit`` or success; executed actions and success."""
        executed, success = 0, False
        self.sim.write_sim_state(self._sim_states[0])
        for action in actions[:limit]:
            success = self.sim.step(action)
            executed += 1
            self.sim.write_sim_state(self._sim_states[executed])
            self.sim.advance_images()
            if executed in self._offsets:
                self.sim.start_image(self._frames[self._offsets.index(executed)])
            if success:
                break
        self.sim.finish_images()
        self._sim_states[executed + 1 :] = self._sim_states[executed]
        reached = sum(offset <= executed for offset in self._offsets)
        self._frames[reached:] = 0
        if reached and self._offsets[reached - 1] == executed:
            self._image[:] = self._frames[reached - 1]
        elif self._has_images:
            self.sim.write_image(self._image)
        self.sim.write_state(self._state)
        return executed, success

    def render(self, **states: Any) -> np.ndarray:
        """Frames of stored states, ``LiberoSim.render(**states)``."""
        return self.sim.render(**states)

    def demonstrate(
        self,
        *,
        start: dict[str, Any],
        noise: float,
        grasp_variation: float,
        seed: list[int],
        frame_stride: int,
        render: bool,
        limit: int,
    ) -> dict[str, np.ndarray]:
        """Run the scripted expert from ``LiberoSim.reset(**start)`` to success or ``limit``; what it did, as arrays."""
        from wamrl_torchrl.envs.libero_expert import ActionNoise, WaypointExpert

        self.sim.reset(**start)
        expert = WaypointExpert(self.sim.env, variation=grasp_variation, seed=seed)
        add_noise = ActionNoise(noise, seed)
        frames, states, sim_states, actions, executed = [], [], [], [], []
        success = False
        for step in range(limit + 1):
            states.append(np.empty_like(self._state))
            self.sim.write_state(states[-1])
            sim_states.append(np.empty_like(self._sim_states[0]))
            self.sim.write_sim_state(sim_states[-1])
            if render and step % frame_stride == 0:
                frames.append(np.empty_like(self._image))
                self.sim.write_image(frames[-1])
            if success or step == limit:
                break
            in_contact, action = expert.in_contact, expert.action()
            actions.append(action.astype(np.float32))
            # What is executed is what is recorded: float32, so that a replay gives the same states to the bit.
            executed.append(add_noise(action, in_contact=in_contact).astype(np.float32))
            success = self.sim.step(executed[-1])
        result = {
            "states": np.stack(states),
            "actions": np.stack(actions),
            "executed_actions": np.stack(executed),
            "sim_states": np.stack(sim_states),
            "success": np.array([success]),
        }
        return result | ({"frames": np.stack(frames)} if render else {})


def main() -> None:
    """Entry point of a simulator process; arguments: the descriptors of the socket and of the shared memory."""
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    connection, descriptor, parent = Connection(int(sys.argv[1])), int(sys.argv[2]), os.getppid()
    worker: Worker | None = None
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone: so are we
        command, arguments, timeout_s = connection.recv()
        while command != "close":
            # The parent ends a process that hangs; if it is gone, nobody else would. Works without the interpreter.
            faulthandler.dump_traceback_later(timeout_s + ORPHAN_GRACE_S, exit=True)
            try:
                if command == "start":
                    arrays = Layout(*arguments["layout"]).map(descriptor)
                    worker, result = Worker(arguments["slot"], arrays, **arguments["options"]), None
                else:
                    result = getattr(worker, command)(**arguments)
                reply = ("ok", result)
            except Exception:  # of whatever kind: the parent raises it again, with this traceback
                reply = ("error", traceback.format_exc())
            faulthandler.cancel_dump_traceback_later()
            connection.send(reply)
            # A fork of the parent may hold the other end open, so the end of the socket does not tell everything.
            while not connection.poll(ORPHAN_POLL_S):
                if os.getppid() != parent:
                    return
            command, arguments, timeout_s = connection.recv()
    if worker is not None:
        worker.sim.close()


if __name__ == "__main__":
    main()
