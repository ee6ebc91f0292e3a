"""What a control step of LIBERO costs beside the calls of MuJoCo that robosuite makes in it.

    python benchmarks/libero_steps.py

Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import time
from statistics import median
from typing import TYPE_CHECKING, Any
from unittest import mock

import mujoco
import numpy as np

from wamrl_torchrl.envs.libero_gl import worker_environment
from wamrl_torchrl.envs.libero_suites import load_suite

if TYPE_CHECKING:
    from wamrl_torchrl.envs.libero_sim import LiberoSim

EVERYTHING = mujoco.mjtState.mjSTATE_INTEGRATION


def step_ratios(sim: LiberoSim, *, steps: int = 30) -> dict[str, float]:
    """Time control steps of ``sim`` against the bare calls of MuJoCo, from the same states and with the same controls.

    Args:
        sim: a simulator at the start of an episode; it executes ``steps`` random actions.

    Keyword Args:
        steps: control steps. In every one, all that is compared is timed in turns; figures are medians.

    Returns:
        ``step_over_raw_exact``: a step over 25 x (2 mj_forward + mj_step); ``step_over_raw_fast``: a step with
        ``physics="fast"`` over 25 x (mj_forward + mj_step); ``step_ms_exact`` and ``step_ms_fast``;
        ``step_share_physics``, ``step_share_controller`` and ``step_share_python`` of an exact step. Physics are the
        bare calls; the controller's part includes the measurement of Jacobian and inertia.

    Raises:
        RuntimeError: the bare calls lead to another state than the exact step.
    """
    from wamrl_torchrl.envs.libero_control import ControlLoop  # starts OpenGL

    control, start = sim.control, _Start(sim)
    exact, fast = ControlLoop(sim.env), ControlLoop(sim.env, physics="fast")
    generator = np.random.default_rng(0)
    sim.step(generator.uniform(-1, 1, 7))  # the first one after a reset measures less
    seconds: dict[str, list[float]] = {name: [] for name in ("raw exact", "exact", "raw fast", "fast", "controller")}
    for _ in range(steps):
        action = generator.uniform(-1, 1, 7)
        start.save()
        sim.control = exact
        controls = _record_controls(sim, action)
        for forwards, name, sim.control in ((1, "fast", fast), (2, "exact", exact)):
            start.restore()
            seconds[f"raw {name}"].append(_time_raw(sim, controls, forwards))
            reached = sim.env.sim.data.qpos.copy()
            start.restore()
            seconds[name].append(_time_step(sim, action))
        if not np.array_equal(sim.env.sim.data.qpos, reached):
            raise RuntimeError("the bare calls of MuJoCo lead to another state than a step: they are other calls")
        seconds["controller"].append(_time_controller(exact, sim.env.robots[0].controller, len(controls)))
    sim.control = control
    medians = {name: median(values) for name, values in seconds.items()}
    physics, controller = medians["raw exact"] / medians["exact"], medians["controller"] / medians["exact"]
    return {
        "step_over_raw_exact": medians["exact"] / medians["raw exact"],
        "step_over_raw_fast": medians["fast"] / medians["raw fast"],
        "step_ms_exact": 1e3 * medians["exact"],
        "step_ms_fast": 1e3 * medians["fast"],
        "step_share_physics": physics,
        "step_share_controller": controller,
        "step_share_python": 1.0 - physics - controller,
    }


class _Start:
    """The state before a control step, to take it again: MuJoCo's, and the gripper's command."""

    def __init__(self, sim: LiberoSim) -> None:
        self._mujoco = sim.env.sim.model._model, sim.env.sim.data._data
        self._state = np.empty(mujoco.mj_stateSize(self._mujoco[0], EVERYTHING))
        self._gripper = sim.env.robots[0].gripper

    def save(self) -> None:
        mujoco.mj_getState(*self._mujoco, self._state, EVERYTHING)
        self._command = self._gripper.current_action

    def restore(self) -> None:
        mujoco.mj_setState(*self._mujoco, self._state, EVERYTHING)
        self._gripper.current_action = self._command


def _record_controls(sim: LiberoSim, action: np.ndarray) -> list[np.ndarray]:
    """Execute ``action``; the controls of its physics steps."""
    controls, mj_step = [], mujoco.mj_step

    def record(model: Any, data: Any) -> None:
        controls.append(data.ctrl.copy())
        mj_step(model, data)

    with mock.patch.object(mujoco, "mj_step", record):
        sim.step(action)
    return controls


def _time_raw(sim: LiberoSim, controls: list[np.ndarray], forwards: int) -> float:
    model, data = sim.env.sim.model._model, sim.env.sim.data._data
    ctrl, began = data.ctrl, time.perf_counter()
    for control in controls:
        for _ in range(forwards):
            mujoco.mj_forward(model, data)
        ctrl[:] = control
        mujoco.mj_step(model, data)
    return time.perf_counter() - began


def _time_step(sim: LiberoSim, action: np.ndarray) -> float:
    began = time.perf_counter()
    sim.step(action)
    return time.perf_counter() - began


def _time_controller(loop: Any, controller: Any, times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        loop.actuate(controller, loop.measure())
    return time.perf_counter() - began


def main() -> None:
    """Measure on task 0 of libero_spatial."""
    os.environ |= worker_environment()
    from wamrl_torchrl.envs.libero_sim import LiberoSim

    tasks = load_suite("libero_spatial")
    sim = LiberoSim(resize="render224")
    bddl_file, state = tasks.bddl_files[0], tasks.init_states[0][0]
    sim.reset(bddl_file=bddl_file, env_seed=0, state=state, settle_steps=10, resume=False)
    print(json.dumps({name: round(value, 3) for name, value in step_ratios(sim).items()}))
    sim.close()


if __name__ == "__main__":
    main()
