"""LiberoEnv on the real simulator."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import psutil
import pytest
import torch
from torchrl.collectors import Collector, MultiAsyncCollector
from torchrl.envs.utils import RandomPolicy, check_env_specs

from tests.envs._libero import EPISODE, PARKED, act, random_actions, request, run, stock_command
from wamrl_torchrl import schema
from wamrl_torchrl.envs.libero import LiberoEnv
from wamrl_torchrl.envs.libero_gl import worker_environment

pytestmark = pytest.mark.libero
OTHER = (2, 7, 5)


@pytest.fixture(scope="module")
def demo():
    """An episode of the scripted expert, to replay: success at its last action."""
    env = LiberoEnv("libero_spatial", 1)
    demo = env.demonstrate(torch.tensor([[*EPISODE, 0, 0]]), render=False)[0]
    env.close()
    assert bool(demo["success"])
    return demo


@pytest.fixture(scope="module")
def env(demo):
    env = LiberoEnv("libero_spatial", 2, task_ids=[0], start_states={0: demo["sim_states"]})
    yield env
    env.close()


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """20 random actions in LIBERO's own environment, hard reset and both cameras at every step."""
    folder = tmp_path_factory.mktemp("stock")
    np.save(folder / "actions.npy", random_actions(20).numpy())
    command = stock_command(*EPISODE, folder / "actions.npy", folder / "out.npz")
    environ = worker_environment()
    subprocess.run(command, env=environ, check=True, capture_output=True, timeout=200)
    with np.load(folder / "out.npz") as arrays:
        return {key: torch.from_numpy(value) for key, value in arrays.items()}


def process_ids(env: LiberoEnv) -> list[int]:
    return [process.process.pid for process in env._pool.processes]


def wait_for_end(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
            return True
        time.sleep(0.1)
    return False


@pytest.fixture(scope="module")
def steps(env):
    """The same 20 actions in both slots, after other episodes and another task in the same processes."""
    run(env, env.reset(request(OTHER, (0, 5, 1))), random_actions(10, 1), random_actions(10, 2))
    env.reset(request(EPISODE, EPISODE))
    run(env, env.reset(request((0, 6, 2), EPISODE, slots=[True, False])), random_actions(10, 3), random_actions(10, 4))
    first, actions = env.reset(request(EPISODE, EPISODE)), random_actions(20)
    return first, run(env, first, actions, actions)


class TestAgainstRobosuite:
    """Bit-equality with ``OffScreenRenderEnv`` and a hard reset, of the same episode in two processes."""

    @pytest.mark.parametrize("slot", [0, 1])
    def test_reset(self, steps, stock, slot):
        first = steps[0][slot]
        assert torch.equal(first[schema.STATE], stock["states"][0])
        assert torch.equal(first[schema.IMAGE], stock["images"][0])

    @pytest.mark.parametrize("slot", [0, 1])
    def test_states(self, steps, stock, slot):
        steps = steps[1][slot]
        assert torch.equal(steps[schema.STATE], stock["states"][[10, 20]])
        sim = torch.cat((steps[schema.SIM_STATES][0], steps[schema.SIM_STATES][1, 1:]))
        assert torch.equal(sim[:, : stock["sim_states"].shape[1]], stock["sim_states"])

    @pytest.mark.parametrize("slot", [0, 1])
    def test_frames(self, steps, stock, slot):
        steps = steps[1][slot]
        assert torch.equal(steps[schema.IMAGE], stock["images"][[10, 20]])
        assert torch.equal(steps[schema.FUTURE_FRAMES].flatten(0, 1), stock["images"][[4, 8, 14, 18]])
        assert bool(steps[schema.FUTURE_MASK].all())


class TestSpecs:
    def test_check_env_specs(self, env):
        check_env_specs(env)

    def test_sizes(self, env):
        assert env.observation_spec[schema.IMAGE].shape == (2, 3, 224, 448)
        assert env.observation_spec[schema.SIM_STATES].shape == (2, 11, 195)
        assert env.max_episode_steps == 240

    def test_deals_its_tasks_and_train_states(self, env):
        drawn = env._draw_episodes(2000, torch.Generator().manual_seed(0))
        assert drawn[:, 0].unique().tolist() == [0]
        assert drawn[:, 1].unique().tolist() == list(range(40))
        assert len(drawn[:, 2].unique()) > 1990

    def test_records_pass_the_contract(self, env):
        record = env.rollout(2)
        outcome = [("next", key) for key in schema.OUTCOME_KEYS]
        schema.validate_macro_step(record, required=[schema.IMAGE, *schema.EPISODE_KEYS, *outcome])


class TestReset:
    def test_honours_ids(self, env):
        asked = request((0, 1, 7), (0, 2, 9))
        observation = env.reset(asked)
        for key in schema.EPISODE_KEYS:
            assert torch.equal(observation[key], asked[key])

    def test_env_seed_moves_fixtures_only(self, env):
        a, b = env.reset(request((0, 1, 7), (0, 1, 8)))
        assert torch.equal(a[schema.STATE], b[schema.STATE])
        assert not torch.equal(a[schema.IMAGE], b[schema.IMAGE])

    def test_partial_reset_leaves_the_other_slot_alone(self, env):
        actions = [random_actions(10)] * 2
        env.reset(request(EPISODE, (0, 1, 7)))
        disturbed = act(env, env.reset(request((0, 2, 3), PARKED, slots=[True, False])), *actions)
        calm = act(env, env.reset(request(EPISODE, (0, 1, 7))), *actions)
        for key in (schema.IMAGE, schema.STATE, schema.SIM_STATES, schema.FUTURE_FRAMES):
            assert torch.equal(disturbed[1][key], calm[1][key])
        assert disturbed[schema.INIT_STATE_ID].flatten().tolist() == [2, 1]

    def test_terminal_observation_survives_the_automatic_reset(self, env, monkeypatch):
        monkeypatch.setattr(env, "max_episode_steps", 10)
        observation = env.reset(request(EPISODE, EPISODE))
        expected = act(env, observation, *[random_actions(10)] * 2)
        observation = env.reset(request(EPISODE, EPISODE))
        chunk = torch.ones(2, schema.CHUNK, schema.ACTION_DIM)
        chunk[:, :10] = random_actions(10)
        step, after = env.step_and_maybe_reset(observation.set("action", chunk))
        assert bool(step["next", "done"].all())
        assert not torch.equal(after[schema.IMAGE], step["next", schema.IMAGE])
        assert torch.equal(step["next", schema.IMAGE], expected[schema.IMAGE])
        assert torch.equal(step["next", schema.STATE], expected[schema.STATE])


class TestEnds:
    @pytest.mark.parametrize("left", range(1, 11))
    def test_success_at_every_action_of_a_chunk(self, env, demo, left):
        """The chunk begins ``left`` actions before the expert's success; start states make that a single step."""
        length = len(demo["executed_actions"])
        observation = env.reset(request((0, 50 + length - left, EPISODE[2]), PARKED))
        step = act(env, observation, demo["executed_actions"][length - left :])[0]
        assert step[schema.EXECUTED_MASK].sum().item() == left
        assert step["reward"].item() == step[schema.REWARD_TASK].item() == 1.0
        assert all(bool(step[key]) for key in (schema.SUCCESS, "terminated", "done"))
        assert not bool(step["truncated"])
        assert step[schema.FUTURE_MASK].tolist() == [left >= 4, left >= 8]
        states = step[schema.SIM_STATES]
        assert (states[left:] == states[left]).all()
        assert not torch.equal(states[left], states[left - 1])

    def test_success_in_the_next_chunk_is_not_rewarded_early(self, env, demo):
        length = len(demo["executed_actions"])
        actions = demo["executed_actions"][length - 11 :]
        observation = env.reset(request((0, 50 + length - 11, EPISODE[2]), PARKED))
        first = act(env, observation, actions[:10])
        assert not bool(first["done"][0])
        assert first["reward"][0].item() == 0.0
        second = act(env, first, actions[10:])
        assert second["reward"][0].item() == 1.0
        assert second[schema.EXECUTED_MASK][0].sum().item() == 1

    @pytest.mark.parametrize("limit", range(1, 11))
    def test_truncation_at_every_action_of_a_chunk(self, env, stock, monkeypatch, limit):
        monkeypatch.setattr(env, "max_episode_steps", limit)
        step = act(env, env.reset(request(EPISODE, PARKED)), random_actions(10))[0]
        assert step[schema.EXECUTED_MASK].sum().item() == limit
        assert all(bool(step[key]) for key in ("truncated", "done"))
        assert not bool(step["terminated"])
        assert step["reward"].item() == 0.0
        assert torch.equal(step[schema.IMAGE], stock["images"][limit])
        for offset, frame in zip((4, 8), step[schema.FUTURE_FRAMES], strict=True):
            assert torch.equal(frame, stock["images"][offset] if limit >= offset else torch.zeros_like(frame))

    def test_whole_episode_replays_to_the_bit(self, env, demo):
        actions, observation = demo["executed_actions"], env.reset(request(EPISODE, PARKED))
        executed = 0
        while not bool(observation["done"][0]):
            observation = act(env, observation, actions[executed : executed + 10])
            count = int(observation[schema.EXECUTED_MASK][0].sum())
            states = observation[schema.SIM_STATES][0, : count + 1]
            assert torch.equal(states, demo["sim_states"][executed : executed + count + 1])
            executed += count
        assert executed == len(actions)
        assert bool(observation[schema.SUCCESS][0])


class TestStartStates:
    def test_continues_from_there(self, env, demo):
        observation = env.reset(request((0, 50 + 40, EPISODE[2]), (0, 50 + 60, EPISODE[2])))
        actions = demo["executed_actions"]
        states = act(env, observation, actions[40:50], actions[60:70])[schema.SIM_STATES][..., :103]
        # What follows in a row is what the picture shows: a start's picture shows the state itself, without the lag.
        recorded = demo["sim_states"][:, :103]
        assert torch.equal(states[:, 0], recorded[[40, 60]])
        # The solver's warm start is not part of a state, so the continuation agrees to its tolerance only.
        assert (states[0] - recorded[40:51]).abs().max() < 1e-5
        assert (states[1] - recorded[60:71]).abs().max() < 1e-5
        # Kinematics are those of the stored state; the recorded ones lag by up to two physics steps (4 ms).
        assert (observation[schema.STATE] - demo["states"][[40, 60]]).abs().max() < 5e-3

    def test_keeps_the_grip(self, env, demo):
        """An object in the hand stays there: the gripper command is part of the state."""
        held = int((demo["actions"][:, 6] > 0).nonzero()[-1]) - 15
        assert demo["sim_states"][held, 92:94].tolist() == [-1.0, 1.0]
        hold = torch.tensor([0.0, 0, 0, 0, 0, 0, 1]).expand(10, 7)
        step = act(env, env.reset(request((0, 50 + held, EPISODE[2]), PARKED)), hold)
        heights = step[schema.SIM_STATES][0, :, 1 + 9 + 2]  # of the bowl: its joint follows the robot's nine
        assert (heights - heights[0]).abs().max() < 0.02

    def test_flattened_states_will_do(self, env, monkeypatch):
        plain = torch.from_numpy(env.suite.init_states[0][:1])
        monkeypatch.setattr(env, "_start_states", {0: plain})
        monkeypatch.setattr(env, "settle_steps", 0)
        own, started = env.reset(request((0, 0, 5), (0, 50, 5)))
        assert torch.equal(own[schema.IMAGE], started[schema.IMAGE])
        assert torch.equal(own[schema.STATE], started[schema.STATE])

    @pytest.mark.parametrize("states", [torch.zeros(3, 94), torch.zeros(3, 91, dtype=torch.float64), torch.zeros(94)])
    def test_refuses_other_shapes(self, states):
        with pytest.raises(ValueError, match=r"start_states\[1\] must be float64 \[M,n\] with 92 <= n <= 195"):
            LiberoEnv("libero_spatial", 1, start_states={1: states})


class TestParked:
    def test_costs_nothing(self, env):
        observation = env.reset(request(PARKED, PARKED))
        start = time.perf_counter()
        step = act(env, observation)
        assert time.perf_counter() - start < 0.05
        assert not step[schema.EXECUTED_MASK].any()
        assert step["truncated"].all()


class TestCollectors:
    """Two chunks to an episode, so whole trajectories of two steps."""

    def make(self, **options):
        return partial(LiberoEnv, "libero_spatial", 1, task_ids=[0], max_episode_steps=20, **options)

    def check(self, collector, policy_steps):
        try:
            batches = list(collector)
        finally:
            collector.shutdown()
        steps = torch.cat([batch.reshape(-1) for batch in batches])
        assert len(steps) == policy_steps
        assert steps[schema.CHUNK_INDEX].flatten().tolist() == [0, 1] * (policy_steps // 2)
        assert steps["next", "done"].flatten().tolist() == [False, True] * (policy_steps // 2)
        assert torch.equal(steps[schema.EPISODE_ID], steps["next", schema.EPISODE_ID])
        assert len(steps[schema.EPISODE_ID].unique()) == policy_steps // 2

    def test_in_process(self, env):
        policy = RandomPolicy(env.action_spec[:1])
        self.check(Collector(self.make(), policy, frames_per_batch=4, total_frames=4), 4)

    @pytest.mark.slow
    def test_in_a_worker_process(self, env):
        policy = RandomPolicy(env.action_spec[:1])
        options = {"frames_per_batch": 2, "total_frames": 4, "trajs_per_batch": 1, "traj_format": "cat"}
        self.check(MultiAsyncCollector([self.make()], policy, **options), 4)


def _make_and_close(connection) -> None:
    env = LiberoEnv("libero_spatial", 1)
    connection.send(process_ids(env))
    env.close()
    connection.send("closed")


class TestProcesses:
    def test_in_a_daemonic_process(self):
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_make_and_close, args=(theirs,), daemon=True)
        process.start()
        assert ours.poll(100)
        pids = ours.recv()
        assert ours.poll(30)
        assert ours.recv() == "closed"
        process.join(30)
        assert wait_for_end(pids, 5)

    def test_episode_of_a_replaced_simulator_is_the_same_to_the_bit(self, env):
        actions = random_actions(10)
        first = env.reset(request(EPISODE, PARKED))
        wanted = run(env, first, actions, actions)[0]
        os.kill(process_ids(env)[0], signal.SIGKILL)
        again = env.reset(request(EPISODE, PARKED))
        assert torch.equal(again[schema.IMAGE][0], first[schema.IMAGE][0])
        assert torch.equal(again[schema.STATE][0], first[schema.STATE][0])
        found = run(env, again, actions, actions)[0]
        for key in (schema.IMAGE, schema.STATE, schema.SIM_STATES, schema.FUTURE_FRAMES):
            assert torch.equal(found[key], wanted[key])
        assert "idle" in env.losses[-1] or "reset of libero_spatial" in env.losses[-1]

    def test_error_in_a_worker_comes_back(self, tmp_path):
        env = LiberoEnv("libero_spatial", 1)
        pids = process_ids(env)
        missing = str(tmp_path / "missing.bddl")
        env.suite = dataclasses.replace(env.suite, bddl_files=(missing, *env.suite.bddl_files[1:]))
        with pytest.raises(RuntimeError, match=r"(?s)slot 0 .*reset of .*task_id 0.*Traceback.*missing\.bddl"):
            env.reset(request(EPISODE))
        assert wait_for_end(pids, 5)

    def test_dropped_environment_ends_its_processes(self):
        env = LiberoEnv("libero_spatial", 1)
        pids = process_ids(env)
        assert psutil.pid_exists(pids[0])
        del env
        gc.collect()
        assert wait_for_end(pids, 8)

    def test_killed_parent_leaves_no_orphan(self):
        code = (
            "import os, signal, tests.envs.test_libero as t; env = t.LiberoEnv('libero_spatial', 1); "
            "print(*t.process_ids(env), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == -signal.SIGKILL
        assert wait_for_end(list(map(int, done.stdout.split())), 10)


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"task_ids": [10]}, "task_id 10 is out of range: libero_spatial has tasks 0 to 9"),
            ({"task_ids": []}, r"nothing to deal: task_ids=\[\]"),
            ({"init_state_ids": [50]}, "init_state_id 50 is out of range for task 0 .* 50 init states and 0 start"),
            ({"resize": "bicubic"}, "resize must be 'render256' or 'render224', got 'bicubic'"),
            ({"physics": "rough"}, "physics must be 'exact' or 'fast', got 'rough'"),
            ({"settle_steps": -1}, "settle_steps must not be negative, got -1"),
            ({"frame_offsets": (4, 12)}, "frame_offsets must increase within 1..replan_steps=10"),
            ({"replan_steps": 33}, "replan_steps must lie in 1..32"),
        ],
    )
    def test_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            LiberoEnv("libero_spatial", 1, **options)

    @pytest.mark.parametrize(
        ("episode", "message"),
        [
            ((10, 0, 0), "task_id 10 is out of range"),
            ((1, 50, 0), "init_state_id 50 is out of range for task 1"),
            ((0, 0, -1), "env_seed -1 is out of range"),
        ],
    )
    def test_requests(self, env, episode, message):
        with pytest.raises(ValueError, match=message):
            env.reset(request(EPISODE, episode))

    def test_chunk(self, env):
        observation = env.reset(request(PARKED, PARKED))
        with pytest.raises(ValueError, match=r"'action' must have shape \(2, 32, 7\), found \(2, 10, 7\)"):
            env.step(observation.set("action", torch.zeros(2, 10, 7)))
