"""A control step of LIBERO without robosuite's overhead.

robosuite runs its controller at every physics step (2 ms) and spends much of the time on looking up names, copying
arrays and updating observables. Here are the same operations in the same order, on the same memory layouts and with
the same BLAS and LAPACK, on arrays that are found once: states are robosuite's to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import mujoco
import numpy as np
from robosuite.controllers.osc import OperationalSpaceController
from robosuite.models.grippers.panda_gripper import PandaGripper
from robosuite.utils.control_utils import nullspace_torques, opspace_matrices, orientation_error
from robosuite.utils.numba import jit_decorator

Physics = Literal["exact", "fast"]
TIMESTEP = 0.002
SUBSTEPS = 25
#: Physics steps of a control step after which robosuite samples its observables, by its clock.
SNAPSHOT_AFTER = 24
#: Of the solver, in place of MuJoCo's 1e-8: a single solve is then closer to the converged one than robosuite's chain
#: of three, each of which starts from the result of the one before.
FAST_TOLERANCE = 1e-10


class Measured(NamedTuple):
    """What torques follow from; joints and inertia are those of the arm, Jacobians have all degrees of freedom."""

    ee_pos: np.ndarray  # [3], m
    ee_ori_mat: np.ndarray  # [3,3]
    ee_pos_vel: np.ndarray  # [3], m/s
    ee_ori_vel: np.ndarray  # [3], rad/s
    joint_pos: np.ndarray  # [7], rad
    joint_vel: np.ndarray  # [7], rad/s
    jacobian_pos: np.ndarray  # [3,nv]
    jacobian_ori: np.ndarray  # [3,nv]
    inertia: np.ndarray  # [7,7]


class ControlLoop:
    """The 25 physics steps of a control step, with operational space control of the arm and the gripper's ramp.

    What lasts from one control step to the next stays in robosuite's objects: after a reset of the robosuite
    environment, or ``env.step``, this loop goes on from there.

    Args:
        env: a robosuite environment as LIBERO's ``OffScreenRenderEnv`` builds it.

    Keyword Args:
        physics: ``"exact"`` makes robosuite's calls of MuJoCo, which solve the dynamics three times per physics step;
            states are equal to the bit. ``"fast"`` solves them once, when the torques are known, and with a smaller
            tolerance: the equations are the same, but contact forces, and so the states, agree to the solver's
            tolerance only.

    Raises:
        ValueError: robot, controller or time step are not LIBERO's own, or ``physics`` is unknown.
    """

    def __init__(self, env: Any, *, physics: Physics = "exact") -> None:
        if physics not in get_args(Physics):
            raise ValueError(f"physics must be 'exact' or 'fast', got {physics!r}")
        check_supported(env)
        self.physics = physics
        self._robot = robot = env.robots[0]
        self._model, self._data = model, data = env.sim.model._model, env.sim.data._data
        # Views of MuJoCo's own memory, which stays where it is as long as the model does.
        self._site = robot.eef_site_id
        self._arm = arm = _as_slice(robot._ref_joint_vel_indexes)
        joints = arm.stop - arm.start
        self._measured = Measured(
            ee_pos=data.site_xpos[self._site],
            ee_ori_mat=data.site_xmat[self._site].reshape(3, 3),
            ee_pos_vel=np.zeros(3),
            ee_ori_vel=np.zeros(3),
            joint_pos=data.qpos[_as_slice(robot._ref_joint_pos_indexes)],
            joint_vel=data.qvel[arm],
            jacobian_pos=np.zeros((3, model.nv)),
            jacobian_ori=np.zeros((3, model.nv)),
            inertia=np.zeros((joints, joints)),
        )
        self._qvel, self._qm, self._arm_bias = data.qvel, data.qM, data.qfrc_bias[arm]
        # MuJoCo's inertia is sparse: where it holds the arm's entries shows in the dense form of its own addresses.
        addresses = np.zeros((model.nv, model.nv))
        mujoco.mj_fullM(model, addresses, np.arange(model.nM, dtype=np.float64))
        self._inertia_addresses = addresses[arm, arm].astype(np.intp)
        self._arm_ctrl = data.ctrl[_as_slice(robot._ref_joint_actuator_indexes)]
        self._torque_limits = robot.torque_limits
        fingers = _as_slice(robot._ref_joint_gripper_actuator_indexes)
        self._gripper_ctrl = data.ctrl[fingers]
        low, high = model.actuator_ctrlrange[fingers].T
        self._gripper_bias, self._gripper_weight = 0.5 * (high + low), 0.5 * (high - low)
        self._force, self._torque, self._wrench = np.zeros(3), np.zeros(3), np.zeros(6)
        self._jacobian, self._null_torques = np.zeros((6, joints), order="F"), np.zeros(joints)

    def step(self, action: np.ndarray, take_snapshot: Callable[[np.ndarray], None]) -> None:
        """Advance the simulation by 50 ms.

        Args:
            action: float64 ``[7]``.
            take_snapshot: called when robosuite samples its observables, with the qpos float64 ``[nq]`` that poses in
                MuJoCo's data belong to then: they lag behind its own qpos by a physics step.
        """
        model, data, exact = self._model, self._data, self.physics == "exact"
        controller, gripper = self._robot.controller, self._robot.gripper
        tolerance = model.opt.tolerance
        if not exact:
            model.opt.tolerance = FAST_TOLERANCE
        change = np.array([-1.0, 1.0]) * gripper.speed * np.sign(action[6:])
        commands = _gripper_ramp(gripper.current_action, change)
        gripper_ctrl = self._gripper_bias + self._gripper_weight * commands
        for substep in range(SUBSTEPS):
            if exact:
                mujoco.mj_forward(model, data)
                if controller.new_update:  # once more, by the controller: it moves the solver's next guess
                    mujoco.mj_forward(model, data)
            else:
                mujoco.mj_step1(model, data)
            # The first torques after a reset follow from what the controller measured there.
            measured = self.measure() if controller.new_update else self._held_by(controller)
            if substep == 0:
                controller.ee_pos, controller.ee_ori_mat = measured.ee_pos.copy(), measured.ee_ori_mat.copy()
                controller.new_update = False  # or it would measure again
                controller.set_goal(action[:6])
            controller.new_update = True
            self.actuate(controller, measured)
            self._gripper_ctrl[:] = gripper_ctrl[substep]
            posed_qpos = data.qpos.copy() if substep + 1 == SNAPSHOT_AFTER else None
            if exact:
                mujoco.mj_step(model, data)
            else:
                mujoco.mj_step2(model, data)
            if posed_qpos is not None:
                take_snapshot(posed_qpos)
        gripper.current_action = commands[-1]
        model.opt.tolerance = tolerance

    def measure(self) -> Measured:
        """``Controller.update``, after the forward dynamics; valid until the simulation is advanced."""
        now = self._measured
        mujoco.mj_jacSite(self._model, self._data, now.jacobian_pos, now.jacobian_ori, self._site)
        np.dot(now.jacobian_pos, self._qvel, out=now.ee_pos_vel)
        np.dot(now.jacobian_ori, self._qvel, out=now.ee_ori_vel)
        np.take(self._qm, self._inertia_addresses, out=now.inertia, mode="clip")  # the mode without a buffer
        return now

    def _held_by(self, controller: Any) -> Measured:
        """What ``controller`` measured last; only the arm's part of the Jacobians is known, and read."""
        held, arm = self._measured, self._arm
        held.jacobian_pos[:, arm], held.jacobian_ori[:, arm] = controller.J_pos, controller.J_ori
        held.inertia[:] = controller.mass_matrix
        small = Measured._fields[:6]
        return held._replace(**{name: getattr(controller, name) for name in small})

    def actuate(self, controller: Any, measured: Measured) -> None:
        """``OperationalSpaceController.run_controller``, and its torques (N m) as the arm's controls."""
        lambda_pos, lambda_ori = _operational_space(
            *measured,
            self._arm.start,
            controller.goal_pos,
            controller.goal_ori,
            controller.kp,
            controller.kd,
            controller.initial_joint,
            self._force,
            self._torque,
            self._jacobian,
            self._null_torques,
        )
        # These products are numpy's in robosuite too, and the BLAS of compiled code may round differently.
        wrench = self._wrench
        np.dot(lambda_pos, self._force, out=wrench[:3])
        np.dot(lambda_ori, self._torque, out=wrench[3:])
        torques = np.dot(self._jacobian.T, wrench)
        _write_clipped_sum(self._arm_ctrl, torques, self._arm_bias, self._null_torques, *self._torque_limits)


@jit_decorator
def _gripper_ramp(command, change):
    """Commands ``[25,2]`` of a control step: ``PandaGripper.format_action`` at every physics step."""
    commands = np.empty((SUBSTEPS, 2))
    for substep in range(SUBSTEPS):
        command = np.minimum(np.maximum(command + change, -1.0), 1.0)
        commands[substep] = command
    return commands


@jit_decorator
def _write_clipped_sum(out, a, b, c, low, high):
    out[:] = np.minimum(np.maximum(a + b + c, low), high)


@jit_decorator
def _operational_space(
    ee_pos, ee_ori, ee_vel, ee_turn, joint_pos, joint_vel, jacobian_pos, jacobian_ori, inertia, arm,
    goal_pos, goal_ori, kp, kd, initial_joint, force, torque, jacobian, null_torques,
):  # fmt: skip
    """Write force, torque, the arm's Jacobian ``[6,7]`` and torques that keep the posture into the last four arguments.

    Returns:
        The inertias that force and torque meet, float64 ``[3,3]``.
    """
    joints = len(joint_pos)
    # Column by column, as robosuite's indexing leaves them: BLAS rounds differently for another memory layout.
    arm_pos, arm_ori, mass = np.empty((joints, 3)).T, np.empty((joints, 3)).T, np.empty((joints, joints)).T
    arm_pos[:] = jacobian_pos[:, arm : arm + joints]
    arm_ori[:] = jacobian_ori[:, arm : arm + joints]
    jacobian[:3] = arm_pos
    jacobian[3:] = arm_ori
    mass[:] = inertia
    force[:] = (goal_pos - ee_pos) * kp[:3] + -ee_vel * kd[:3]
    torque[:] = orientation_error(goal_ori, ee_ori) * kp[3:] + -ee_turn * kd[3:]
    _, lambda_pos, lambda_ori, nullspace = opspace_matrices(mass, jacobian, arm_pos, arm_ori)
    null_torques[:] = nullspace_torques(mass, nullspace, initial_joint, joint_pos, joint_vel)
    return lambda_pos, lambda_ori


def check_supported(env: Any) -> None:
    """Refuse an environment for which :class:`ControlLoop` would compute something else than robosuite.

    Raises:
        ValueError: names what was expected and what was found.
    """
    if len(env.robots) != 1:
        raise ValueError(f"expected one robot, found {len(env.robots)}")
    robot, controller = env.robots[0], env.robots[0].controller
    if type(controller) is not OperationalSpaceController:
        raise ValueError(f"expected the controller OSC_POSE, found {type(controller).__name__}")
    expected_and_found = {
        "controller.impedance_mode": ("fixed", controller.impedance_mode),
        "controller.use_ori": (True, controller.use_ori),
        "controller.use_delta": (True, controller.use_delta),
        "controller.uncoupling": (True, controller.uncoupling),
        "controller.interpolator_pos": (None, controller.interpolator_pos),
        "controller.interpolator_ori": (None, controller.interpolator_ori),
        "gripper": (PandaGripper, type(robot.gripper)),
        "env.model_timestep": (TIMESTEP, env.model_timestep),
        "model.opt.timestep": (TIMESTEP, env.sim.model.opt.timestep),
        "model.opt.integrator": (mujoco.mjtIntegrator.mjINT_EULER, env.sim.model.opt.integrator),
        "physics steps per control step": (SUBSTEPS, int(env.control_timestep / env.model_timestep)),
    }
    for name, (expected, found) in expected_and_found.items():
        if found != expected:
            raise ValueError(
                f"a step of this environment would not be LIBERO's: expected {name} {expected!r}, found {found!r}"
            )


def _as_slice(indexes: Sequence[int]) -> slice:
    """The same elements as a slice, which gives a view."""
    start, stop = int(indexes[0]), int(indexes[0]) + len(indexes)
    if list(indexes) != list(range(start, stop)):
        raise ValueError(f"expected consecutive indexes of joints and actuators, found {list(map(int, indexes))}")
    return slice(start, stop)
