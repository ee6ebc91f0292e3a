"""One LIBERO simulator: what runs inside a worker process. Imports no torch, which halves a worker's start.

States and frames are bit-equal to those of ``OffScreenRenderEnv`` with a hard reset; the work is not. Frames are
rendered only when asked for (in software a frame costs ten times a control step), other observables are off, and a
reset keeps the compiled model (0.02 s instead of 2 s). A control step leaves out robosuite's Python
(:mod:`~wamrl_torchrl.envs.libero_control`).
"""

from __future__ import annotations

import contextlib
import gc
import io
from collections import deque
from typing import Any, Literal, NamedTuple

import mujoco
import numpy as np
import robosuite.utils.transform_utils as transforms
from PIL import Image
from robosuite.utils.binding_utils import GLContext
from robosuite.utils.errors import RandomizationError

from wamrl_torchrl.envs.libero_control import ControlLoop, Physics
from wamrl_torchrl.envs.libero_install import simulator_class
from wamrl_torchrl.envs.libero_suites import COMMANDS

ControlEnv = simulator_class()
CAMERAS = ("agentview", "robot0_eye_in_hand")
IMAGE_SIZE = 224
NO_OP = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])
PLACEMENT_ATTEMPTS = 100
#: What a picture depends on, beside the model and the alphas of the visual sites (a stove that is on).
POSES = ("geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "cam_xpos", "cam_xmat", "light_xpos", "light_xdir")
Resize = Literal["render256", "render224"]


class Draw(NamedTuple):
    """A camera's picture that is to be drawn."""

    camera_id: int
    poses: dict[str, np.ndarray]
    alphas: np.ndarray  # of the visual sites
    out: np.ndarray  # uint8 [3,224,224]


def _flush() -> None:
    """Let a GPU begin with what it was asked to draw, instead of when the picture is read."""
    from OpenGL import GL  # here: a simulator without pictures needs no OpenGL

    with contextlib.suppress(GL.GLError):  # flushing itself has no errors; one that shows here is an older one's
        GL.glFlush()


class LiberoSim:
    """A simulator that holds the model of one task at a time.

    Keyword Args:
        resize: ``"render256"`` renders at 256 and resizes to 224 bilinearly with antialiasing, as the released model
            saw its frames; ``"render224"`` renders at 224.
        physics: see :class:`~wamrl_torchrl.envs.libero_control.ControlLoop`.
        images: make an OpenGL context; without, nothing can be rendered.
    """

    def __init__(self, *, resize: Resize, physics: Physics = "exact", images: bool = True) -> None:
        self._physics, self._images = physics, images
        self._render_size = 256 if resize == "render256" else IMAGE_SIZE
        self._bddl_file: str | None = None
        self._wrapper: Any = None
        self._draws: deque[Draw] = deque()  # the first is being drawn

    @staticmethod
    def check_gl() -> None:
        """Create and free an OpenGL context: a machine without one should say so before any model is compiled."""
        context = GLContext(max_width=64, max_height=64)
        context.make_current()
        context.free()

    @property
    def env(self) -> Any:
        """The robosuite environment of the current task."""
        return self._wrapper.env

    def load(self, bddl_file: str) -> None:
        """Build the model of a task, unless it is the current one. Takes seconds."""
        if bddl_file == self._bddl_file:
            return
        self.close()
        # robosuite prints through every constructor.
        with contextlib.redirect_stdout(io.StringIO()):
            self._wrapper = ControlEnv(
                bddl_file_name=bddl_file,
                use_camera_obs=False,
                has_offscreen_renderer=self._images,
                hard_reset=False,
                ignore_done=True,  # robosuite's own horizon counts settling and knows nothing of ours
            )
        self._bddl_file = bddl_file
        # What a freshly compiled model is before anything is placed: a reset goes back to it.
        fresh = mujoco.MjModel.from_xml_string(self.env.model.get_xml())
        data = mujoco.MjData(fresh)
        for _ in range(2):  # robosuite does so once for the simulation and once for the render context
            mujoco.mj_forward(fresh, data)
        self._fresh = fresh.body_pos.copy(), fresh.body_quat.copy(), data.qacc_warmstart.copy()
        model = self.env.sim.model
        self._camera_ids = [model.camera_name2id(name) for name in CAMERAS]
        self._flat_size = 1 + model.nq + model.nv
        self._fresh_site_rgba = fresh.site_rgba.copy()
        self._visual_sites = [
            model.site_name2id(site)
            for name in self.env.visualization_sites_list
            for site, _ in self.env.get_object(name).object_properties["vis_site_names"].values()
        ]
        self.env._observables = {}
        self.control = ControlLoop(self.env, physics=self._physics)

    def _take_snapshot(self, posed_qpos: np.ndarray) -> None:
        """Keep what an observation shows: robosuite samples it 2 ms before the end of a control step.

        Args:
            posed_qpos: float64 ``[nq]``, the qpos that the poses in MuJoCo's data belong to.
        """
        robot, data = self.env.robots[0], self.env.sim.data
        quaternion = transforms.convert_quat(data.get_body_xquat(robot.robot_model.eef_name), to="xyzw")
        eef_pos, fingers = data.site_xpos[robot.eef_site_id], data.qpos[robot._ref_gripper_joint_pos_indexes]
        self._state = np.concatenate([eef_pos, transforms.quat2axisangle(quaternion), fingers])
        self._poses = self._copy_poses()
        self._alphas = self.env.sim.model.site_rgba[self._visual_sites, 3]
        self._picture_qpos = posed_qpos

    def close(self) -> None:
        """Drop the model and its OpenGL context."""
        if self._wrapper is None:
            return
        self._draws.clear()
        self._wrapper.close()
        self._wrapper = self._bddl_file = None
        # Simulator and render context refer to each other. The old context must be gone before a new one is made: freed
        # later, it would free the objects of the new one.
        gc.collect()

    def reset(self, *, bddl_file: str, env_seed: int, state: np.ndarray, settle_steps: int, resume: bool) -> None:
        """Start an episode, bit-equal to one in a freshly built simulator.

        Args:
            bddl_file: the task.
            env_seed: draws the poses of the fixtures, which ``state`` does not hold.
            state: float64 ``[n]`` (time, qpos, qvel), optionally followed by what else :meth:`write_sim_state` wrote.
            settle_steps: no-op actions before the episode.
            resume: ``state`` is from the middle of an episode.
        """
        self.load(bddl_file)
        self.env.seed(env_seed)
        self._place_objects()
        sim, n = self.env.sim, self._flat_size
        # The ramp of the gripper is not part of MuJoCo's state; an init state starts it in the middle.
        commands = np.zeros(COMMANDS)
        commands[: len(state) - n] = state[n : n + COMMANDS]
        self.env.robots[0].gripper.current_action = commands[:2]
        sim.set_state_from_flattened(state[:n])
        sim.forward()
        if resume:
            # The controller still believes the arm where the reset put it, and would jerk it back there. Init states
            # are close to that pose, and robosuite does not care.
            controller, goal_ori = self.env.robots[0].controller, commands[2:].reshape(3, 3)
            controller.update(force=True)
            # An action that does not turn the hand keeps the orientation that the last one aimed at.
            controller.goal_ori = goal_ori if goal_ori.any() else controller.ee_ori_mat.copy()
        self.env._check_success()
        self.env._post_process()
        self._take_snapshot(sim.data.qpos.copy())
        for _ in range(settle_steps):
            self.step(NO_OP)

    def _place_objects(self) -> None:
        """What ``env.reset`` does with a freshly compiled model, to the bit, with the model that is there.

        Left over from the last episode would be the poses of the fixtures and the solver's warm start: a difference of
        1e-14 in the first state, and of pixels later.
        """
        env, (body_pos, body_quat, warm_start) = self.env, self._fresh
        for _ in range(PLACEMENT_ATTEMPTS):
            env.sim.reset()
            env.sim.model.body_pos[:], env.sim.model.body_quat[:] = body_pos, body_quat
            env.sim.model.site_rgba[:] = self._fresh_site_rgba
            env.sim.data.qacc_warmstart[:] = warm_start
            with contextlib.suppress(RandomizationError):
                env._reset_internal()
                env.sim.forward()
                env.visualize(dict.fromkeys(env._visualizations, False))
                return
        raise RuntimeError(f"no valid placement of the objects in {PLACEMENT_ATTEMPTS} attempts")

    def step(self, action: np.ndarray) -> bool:
        """Execute one action (float ``[7]``) for 50 ms of simulated time; whether the task is solved."""
        self.control.step(np.asarray(action, dtype=np.float64), self._take_snapshot)
        # As robosuite and LIBERO do after a step; both may switch the lights of a stove.
        self.env._post_action(action)
        return bool(self.env._check_success())

    # ---- pictures -----------------------------------------------------------------------------------------------
    def write_image(self, out: np.ndarray) -> None:
        """Render both cameras, rotated by 180 degrees, side by side into ``out`` uint8 ``[3,224,448]``."""
        self.start_image(out)
        self.finish_images()

    def start_image(self, out: np.ndarray) -> None:
        """Have the last observation drawn into ``out`` while the simulation goes on.

        A GPU that serves many processes lets each wait for its pictures longer than a control step takes. Call
        :meth:`advance_images` after every control step, which is when a camera's picture is fetched and the next
        camera's begun, and :meth:`finish_images` before ``out`` is read.
        """
        self.finish_images()
        for index, camera_id in enumerate(self._camera_ids):
            part = out[:, :, index * IMAGE_SIZE : (index + 1) * IMAGE_SIZE]
            self._draws.append(Draw(camera_id, self._poses, self._alphas, part))
        self._start_draw()

    def advance_images(self) -> None:
        """Fetch the camera picture that is being drawn, if one is, and begin the next."""
        if self._draws:
            self._finish_draw()
            self._start_draw()

    def finish_images(self) -> None:
        """Wait for all pictures that were started."""
        while self._draws:
            self.advance_images()

    def _start_draw(self) -> None:
        """Begin the first of the draws."""
        if not self._draws:
            return
        draw, context, size = self._draws[0], self.env.sim._render_context_offscreen, self._render_size
        site_rgba = self.env.sim.model.site_rgba
        now, now_alphas = self._copy_poses(), site_rgba[self._visual_sites, 3]
        self._set_poses(draw.poses)
        site_rgba[self._visual_sites, 3] = draw.alphas
        context.render(size, size, camera_id=draw.camera_id)
        self._set_poses(now)
        site_rgba[self._visual_sites, 3] = now_alphas
        _flush()

    def _finish_draw(self) -> None:
        """Read what the first of the draws has drawn."""
        draw, size = self._draws.popleft(), self._render_size
        # OpenGL's rows run bottom-up; the data sets store them so, and the policies turn them by 180 degrees.
        picture = self.env.sim._render_context_offscreen.read_pixels(size, size)[::-1, ::-1]
        if size != IMAGE_SIZE:
            resized = Image.fromarray(picture).resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR)
            picture = np.asarray(resized)
        draw.out[:] = picture.transpose(2, 0, 1)

    def _copy_poses(self) -> dict[str, np.ndarray]:
        data = self.env.sim.data._data
        return {name: getattr(data, name).copy() for name in POSES}

    def _set_poses(self, poses: dict[str, np.ndarray]) -> None:
        for name, value in poses.items():
            getattr(self.env.sim.data._data, name)[:] = value

    def render(self, *, bddl_file: str, env_seed: int, sim_states: np.ndarray) -> np.ndarray:
        """Draw states of an episode, bit-equal to its live pictures; the episode that was running is lost.

        Args:
            bddl_file: the episode's task.
            env_seed: the episode's; it places the fixtures.
            sim_states: float64 ``[T,D]``, as :meth:`write_sim_state` wrote them.

        Returns:
            uint8 ``[T,3,224,448]``.
        """
        self.load(bddl_file)
        self.env.seed(env_seed)
        self._place_objects()
        model, data = self.env.sim.model._model, self.env.sim.data._data
        start = self._flat_size + COMMANDS
        stop = start + model.nq
        frames = np.empty((len(sim_states), 3, IMAGE_SIZE, 2 * IMAGE_SIZE), dtype=np.uint8)
        for row, frame in zip(sim_states, frames, strict=True):
            data.qpos[:] = row[start:stop]
            mujoco.mj_kinematics(model, data)
            mujoco.mj_comPos(model, data)  # cameras and lights may follow a centre of mass
            mujoco.mj_camlight(model, data)
            self._poses, self._alphas = self._copy_poses(), row[stop : stop + len(self._visual_sites)]
            self.write_image(frame)
        return frames

    # ---- states -------------------------------------------------------------------------------------------------
    def write_state(self, out: np.ndarray) -> None:
        """Write end-effector position (m), axis-angle (rad) and finger positions (m) into ``out`` float32 ``[8]``."""
        out[:] = self._state

    def write_sim_state(self, out: np.ndarray) -> None:
        """Write a stored state into ``out`` float64 ``[D]``.

        It holds time, qpos and qvel; what the robot was last told, the gripper command (2) and the orientation of the
        hand that the controller aims at (9); and what the picture shows, qpos at its moment, a physics step or two
        earlier, and the alphas of the visual sites. Zeros follow.
        """
        n, robot = self._flat_size, self.env.robots[0]
        out[:n] = self.env.sim.get_state().flatten()
        out[n : n + 2], out[n + 2 : n + COMMANDS] = robot.gripper.current_action, robot.controller.goal_ori.ravel()
        pictured = np.concatenate((self._picture_qpos, self._alphas))
        out[n + COMMANDS : n + COMMANDS + len(pictured)] = pictured
        out[n + COMMANDS + len(pictured) :] = 0.0
