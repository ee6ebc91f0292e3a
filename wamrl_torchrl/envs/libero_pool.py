"""The simulator processes of an environment, as it sees them: started, watched, replaced, ended."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import IO, Any, NamedTuple, NoReturn

from wamrl_torchrl.envs.libero_worker import Layout

WORKER_MODULE = "wamrl_torchrl.envs.libero_worker"
LOG_TAIL = 2000
HANG_GRACE_S = 2.0  # for a fault handler to say where its process hangs

log = logging.getLogger(__name__)


class Call(NamedTuple):
    """A command that a process is at work on, or will be."""

    command: str
    what: str  # for messages
    timeout_s: float


class Lost(NamedTuple):
    """What came instead of a reply: the process is gone, and another one is being started in its place."""

    message: str


class SimProcess:
    """One simulator process as its parent sees it."""

    def __init__(
        self, slot: int, layout: Layout, memory: int, *, options: Mapping[str, Any], environ: dict[str, str]
    ) -> None:
        ours, theirs = socket.socketpair()
        self.slot = slot
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        self.process = subprocess.Popen(
            [sys.executable, "-m", WORKER_MODULE, str(theirs.fileno()), str(memory)],
            env=environ,
            pass_fds=(theirs.fileno(), memory),
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.calls: deque[Call] = deque()
        self.since = 0.0  # when the first of the calls began
        self._start = {"slot": slot, "layout": tuple(layout), "options": dict(options)}

    def describe(self, call: Call | None) -> str:
        """The process at a command, for messages."""
        return f"LIBERO simulator of slot {self.slot} (pid {self.process.pid}, {call.what if call else 'idle'})"

    def __str__(self) -> str:
        return self.describe(self.calls[0] if self.calls else None)

    def start(self, timeout_s: float) -> None:
        """Ask for the simulator; its reply is the first."""
        self.send(Call("start", "starting", timeout_s), self._start)

    def send(self, call: Call, arguments: dict[str, Any]) -> None:
        """Send a command, also behind others: the process works on one after the other."""
        if not self.calls:
            self.since = time.monotonic()
        self.calls.append(call)
        with contextlib.suppress(OSError):  # a dead process is found when its reply is waited for
            self.connection.send((call.command, arguments, call.timeout_s))

    @property
    def is_at_work(self) -> bool:
        """Whether a command, other than to start, waits for its reply."""
        return any(call.command != "start" for call in self.calls)

    def receive(self) -> tuple[Call, str, Any]:
        """The first call and its reply, once there is one: status and result.

        Raises:
            EOFError, OSError: the process is dead.
        """
        status, reply = self.connection.recv()
        call = self.calls.popleft()
        self.since = time.monotonic()
        return call, status, reply

    @property
    def deadline(self) -> float:
        """When the first call should have been answered."""
        return self.since + self.calls[0].timeout_s

    def kill(self) -> str:
        """End the process by force, and say how it ended."""
        self.process.kill()  # of no effect on what is dead
        code = self.process.wait()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def stack(self) -> None:
        """Let a process that hangs write where: it was started with a fault handler, which answers this signal so."""
        self.process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(HANG_GRACE_S)

    def last_words(self) -> str:
        """The end of what the process printed."""
        size = self.log.seek(0, os.SEEK_END)
        self.log.seek(max(0, size - LOG_TAIL))
        return self.log.read().decode(errors="replace").strip()

    def stop(self, deadline: float) -> None:
        """Wait for the process to end, and kill it at ``deadline``."""
        try:
            self.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
        self.connection.close()
        self.log.close()


class SimPool:
    """N simulator processes and their shared arrays.

    A process that dies, or does not answer in time, is replaced by a new one in the same slot, and its command is
    answered by :class:`Lost`. An exception in a process is no accident: it would come again, so it ends the pool.

    Args:
        layout: sizes of the shared arrays.

    Keyword Args:
        options: keyword arguments of :class:`~wamrl_torchrl.envs.libero_worker.Worker`.
        environs: environment variables of the process of each slot.
        timeout_s: longest time of a command, in seconds, unless it has one of its own.
        max_failures: losses of a slot in a row (see :meth:`forgive`) after which the pool gives up.
        starting: processes that start at the same time; as many as there are cores by default.

    Attributes:
        arrays: the shared arrays.
        losses: what happened to lost processes, in order.

    Raises:
        RuntimeError: a command failed, or a slot lost too many processes in a row; the message names slot, pid, task
            and phase, and all processes are ended.
    """

    CLOSE_S = 5.0

    def __init__(
        self,
        layout: Layout,
        *,
        options: Mapping[str, Any],
        environs: Sequence[dict[str, str]],
        timeout_s: float,
        max_failures: int,
        starting: int | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self.max_failures = max_failures
        self.losses: list[str] = []
        self._layout, self._options, self._environs = layout, options, list(environs)
        self._failures = [0] * layout.slots
        self._replies: dict[int, Any] = {}  # of slots whose command is finished, until they are taken
        self._owner = os.getpid()
        self._memory = os.memfd_create("libero")
        self.arrays = layout.map(self._memory)
        self.processes: list[SimProcess] = []
        try:
            # Staggered: imports and OpenGL contexts of many processes at once take longer than their timeout.
            limit = max(1, starting or os.cpu_count() or 1)
            for slot in range(layout.slots):
                self._wait(lambda: sum(bool(process.calls) for process in self.processes) < limit)
                self.processes.append(self._launch(slot))
            self._wait(lambda: not any(process.calls for process in self.processes))
        except BaseException:
            self.close(grace_s=0.0)
            raise

    def _launch(self, slot: int) -> SimProcess:
        environ = self._environs[slot]
        process = SimProcess(slot, self._layout, self._memory, options=self._options, environ=environ)
        process.start(self.timeout_s)
        return process

    # ---- commands -----------------------------------------------------------------------------------------------
    def submit(self, slot: int, command: str, what: str, *, timeout_s: float | None = None, **arguments: Any) -> None:
        """Send a command; ``what`` says in messages what the process was doing.

        A process that was just replaced may still be starting: it will get to the command.
        """
        process = self.processes[slot]
        if process.is_at_work:
            raise RuntimeError(f"{process} is still at work: an earlier call was interrupted; close the environment")
        self._replies.pop(slot, None)
        process.send(Call(command, what, self.timeout_s if timeout_s is None else timeout_s), arguments)

    def wait(self, slots: Sequence[int], *, at_least: int | None = None) -> list[int]:
        """Wait until the commands of ``at_least`` of ``slots`` (all by default) are finished, and name those slots.

        What other slots answer meanwhile is kept, and the deadline of every process is watched.
        """
        wanted = len(slots) if at_least is None else at_least

        def finished() -> list[int]:
            return [slot for slot in slots if not self.processes[slot].is_at_work]

        self._wait(lambda: len(finished()) >= wanted)
        return finished()

    def _wait(self, enough: Callable[[], bool]) -> None:
        """Receive what has been answered, at least once, until it is enough."""
        while True:
            stop = enough()
            busy = [process for process in self.processes if process.calls]
            if busy:
                first = min(process.deadline for process in busy)
                wait([process.connection for process in busy], 0.0 if stop else max(0.0, first - time.monotonic()))
            for process in busy:
                if process.connection.poll():  # also if it is dead
                    self._receive(process)
                elif process.deadline <= time.monotonic():
                    self._lose_hung(process)
            if stop:
                return

    def take(self, slot: int) -> Any:
        """Result of the last command of a slot that is ready, or :class:`Lost`; each can be taken once."""
        return self._replies.pop(slot)

    def forgive(self, slot: int) -> None:
        """The slot works again: its losses are no longer "in a row" with those to come."""
        self._failures[slot] = 0

    def _receive(self, process: SimProcess) -> None:
        try:
            call, status, reply = process.receive()
        except (EOFError, OSError):
            self._lose(process, f"{process} died with {process.kill()}")
            return
        if status == "error":
            self._fail(f"{process.describe(call)} failed:\n{reply}")
        if call.command != "start":
            self._replies[process.slot] = reply

    # ---- accidents ----------------------------------------------------------------------------------------------
    def _lose_hung(self, process: SimProcess) -> None:
        message = f"{process} has not answered for {process.calls[0].timeout_s:g} s"
        process.stack()
        process.kill()
        self._lose(process, message)

    def _lose(self, process: SimProcess, message: str) -> None:
        """Replace a process that has ended."""
        slot, words = process.slot, process.last_words()
        message = f"{message}\n{words}" if words else message
        self.losses.append(message)
        self._failures[slot] += 1
        process.stop(0.0)
        if self._failures[slot] >= self.max_failures:
            self._fail(f"{message}\nSlot {slot} has lost {self._failures[slot]} simulators in a row.")
        log.warning("%s\nAnother one takes its place. In a row: %d.", message, self._failures[slot])
        if process.is_at_work:
            self._replies[slot] = Lost(message)
        self.processes[slot] = self._launch(slot)

    def _fail(self, message: str) -> NoReturn:
        self.close(grace_s=0.0)
        raise RuntimeError(f"{message}\nThe environment is closed.")

    def close(self, grace_s: float = CLOSE_S) -> None:
        """End every process, by force after ``grace_s`` seconds. Does nothing in a fork of the owner, or twice."""
        if os.getpid() != self._owner or self._memory < 0:
            return
        os.close(self._memory)
        del self.arrays
        processes, self.processes, self._memory = self.processes, [], -1
        for process in processes:
            with contextlib.suppress(OSError):  # it may be dead
                process.connection.send(("close", {}, grace_s))
        deadline = time.monotonic() + grace_s
        for process in processes:
            process.stop(deadline)
