"""A scripted expert for LIBERO: it follows the waypoints of a script through the same seven numbers as a policy.

Runs inside a worker and sees the simulator's true poses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.spatial.transform import Rotation

from wamrl_torchrl.envs.libero_scripts import LEVEL, Move, Scene, draw_variation, rotation_between, script

METRES, RADIANS = 0.05, 0.5  # what an action of 1 asks of the controller
GAIN = 2.0  # of which it covers about half in one step
STILL, STILL_TURN = 0.001, 0.01  # metres, radians in a step: a hand that is slower, though not there, is blocked
STALL_STEPS = 60  # as is one that has been on its way for so long
STEADY, TURNED = 0.02, 0.1  # radians: no turn is asked for; a waypoint is met

NOISE_MEMORY = 0.8  # correlation of the noise between two actions
NOISE_AT_CONTACT = 0.3  # factor on the noise where it would only spoil the demonstration


class WaypointExpert:
    """The expert for one episode.

    Args:
        env: the robosuite environment, just reset.

    Keyword Args:
        variation: size of the random variation of grasp, approach and place; 0 is none, 1 has the sizes of
            :data:`wamrl_torchrl.envs.libero_scripts.SIZES`.
        seed: integers that the variation depends on.
    """

    def __init__(self, env: Any, *, variation: float = 0.0, seed: list[int] | None = None) -> None:
        self._scene = Scene(env)
        self._start = self._scene.hand_axes
        generator = np.random.default_rng([*(seed or []), 1])  # not the noise's
        (goal,) = env.parsed_problem["goal_state"]
        self._script = script(self._scene, goal, draw_variation(variation, generator))
        self._enter(next(self._script))

    @property
    def in_contact(self) -> bool:
        """Whether the fingers touch something or are about to."""
        return self._move.contact

    def _enter(self, move: Move) -> None:
        self._move, self._steps = move, 0
        self._last = self._scene.hand
        self._last_turn = self._turn()

    def _turn(self) -> np.ndarray:
        """From the hand's orientation to the wanted one, axis-angle."""
        return rotation_between(Rotation.from_rotvec(self._move.turn).as_matrix() @ self._start, self._scene.hand_axes)

    def action(self) -> np.ndarray:
        """The next action, float64 ``[7]``."""
        hand, turn = self._scene.hand, self._turn()
        if self._is_done(hand, turn):
            self._enter(next(self._script))
            turn = self._turn()
        self._steps += 1
        self._last, self._last_turn = hand, turn
        action = np.zeros(7)
        action[:3] = np.clip(GAIN / METRES * (self._move.position() - hand), -self._move.speed, self._move.speed)
        # The controller holds the last orientation that it was asked for: exactly the wanted one, at the end of a turn.
        if np.abs(turn).max() > STEADY:
            gain = GAIN if np.abs(turn).max() > TURNED else 1.0
            action[3:6] = np.clip(gain / RADIANS * turn, -1.0, 1.0)
        action[6] = self._move.gripper
        return action

    def _is_done(self, hand: np.ndarray, turn: np.ndarray) -> bool:
        move = self._move
        if move.steps is not None:
            return self._steps >= move.steps
        is_still = np.abs(hand - self._last).max() < STILL and np.abs(turn - self._last_turn).max() < STILL_TURN
        if self._steps >= STALL_STEPS or (self._steps >= 5 and is_still):
            return True
        error = np.abs(move.position() - hand)
        return bool(error[:2].max() < LEVEL and error[2] < move.near and np.abs(turn).max() < TURNED)


class ActionNoise:
    """Ornstein-Uhlenbeck noise on the position part of an action: the spread that recovery is learnt from.

    Args:
        scale: the standard deviation is drawn uniformly from 0 to ``scale``, in units of an action.
        seed: integers that the noise depends on.
    """

    def __init__(self, scale: float, seed: list[int]) -> None:
        self._generator = np.random.default_rng(seed)
        self._std = self._generator.uniform(0.0, scale)
        self._drift = self._std * self._generator.standard_normal(3)

    def __call__(self, action: np.ndarray, *, in_contact: bool) -> np.ndarray:
        """``action`` float64 ``[7]`` with noise, clipped to [-1, 1]; the noise moves on by one step."""
        noisy = action.copy()
        noisy[:3] += self._drift * (NOISE_AT_CONTACT if in_contact else 1.0)
        innovation = self._std * np.sqrt(1.0 - NOISE_MEMORY**2) * self._generator.standard_normal(3)
        self._drift = NOISE_MEMORY * self._drift + innovation
        return noisy.clip(-1.0, 1.0)
