"""What happens around the simulators: losses, replacement, background starts. Most of it needs no real simulator."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from tensordict import TensorDict

from benchmarks.libero_kills import Disturbance, collect, differences
from tests.envs._libero import PARKED, act, random_actions, request
from wamrl_torchrl import schema
from wamrl_torchrl.envs import libero_pool
from wamrl_torchrl.envs.libero import LiberoEnv
from wamrl_torchrl.envs.libero_suites import load_suite

pytestmark = pytest.mark.libero

A, B, C = (0, 3, 11), (2, 7, 12), (4, 1, 13)


@pytest.fixture
def fake(monkeypatch):
    """Environments whose simulators are those of ``_fake_worker``; closed at the end, and nothing must be left."""
    monkeypatch.setattr(libero_pool, "WORKER_MODULE", "tests.envs._fake_worker")
    envs, before = [], open_files()

    def make(num_envs: int, *, step_s: float = 0.0, reset_s: float = 0.0, crash: str = "", **options) -> LiberoEnv:
        monkeypatch.setenv("FAKE_STEP_S", str(step_s))
        monkeypatch.setenv("FAKE_RESET_S", str(reset_s))
        monkeypatch.setenv("FAKE_CRASH", crash)
        envs.append(LiberoEnv("libero_spatial", num_envs, max_episode_steps=30, **options))
        return envs[-1]

    yield make
    pids = [pid for env in envs for pid in pids_of(env)]
    for env in envs:
        env.close(raise_if_closed=False)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    envs.clear()
    assert open_files() <= before


def open_files() -> int:
    """Sockets, logs and shared memory that this process holds."""
    kinds, found = ("socket:", "memfd:libero", "(deleted)"), 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists
            found += any(kind in str(entry.readlink()) for kind in kinds)
    return found


def pids_of(env: LiberoEnv) -> list[int]:
    return [process.process.pid for process in env._pool.processes]


def chunks(env: LiberoEnv, observation: TensorDict, count: int) -> list[TensorDict]:
    """``count`` chunks of the same random actions in every slot."""
    steps = []
    for step in range(count):
        observation = act(env, observation, *[random_actions(env.replan_steps, seed=step)] * env.num_envs)
        steps.append(observation)
    return steps


def content(step: TensorDict, slot: int) -> TensorDict:
    """What does not depend on which ids were free: pictures, states and outcomes."""
    return step.exclude(schema.GROUP_ID, schema.EPISODE_ID)[slot]


class TestLossWhileStarting:
    def test_the_episode_starts_all_the_same(self, fake, caplog):
        untouched, env = fake(2), fake(2)
        wanted = untouched.reset(request(A, B))
        pid = pids_of(env)[1]
        os.kill(pid, signal.SIGKILL)
        with caplog.at_level(logging.WARNING):
            found = env.reset(request(A, B))
        assert (content(found, 1) == content(wanted, 1)).all()
        assert pids_of(env)[1] != pid
        named = f"slot 1 (pid {pid}, reset of libero_spatial, task_id 2, init_state_id 7"
        assert named in caplog.text
        assert "died with signal SIGKILL" in caplog.text
        assert len(env.losses) == 1

    def test_it_hangs(self, fake):
        env = fake(1)
        wanted = env.reset(request(A))
        pid = pids_of(env)[0]
        env._pool.timeout_s = 1.0
        os.kill(pid, signal.SIGSTOP)
        assert (content(env.reset(request(A)), 0) == content(wanted, 0)).all()
        assert "has not answered for 1 s" in env.losses[0]
        assert not psutil.pid_exists(pid)

    def test_every_time(self, fake):
        env = fake(2, crash=Path(load_suite("libero_spatial").bddl_files[B[0]]).name, max_failures=2)
        pids = pids_of(env)
        with pytest.raises(RuntimeError, match=r"(?s)task_id 2.*SIGABRT.*about to crash.*lost 2 simulators in a row"):
            env.reset(request(A, B))
        assert not any(psutil.pid_exists(pid) for pid in pids)
        with pytest.raises(RuntimeError, match="this LiberoEnv is closed"):
            env.reset(request(A, B))


class TestLossInAStep:
    def test_voids_the_episode_and_no_other(self, fake):
        untouched, env = fake(2), fake(2)
        wanted = chunks(untouched, untouched.reset(request(A, B)), 2)
        first = chunks(env, env.reset(request(A, B)), 1)[0]
        assert not first[schema.INVALID].any()
        os.kill(pids_of(env)[1], signal.SIGKILL)
        second = act(env, first, *[random_actions(10, seed=1)] * 2)
        assert second[schema.INVALID].flatten().tolist() == [False, True]
        assert (content(second, 0) == content(wanted[1], 0)).all()
        row = second[1]
        assert [bool(row[key]) for key in ("truncated", "done", "terminated")] == [True, True, False]
        for key in (schema.EXECUTED_MASK, schema.FUTURE_FRAMES, schema.SIM_STATES):
            assert not row[key].any()
        assert "step of libero_spatial, task_id 2" in env.losses[0]

    def test_can_be_run_again(self, fake):
        env = fake(2)
        wanted = chunks(env, env.reset(request(A, B)), 2)
        observation = env.reset(request(A, B))
        os.kill(pids_of(env)[0], signal.SIGKILL)
        chunks(env, observation, 1)
        again = chunks(env, env.reset(request(A, B)), 2)
        assert all(
            (content(a, slot) == content(b, slot)).all() for a, b in zip(again, wanted, strict=True) for slot in (0, 1)
        )

    def test_stays_lost_until_a_reset(self, fake):
        env = fake(1)
        observation = env.reset(request(A))
        os.kill(pids_of(env)[0], signal.SIGKILL)
        for step in chunks(env, observation, 2):
            assert bool(step[schema.INVALID])
        assert len(env.losses) == 1

    def test_the_same_ids_ask_for_the_same_episode(self, fake):
        env = fake(1)
        first = env.reset(request(A))
        os.kill(pids_of(env)[0], signal.SIGKILL)
        step = chunks(env, first, 1)[0]
        again = env.reset(step.select(*schema.EPISODE_KEYS))
        assert (again == first).all()

    def test_a_whole_episode_between_two_losses_is_forgiven(self, fake):
        env = fake(1, max_failures=2)
        for _ in range(3):
            observation = env.reset(request(A))
            os.kill(pids_of(env)[0], signal.SIGKILL)
            chunks(env, observation, 1)
            chunks(env, env.reset(request(A)), 3)
        assert len(env.losses) == 3

    def test_two_broken_episodes_in_a_row_are_not(self, fake):
        env = fake(1, max_failures=2)
        observation = env.reset(request(A))
        os.kill(pids_of(env)[0], signal.SIGKILL)
        chunks(env, observation, 1)
        observation = env.reset(request(B))
        os.kill(pids_of(env)[0], signal.SIGKILL)
        with pytest.raises(RuntimeError, match="Slot 0 has lost 2 simulators in a row"):
            chunks(env, observation, 1)


class TestBackgroundReset:
    def test_others_go_on(self, fake):
        env = fake(2, reset_s=1.0, background_reset=True)
        observation = env.reset(request(A, B))
        assert not env.pending.any()
        observation = chunks(env, observation, 1)[0]
        observation = env.reset(request(C, B, slots=(True, False)))
        assert env.pending.tolist() == [True, False]
        assert env.parked.tolist() == [True, False]
        assert env.slot_tasks.tolist() == [C[0], B[0]]
        step = chunks(env, observation, 1)[0]
        assert step["done"].flatten().tolist() == [True, False]
        assert step[schema.EXECUTED_MASK].sum(-1).tolist() == [0, 10]
        assert not step[schema.INVALID].any()

        time.sleep(1.2)
        ready = env.reset(request(PARKED, B, slots=(True, False)))
        assert not env.pending.any()
        assert ready[schema.TASK_ID].flatten().tolist()[0] == C[0]
        alone = fake(1)
        assert (content(ready, 0) == content(alone.reset(request(C)), 0)).all()

    def test_waits_for_one_where_nobody_runs(self, fake):
        env = fake(2, reset_s=0.3, background_reset=True)
        env.reset(request(A, PARKED))
        ready = env.reset(request(B, PARKED, slots=(True, False)))
        assert ready[schema.TASK_ID].flatten().tolist()[0] == B[0]
        assert not env.pending.any()

    def test_another_episode_is_refused_meanwhile(self, fake):
        env = fake(2, reset_s=0.5, background_reset=True)
        env.reset(request(A, B))
        env.reset(request(C, B, slots=(True, False)))
        with pytest.raises(ValueError, match=r"slots \[0\] are still starting an episode"):
            env.reset(request(B, B, slots=(True, False)))

    def test_reset_of_all_starts_afresh(self, fake):
        env = fake(2, reset_s=0.3, background_reset=True)
        env.reset(request(A, B))
        env.reset(request(C, B, slots=(True, False)))
        found = env.reset(request(B, A))
        assert found[schema.TASK_ID].flatten().tolist() == [B[0], A[0]]
        assert not env.pending.any()

    def test_rollout_by_its_own_dealing(self, fake):
        env = fake(2, step_s=0.01, reset_s=0.2, background_reset=True)
        steps = env.rollout(40, break_when_any_done=False)
        busy = steps[schema.EPISODE_ID].squeeze(-1) != schema.PARKED
        assert busy.any(-1).all()
        for slot in (0, 1):
            index = steps[schema.CHUNK_INDEX][slot, busy[slot], 0].tolist()
            assert index[:6] == [0, 1, 2, 0, 1, 2]

    def test_a_loss_while_starting(self, fake):
        env = fake(2, reset_s=0.3, background_reset=True)
        env.reset(request(A, B))
        env.reset(request(C, B, slots=(True, False)))
        os.kill(pids_of(env)[0], signal.SIGKILL)
        chunks(env, env.reset(request(PARKED, B, slots=(True, False))), 1)
        # Nobody else runs, so it is waited for.
        ready = env.reset(request(PARKED, PARKED, slots=(True, True)))
        assert ready[schema.TASK_ID].flatten().tolist()[0] == C[0]
        assert len(env.losses) == 1


class TestStart:
    def test_is_staggered(self, fake, monkeypatch):
        starting, launch = [], libero_pool.SimPool._launch

        def watched(pool, slot):
            starting.append(1 + sum(bool(process.calls) for process in pool.processes))
            return launch(pool, slot)

        monkeypatch.setattr(libero_pool.SimPool, "_launch", watched)
        monkeypatch.setattr("os.cpu_count", lambda: 2)
        env = fake(5)
        assert len(set(pids_of(env))) == 5
        assert max(starting) == 2


class TestDisturbedCollection:
    def test_groups_complete_as_if_nothing_had_happened(self, fake):
        options = {"step_s": 0.01, "reset_s": 0.1, "background_reset": True, "max_failures": 50}
        wanted = collect(fake(4, **options), console=Console(quiet=True))
        env, found = fake(4, step_timeout_s=1.0, **options), []
        env._pool.timeout_s = 5.0
        disturbance = Disturbance(env, kills=10, stops=5, pause_s=0.3)
        while disturbance.ident is None or disturbance.is_alive():
            found.append(collect(env, on_episode=disturbance.ensure_started, console=Console(quiet=True)))
        assert len(disturbance.sent) == 15
        assert len(env.losses) >= 14  # the last one may not be noticed any more
        assert [differences(wanted, records) for records in found] == [[]] * len(found)
        assert not any(psutil.pid_exists(pid) for _, pid in disturbance.sent[:-1])
