"""Simulator processes: how they start, what is said to them, and the memory that they share with the environment.

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
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import IO, Any, NamedTuple, NoReturn

import numpy as np

ORPHAN_POLL_S = 5.0
LOG_TAIL = 2000


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
        frame_offsets: executed actions after which a frame is kept.
    """

    def __init__(self, slot: int, arrays: Arrays, *, resize: Any, frame_offsets: Sequence[int]) -> None:
        # Here and not above: the parent reads this file too, and must not start OpenGL.
        from wamrl_torchrl.envs.libero_sim import LiberoSim

        LiberoSim.check_gl()
        self.sim = LiberoSim(resize=resize)
        self._offsets = tuple(frame_offsets)
        self._sim_states, self._state = arrays.sim_states[slot], arrays.state[slot]
        self._image, self._frames = arrays.image[slot], arrays.frames[slot]

    def reset(self, *, start: dict[str, Any]) -> None:
        """Start an episode from ``LiberoSim.reset(**start)`` and show its first observation."""
        self.sim.reset(**start)
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
            if executed in self._offsets:
                self.sim.write_image(self._frames[self._offsets.index(executed)])
            if success:
                break
        self._sim_states[executed + 1 :] = self._sim_states[executed]
        reached = sum(offset <= executed for offset in self._offsets)
        self._frames[reached:] = 0
        if reached and self._offsets[reached - 1] == executed:
            self._image[:] = self._frames[reached - 1]
        else:
            self.sim.write_image(self._image)
        self.sim.write_state(self._state)
        return executed, success

    def demonstrate(
        self, *, start: dict[str, Any], noise: float, seed: list[int], frame_stride: int, render: bool, limit: int
    ) -> dict[str, np.ndarray]:
        """Run the scripted expert from ``LiberoSim.reset(**start)`` to success or ``limit``; what it did, as arrays."""
        from wamrl_torchrl.envs.libero_expert import ActionNoise, WaypointExpert

        self.sim.reset(**start)
        expert, add_noise = WaypointExpert(self.sim.env), ActionNoise(noise, seed)
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
        command, arguments = connection.recv()
        while command != "close":
            try:
                if command == "start":
                    arrays = Layout(*arguments["layout"]).map(descriptor)
                    worker, result = Worker(arguments["slot"], arrays, **arguments["options"]), None
                else:
                    result = getattr(worker, command)(**arguments)
                reply = ("ok", result)
            except Exception:  # of whatever kind: the parent raises it again, with this traceback
                reply = ("error", traceback.format_exc())
            connection.send(reply)
            # A fork of the parent may hold the other end open, so the end of the socket does not tell everything.
            while not connection.poll(ORPHAN_POLL_S):
                if os.getppid() != parent:
                    return
            command, arguments = connection.recv()
    if worker is not None:
        worker.sim.close()


# ---- the environment's side -----------------------------------------------------------------------------------------
class SimProcess:
    """One simulator process as its parent sees it."""

    def __init__(self, slot: int, layout: Layout, memory: int, options: Mapping[str, Any], environ: dict[str, str]):
        ours, theirs = socket.socketpair()
        self.slot = slot
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "wamrl_torchrl.envs.libero_worker", str(theirs.fileno()), str(memory)],
            env=environ,
            pass_fds=(theirs.fileno(), memory),
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.what = "starting"  # the call in progress, for error messages
        self.since = time.monotonic()
        self.connection.send(("start", {"slot": slot, "layout": tuple(layout), "options": dict(options)}))

    def __str__(self) -> str:
        return f"LIBERO simulator of slot {self.slot} (pid {self.process.pid}, {self.what})"

    def log_tail(self) -> str:
        """The end of what the process printed."""
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, size - LOG_TAIL))
        return self.log.read().decode(errors="replace").strip()

    def stop(self, deadline: float) -> None:
        """Wait for the process to end, and kill it at ``deadline``."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.connection.close()
        self.log.close()


class SimPool:
    """N simulator processes and their shared arrays; any failure of one closes all.

    Args:
        layout: sizes of the shared arrays.

    Keyword Args:
        options: keyword arguments of :class:`Worker`.
        environ: environment variables of the processes.
        timeout_s: longest time that one command may take, in seconds.

    Raises:
        RuntimeError: a process failed, died or did not answer; the message names slot, pid, task and phase.
    """

    CLOSE_S = 5.0

    def __init__(
        self, layout: Layout, *, options: Mapping[str, Any], environ: dict[str, str], timeout_s: float
    ) -> None:
        self._timeout_s = timeout_s
        self._owner = os.getpid()
        memory = os.memfd_create("libero")
        self.arrays = layout.map(memory)
        self.processes: list[SimProcess] = []
        self._pending: dict[Any, SimProcess] = {}
        try:
            for slot in range(layout.slots):
                process = SimProcess(slot, layout, memory, options, environ)
                self.processes.append(process)
                self._pending[process.connection] = process
            for _ in self.replies():
                pass
        except BaseException:
            self.close(grace_s=0.0)
            raise
        finally:
            os.close(memory)

    def submit(self, slot: int, command: str, what: str, **arguments: Any) -> None:
        """Send a command; ``what`` says in an error what the process was doing."""
        process = self.processes[slot]
        if process.connection in self._pending:
            raise RuntimeError(f"{process} is still at work: an earlier call was interrupted; close the environment")
        process.what, process.since = what, time.monotonic()
        try:
            process.connection.send((command, arguments))
        except OSError:
            self._fail_dead(process)
        self._pending[process.connection] = process

    def replies(self) -> Iterator[tuple[int, Any]]:
        """Yield (slot, reply) of every command in progress, as they finish, also of those submitted meanwhile."""
        while self._pending:
            oldest = min(self._pending.values(), key=lambda process: process.since)
            remaining = oldest.since + self._timeout_s - time.monotonic()
            ready = wait(list(self._pending), max(0.0, remaining))
            if not ready:
                # It was started with a fault handler, which answers this signal with where it hangs.
                oldest.process.send_signal(signal.SIGABRT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    oldest.process.wait(2.0)
                self._fail(f"{oldest} has not answered for {self._timeout_s:g} s", oldest)
            for connection in ready:
                process = self._pending.pop(connection)
                try:
                    status, reply = process.connection.recv()
                except (EOFError, OSError):
                    self._fail_dead(process)
                if status == "error":
                    self._fail(f"{process} failed:\n{reply}", None)
                yield process.slot, reply

    def _fail_dead(self, process: SimProcess) -> NoReturn:
        process.process.kill()  # of no effect on what is dead
        code = process.process.wait()
        end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        self._fail(f"{process} died with {end}", process)

    def _fail(self, message: str, process: SimProcess | None) -> NoReturn:
        log = process.log_tail() if process is not None else ""
        self.close(grace_s=0.0)
        raise RuntimeError(f"{message}\n{log}".strip() + "\nThe environment is closed.")

    def close(self, grace_s: float = CLOSE_S) -> None:
        """End every process, by force after ``grace_s`` seconds. Does nothing in a fork of the owner, or twice."""
        if os.getpid() != self._owner:
            return
        processes, self.processes, self._pending = self.processes, [], {}
        for process in processes:
            with contextlib.suppress(OSError):  # it may be dead
                process.connection.send(("close", {}))
        deadline = time.monotonic() + grace_s
        for process in processes:
            process.stop(deadline)


if __name__ == "__main__":
    main()
