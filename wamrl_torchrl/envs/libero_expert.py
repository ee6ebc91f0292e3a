"""A scripted expert for the pick-and-place suites of LIBERO. Runs inside a worker and sees the simulator's true poses.

It acts through the same seven numbers as a policy, goes from waypoint to waypoint, and tries again when the object has
not come along.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from scipy.spatial.transform import Rotation

UP = np.array([0.0, 0.0, 1.0])
METRES, RADIANS = 0.05, 0.5  # what an action of 1 asks of the controller
GAIN = 2.0  # of which it covers about half in one step
HOVER, LIFT = 0.12, 0.18  # metres above the grasp
CLOSE_STEPS, RELEASE_STEPS = 8, 10
STILL = 0.001  # metres in a step: a hand that is slower, though not there, is blocked by a contact
STALL_STEPS = 60  # as is one that has been on its way for so long
LOST = 0.08  # metres: an object so far below the hand after a lift has stayed behind; a bowl sags by 3 cm

#: Where to hold what is not held at its centre, metres: the can beside the cream cheese is in the way of a finger.
OFFSETS = {"cream_cheese_1": (-0.02, 0.0, 0.0)}
# A bowl is held by its rim, where the wall fits between the fingers. Which side of the rim: the angle from the bowl's
# centre, 0 along x (away from the robot's base); the fingers open along y, so 0 needs a quarter turn of the hand.
RIM_RADIUS, RIM_HEIGHT = 0.045, 0.02
RIM_ANGLE = -np.pi / 2
RIM_ANGLES = {"next_to_the_cookie_box": np.pi / 2, "in_the_top_drawer": 0.0}  # elsewhere fingers or hand hit something

NOISE_MEMORY = 0.8  # correlation of the noise between two actions
NOISE_AT_CONTACT = 0.3  # factor on the noise where it would only spoil the demonstration


class Phase(IntEnum):
    """Waypoints in their order."""

    HOVER = 0
    DESCEND = 1
    CLOSE = 2
    LIFT = 3
    CARRY = 4
    LOWER = 5
    RELEASE = 6


class WaypointExpert:
    """The expert for one episode.

    Args:
        env: the robosuite environment, just reset.

    Raises:
        ValueError: the goal is not to put one object on, or into, another.
    """

    def __init__(self, env: Any) -> None:
        goal = env.parsed_problem["goal_state"]
        if len(goal) != 1 or goal[0][0] not in ("on", "in"):
            raise ValueError(f"the scripted expert puts one object on or into another, but the goal is {goal}")
        relation, item, place = goal[0]
        self._env = env
        self._item = env.obj_body_id[item]
        # A region is named after the object that it belongs to.
        self._place = env.obj_body_id[place.removesuffix("_contain_region")]
        self._release_height = 0.10 if relation == "in" else 0.005
        self._grasp, self._turn = np.array(OFFSETS.get(item, (0.0, 0.0, 0.0))), 0.0
        if "bowl" in item:
            angle = next((a for part, a in RIM_ANGLES.items() if part in env.bddl_file_name), RIM_ANGLE)
            self._grasp = np.array([RIM_RADIUS * np.cos(angle), RIM_RADIUS * np.sin(angle), RIM_HEIGHT])
            self._turn = 0.0 if angle else -np.pi / 2
        self._orientation = Rotation.from_rotvec(self._turn * UP).as_matrix() @ self._hand_orientation()
        self._enter(Phase.HOVER, *self._positions()[:2])

    def _hand_orientation(self) -> np.ndarray:
        return self._env.sim.data.site_xmat[self._env.robots[0].eef_site_id].reshape(3, 3)

    def _positions(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        data = self._env.sim.data
        hand = data.site_xpos[self._env.robots[0].eef_site_id]
        return hand.copy(), data.body_xpos[self._item].copy(), data.body_xpos[self._place].copy()

    @property
    def in_contact(self) -> bool:
        """Whether the fingers touch something or are about to."""
        return self._phase not in (Phase.HOVER, Phase.LIFT, Phase.CARRY)

    def action(self) -> np.ndarray:
        """The next action, float64 ``[7]``."""
        hand, item, place = self._positions()
        rotation = self._rotation_error()
        if self._is_done(hand, self._target(item, place) - hand, rotation):
            lost = self._phase == Phase.LIFT and (hand - item - self._hold)[2] > LOST
            self._enter(Phase.HOVER if lost else Phase((self._phase + 1) % len(Phase)), hand, item)
        self._steps += 1
        self._last = hand
        action = np.zeros(7)
        action[:3] = np.clip(GAIN / METRES * (self._target(item, place) - hand), -1.0, 1.0)
        if (
            self._turn
        ):  # the controller holds the orientation of the start by itself, as long as it is asked for no other
            action[3:6] = np.clip(GAIN / RADIANS * rotation, -1.0, 1.0)
        action[6] = 1.0 if Phase.CLOSE <= self._phase <= Phase.LOWER else -1.0
        return action

    def _rotation_error(self) -> np.ndarray:
        """From the hand's orientation to the wanted one, axis-angle."""
        return Rotation.from_matrix(self._orientation @ self._hand_orientation().T).as_rotvec()

    def _enter(self, phase: Phase, hand: np.ndarray, item: np.ndarray) -> None:
        self._phase, self._steps = phase, 0
        self._anchor, self._hold, self._last = hand, hand - item, hand

    def _target(self, item: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Where the hand should be in this phase."""
        if self._phase == Phase.HOVER:
            return item + self._grasp + HOVER * UP
        if self._phase == Phase.DESCEND:
            return item + self._grasp
        if self._phase == Phase.LIFT:
            return self._anchor + LIFT * UP
        if self._phase == Phase.CARRY:
            return np.append((place + self._hold)[:2], self._anchor[2])
        if self._phase == Phase.LOWER:
            return place + self._hold + self._release_height * UP
        return self._anchor

    def _is_done(self, hand: np.ndarray, error: np.ndarray, rotation: np.ndarray) -> bool:
        if self._phase in (Phase.CLOSE, Phase.RELEASE):
            return self._steps >= (CLOSE_STEPS if self._phase == Phase.CLOSE else RELEASE_STEPS)
        if self._steps >= STALL_STEPS or (self._steps >= 5 and np.abs(hand - self._last).max() < STILL):
            return True
        level, height = np.abs(error[:2]).max(), abs(error[2])
        if self._phase == Phase.HOVER:
            return level < 0.01 and height < 0.03 and (not self._turn or np.abs(rotation).max() < 0.1)
        if self._phase == Phase.LIFT:
            return height < 0.02
        if self._phase == Phase.CARRY:
            return level < 0.01
        return level < 0.01 and height < 0.005


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
