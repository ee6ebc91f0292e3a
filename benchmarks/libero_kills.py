"""Kill and stop LIBERO simulators while episodes are collected, and compare with a run that is left alone.

    python benchmarks/libero_kills.py --save   # 15 minutes on two slow cores

Groups of episodes are collected with TorchRL's collector by a policy whose actions depend on episode and decision only.
A thread kills (SIGKILL) and stops (SIGSTOP) random simulators meanwhile. Wanted: every group completes, with records
bit-equal to those of an undisturbed run, no call takes longer than its deadline allows, and no process is left.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import threading
import time
from collections.abc import Callable

import psutil
import torch
from rich.console import Console
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import TransformedEnv

from wamrl_torchrl import schema
from wamrl_torchrl.collectors.collect import EPISODES, collect_episodes, join_episodes, tidy_record
from wamrl_torchrl.envs.episodes import DealEpisodes, EpisodePlan
from wamrl_torchrl.envs.libero import LiberoEnv
from wamrl_torchrl.report import metric_table, progress_bar

GROUPS, GROUP_SIZE = ((0, 3, 11), (0, 5, 12), (2, 7, 13)), 4


def scripted_policy() -> TensorDictModule:
    """Actions float32 [N,32,7] from episode id and chunk index alone, so that any run of an episode is the same."""

    def act(episode: torch.Tensor, chunk: torch.Tensor) -> torch.Tensor:
        phase = (episode * 37 + chunk * 11)[..., None] + torch.arange(schema.CHUNK * schema.ACTION_DIM).view(
            schema.CHUNK, -1
        )
        return torch.sin(phase.double()).float()

    return TensorDictModule(act, in_keys=[schema.EPISODE_ID, schema.CHUNK_INDEX], out_keys=[schema.ACTION])


def collect(
    env: LiberoEnv,
    *,
    groups: tuple[tuple[int, int, int], ...] = GROUPS,
    on_episode: Callable[[], None] = lambda: None,
    console: Console,
) -> TensorDictBase:
    """Records of all episodes of the groups, in order; ``on_episode`` is called at the end of each."""
    plan = EpisodePlan(max_attempts=50)
    collector = Collector(
        TransformedEnv(env, DealEpisodes(plan)),
        scripted_policy(),
        frames_per_batch=env.num_envs,
        postproc=tidy_record,
        **EPISODES,
    )
    episodes: list[TensorDictBase] = []
    try:
        released = plan.release(torch.tensor(groups), GROUP_SIZE)
        with progress_bar(console, "episodes", len(released)) as advance:
            for episode in collect_episodes(iter(collector), plan, len(released)):
                episodes.append(episode)
                on_episode()
                advance(1, f"{len(env.losses)} simulators lost")
    finally:
        collector.shutdown(close_env=False)
        plan.close()
    return join_episodes(episodes).exclude("collector")  # numbers of trajectories, lost ones included


class Disturbance(threading.Thread):
    """Sends signals to random simulators of an environment, one after the other.

    Args:
        env: the environment.

    Keyword Args:
        kills, stops: number of SIGKILL and SIGSTOP.
        pause_s: mean time between two, in seconds.
        seed: draws order, slots and times.
    """

    def __init__(self, env: LiberoEnv, *, kills: int, stops: int, pause_s: float, seed: int = 0) -> None:
        super().__init__(daemon=True)
        self._env, self._pause_s = env, pause_s
        self._random = random.Random(seed)
        self._signals = [signal.SIGKILL] * kills + [signal.SIGSTOP] * stops
        self._random.shuffle(self._signals)
        self.sent: list[tuple[str, int]] = []

    def ensure_started(self) -> None:
        """Start, unless it has."""
        if self.ident is None:
            self.start()

    def run(self) -> None:
        """Send them all, to processes that are running and were not hit before."""
        hit: set[int] = set()
        while self._signals and self._env._pool.processes:
            time.sleep(self._random.uniform(0.5, 1.5) * self._pause_s)
            fresh = [p.process.pid for p in list(self._env._pool.processes) if p.process.pid not in hit]
            if fresh:
                pid, number = self._random.choice(fresh), self._signals.pop()
                os.kill(pid, number)
                hit.add(pid)
                self.sent.append((number.name, pid))


def differences(a: TensorDictBase, b: TensorDictBase) -> list[str]:
    """Keys of two sets of records that are not bit-equal."""
    if a.shape != b.shape:
        return [f"shape {tuple(a.shape)} {tuple(b.shape)}"]
    return [str(key) for key in a.keys(True, True) if not torch.equal(a.get(key), b.get(key))]


def main() -> None:
    """Command line."""
    from record import finish, processor  # here: a test imports this file from elsewhere

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--stops", type=int, default=5)
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--pause", type=float, default=12.0, help="mean seconds between two signals")
    parser.add_argument("--step-timeout", type=float, default=30.0)
    parser.add_argument("--save", action="store_true", help="write results/libero_kills.json")
    options = parser.parse_args()
    console = Console()
    settings = {"max_episode_steps": 30, "settle_steps": 2, "background_reset": True, "max_failures": 50}
    records, seconds, pids = [], [], []
    for is_disturbed in (False, True):
        env = LiberoEnv("libero_spatial", options.envs, step_timeout_s=options.step_timeout, **settings)
        disturbance = Disturbance(env, kills=options.kills, stops=options.stops, pause_s=options.pause)
        start = time.monotonic()
        if not is_disturbed:
            records.append(collect(env, console=console))
        while is_disturbed and (disturbance.ident is None or disturbance.is_alive()):  # until all signals are sent
            records.append(collect(env, on_episode=disturbance.ensure_started, console=console))
        seconds.append(time.monotonic() - start)
        losses = len(env.losses)
        pids += [process.process.pid for process in env._pool.processes]
        env.close()
    different = [differences(records[0], other) for other in records[1:]]
    orphans = [pid for pid in [*pids, *(pid for _, pid in disturbance.sent)] if psutil.pid_exists(pid)]
    figures = {
        "episodes": len(GROUPS) * GROUP_SIZE * len(different),
        "signals": len(disturbance.sent),
        "lost": losses,
        "different_keys": sum(map(len, different)),
        "orphans": len(orphans),
        "seconds_undisturbed": round(seconds[0], 1),
        "seconds_disturbed": round(seconds[1], 1),
    }
    console.print(metric_table("simulators killed and stopped during collection", figures))
    finish("libero_kills", figures, save=options.save, machine=processor())


if __name__ == "__main__":
    main()
