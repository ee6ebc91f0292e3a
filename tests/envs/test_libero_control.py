"""The lean control step against robosuite's own, in one simulator."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from tests.envs._libero import EPISODE
from wamrl_torchrl.envs.libero_gl import worker_environment
from wamrl_torchrl.envs.libero_suites import COMMANDS, load_suite

pytestmark = pytest.mark.libero
STEPS = 40


def actions() -> np.ndarray:
    """Random ones; then without rotation, which keeps the goal's orientation; beyond the limits; down to the table.

    The gripper closes in the middle and opens again, in more steps than its ramp takes.
    """
    actions = np.random.default_rng(0).uniform(-1, 1, (STEPS, 7))
    actions[:, 6] = np.repeat([-1.0, 1.0, -1.0, 0.0], STEPS // 4)
    actions[10:15, 3:6] = 0.0
    actions[15:18] *= 2.0
    actions[18:, 2] = -1.0
    return actions


@pytest.fixture(scope="module")
def libero():
    """The module and a simulator, in this process: simulators otherwise live in their own."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in worker_environment().items():
            patch.setenv(name, value)
        from wamrl_torchrl.envs import libero_control, libero_sim

        sim = libero_sim.LiberoSim(resize="render224")
        yield SimpleNamespace(control=libero_control, sim=sim)
        sim.close()


def reset(sim, suite: str) -> None:
    task, init_state, env_seed = EPISODE
    tasks = load_suite(suite)
    state = tasks.init_states[task][init_state]
    sim.reset(bddl_file=tasks.bddl_files[task], env_seed=env_seed, state=state, settle_steps=0, resume=False)


def run(sim, step) -> SimpleNamespace:
    """All actions by ``step``; what is left after each."""
    width = 2 * (1 + sim.env.sim.model.nq + sim.env.sim.model.nv) + COMMANDS
    history = SimpleNamespace(sim_states=[], observations=[], poses=[], success=[], contacts=[])
    for action in actions():
        history.success.append(step(action))
        history.sim_states.append(np.empty(width))
        sim.write_sim_state(history.sim_states[-1])
        history.observations.append(sim._state)
        history.poses.append(np.concatenate([value.ravel() for value in sim._poses.values()]))
        history.contacts.append(sim.env.sim.data.ncon)
    return history


def robosuite_step(sim):
    """robosuite's step, with the snapshot as one of its observables."""
    from robosuite.utils.observables import Observable, sensor

    posed_qpos, pre_action = sim.env.sim.data.qpos.copy(), sim.env._pre_action

    def note_posed_qpos(action, policy_step):
        posed_qpos[:] = sim.env.sim.data.qpos
        pre_action(action, policy_step)

    @sensor("snapshot")
    def snapshot(_cache):
        sim._take_snapshot(posed_qpos.copy())
        return 0.0

    sim.env._pre_action = note_posed_qpos

    observable = Observable("snapshot", snapshot, sampling_rate=20, active=False)
    sim.env._observables = {"snapshot": observable}
    for _ in range(2):  # robosuite's clock starts when its reset and its init state have updated the observables
        sim.env._update_observables(force=True)
    return lambda action: bool(sim.env.step(action)[2])


@pytest.fixture(scope="module", params=["libero_spatial", "libero_goal"])
def runs(libero, request):
    sim = libero.sim
    reset(sim, request.param)
    robosuite = run(sim, robosuite_step(sim))
    sim.env._observables = {}
    del sim.env._pre_action  # the class's own again
    reset(sim, request.param)
    exact = run(sim, sim.step)
    sim.control = libero.control.ControlLoop(sim.env, physics="fast")
    reset(sim, request.param)
    fast = run(sim, sim.step)
    sim.control = libero.control.ControlLoop(sim.env)
    return SimpleNamespace(robosuite=robosuite, exact=exact, fast=fast)


class TestExact:
    @pytest.mark.parametrize("what", ["sim_states", "observations", "poses", "success"])
    def test_is_robosuite_to_the_bit(self, runs, what):
        for lean, robosuite in zip(getattr(runs.exact, what), getattr(runs.robosuite, what), strict=True):
            assert np.array_equal(lean, robosuite)

    def test_something_happened(self, runs):
        states, contacts = np.stack(runs.exact.sim_states), runs.exact.contacts
        assert len(np.unique(contacts)) > 3
        assert np.abs(states[-1, 1:8] - states[0, 1:8]).max() > 0.3  # joints of the arm, rad
        second_finger = (states.shape[1] - COMMANDS) // 2 + 1
        assert {-1.0, 1.0} <= set(states[:, second_finger])  # its command


class TestFast:
    def test_agrees_to_the_solvers_tolerance(self, runs):
        assert not np.array_equal(np.stack(runs.fast.sim_states), np.stack(runs.exact.sim_states))
        differences = [
            np.abs(np.stack(getattr(runs.fast, what)[:20]) - np.stack(getattr(runs.exact, what)[:20])).max()
            for what in ("poses", "observations")
        ]
        assert max(differences) < 1e-4, differences
        assert runs.fast.success == runs.exact.success

    def test_leaves_the_models_tolerance_alone(self, libero, runs):
        assert libero.sim.env.sim.model.opt.tolerance == 1e-8


@contextlib.contextmanager
def replaced(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class TestRefusals:
    @pytest.mark.parametrize(
        ("owner", "name", "value", "message"),
        [
            ("controller", "impedance_mode", "variable", "controller.impedance_mode 'fixed', found 'variable'"),
            ("controller", "use_ori", False, "controller.use_ori True, found False"),
            ("controller", "uncoupling", False, "controller.uncoupling True, found False"),
            ("controller", "interpolator_pos", "linear", "controller.interpolator_pos None, found 'linear'"),
            ("robot", "controller", SimpleNamespace(), "expected the controller OSC_POSE, found SimpleNamespace"),
            ("env", "model_timestep", 0.001, "env.model_timestep 0.002, found 0.001"),
            ("env", "control_timestep", 0.1, "physics steps per control step 25, found 50"),
            ("env", "robots", [], "expected one robot, found 0"),
        ],
    )
    def test_another_controller(self, libero, runs, owner, name, value, message):
        env = libero.sim.env
        robot = env.robots[0]
        owners = {"env": env, "robot": robot, "controller": robot.controller}
        with replaced(owners[owner], name, value), pytest.raises(ValueError, match=message):
            libero.control.ControlLoop(env)

    def test_unknown_physics(self, libero, runs):
        with pytest.raises(ValueError, match="physics must be 'exact' or 'fast', got 'rough'"):
            libero.control.ControlLoop(libero.sim.env, physics="rough")
