"""What the scripted expert of LIBERO does: one generator of waypoints for each kind of task.

All lengths are metres, all angles radians, all positions the simulator's true ones in the world's axes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.spatial.transform import Rotation

from wamrl_torchrl.envs import libero_grasps as grasps

UP = np.array([0.0, 0.0, 1.0])
OPEN, CLOSED = -1.0, 1.0
HOVER, LIFT = 0.12, 0.18  # above the grasp
CLEARANCE = 0.08  # below an object that is carried over the place where it is to stand
CLOSE_STEPS, RELEASE_STEPS = 8, 10
LOST = 0.08  # an object so far below the hand after a lift has stayed behind; a bowl sags by 3 cm
LEVEL = 0.01  # how close a waypoint is to be met in the plane
DROP = 0.03  # above the middle of a container, where an object is let go
PRESS = 0.005  # above the origin of the object that it is put on, where an object is let go, if it gets so far
SINK = 0.01  # below the site of a region, likewise
FRONT = np.radians(80)  # tilt of the hand that takes a drawer's bar from the front
BAR_REACH, PULL = 0.005, 0.19  # how far short of the bar's middle the grip stays; how far it is pulled
KNOB, KNOB_TURN = 0.035, 1.0  # grip above the knob's origin; how far it is turned
REGION_DEPTH = 0.05  # from a region's site to the middle of where LIBERO looks for what is on it


class Variation(NamedTuple):
    """How a demonstration differs from the plain one; all are uniform in +- the sizes of :data:`SIZES`."""

    along: float  # of the grasp, along the fingers' thickness
    height: float  # of the grasp
    yaw: float  # of the grasp
    hover: np.ndarray  # of the waypoint above the grasp, [3]
    lift: float  # of the height of the lift
    place: np.ndarray  # of the place, [2]


SIZES = Variation(0.006, 0.003, 0.12, np.array([0.03, 0.03, 0.03]), 0.03, np.array([0.006, 0.006]))


def draw_variation(scale: float, generator: np.random.Generator) -> Variation:
    """Draw a variation; ``scale`` 0 is none, 1 has the sizes of :data:`SIZES`."""
    return Variation._make(scale * size * generator.uniform(-1.0, 1.0, np.shape(size)) for size in SIZES)


NO_VARIATION = Variation._make(0.0 * size for size in SIZES)


@dataclass
class Move:
    """A waypoint of the hand."""

    target: np.ndarray | Callable[[], np.ndarray]  # position [3]; or asked in every step, as objects may move
    gripper: float
    turn: np.ndarray  # rotation from the start's orientation of the hand, axis-angle [3]
    near: float = np.inf  # tolerance in height, metres; in the plane it is LEVEL
    steps: int | None = None  # exactly so many, wherever the hand is
    speed: float = 1.0  # largest position action
    contact: bool = True  # whether fingers touch something, or are about to: noise would only spoil it

    def position(self) -> np.ndarray:
        """Where the hand should be, ``[3]``."""
        return self.target() if callable(self.target) else self.target


class Scene:
    """Names to positions, in a LIBERO environment."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self._grip = env.robots[0].eef_site_id

    @property
    def hand(self) -> np.ndarray:
        """The grip, between the finger tips."""
        return self.env.sim.data.site_xpos[self._grip].copy()

    @property
    def hand_axes(self) -> np.ndarray:
        """Orientation of the hand, ``[3,3]``."""
        return self.env.sim.data.site_xmat[self._grip].reshape(3, 3).copy()

    def position(self, name: str) -> np.ndarray:
        """Origin of an object, a fixture or a region."""
        return np.array(self.env.object_states_dict[name].get_geom_state()["pos"])

    def follow(self, name: str, offset: np.ndarray) -> Callable[[], np.ndarray]:
        """A target ``offset`` from an object, wherever it moves."""
        return lambda: self.position(name) + offset

    def owner(self, name: str) -> str:
        """The object or fixture that a region belongs to; anything else is its own."""
        site = self.env.object_sites_dict.get(name)
        return name if site is None else site.parent_name

    def goal_position(self, relation: str, place: str) -> np.ndarray:
        """Where the origin of an object should be so that it is ``relation`` (on, in) ``place``."""
        if place not in self.env.object_sites_dict:
            return self.position(place) + PRESS * UP
        position = self.position(place)
        if relation == "in":
            return position + DROP * UP
        # LIBERO looks for the object along the site's third axis: straight up, or up the slope of the wine rack.
        axis = np.array(self.env.sim.data.get_site_xmat(place))[:, 2]
        return position + REGION_DEPTH * (axis - axis[2] * UP) - SINK * UP

    def follow_goal(self, relation: str, place: str, offset: np.ndarray) -> Callable[[], np.ndarray]:
        """A target ``offset`` from where an object should be."""
        return lambda: self.goal_position(relation, place) + offset

    def grasp(self, item: str, relation: str, place: str, attempt: int) -> grasps.Grasp:
        """Choose where to hold ``item``, with room for the hand where it is taken and where it is put."""
        box = grasps.boxes_of(self.env, [item])
        candidates = grasps.rim_grasps(box) if "bowl" in item or "plate" in item else grasps.side_grasps(box)
        if not candidates:
            raise ValueError(f"{item} is too wide for the hand")
        things = [name for name in self.env.obj_body_id if name not in (item, "main_table", "floor")]
        there = [name for name in things if name != self.owner(place)]
        shift = self.goal_position(relation, place) - self.position(item)
        return grasps.most_clear(
            candidates,
            [(grasps.boxes_of(self.env, things), np.zeros(3)), (grasps.boxes_of(self.env, there), shift)],
            skip=attempt,
        )


def reach(
    scene: Scene, relation: str, item: str, place: str, attempt: int, variation: Variation
) -> Generator[Move, None, np.ndarray]:
    """Take hold of ``item`` and return how the hand is turned."""
    chosen = scene.grasp(item, relation, place, attempt)
    along = np.array([np.cos(chosen.yaw), np.sin(chosen.yaw), 0.0])
    offset = chosen.position - scene.position(item) + variation.along * along + variation.height * UP
    turn = (chosen.yaw + variation.yaw) * UP
    above = scene.position(item) + offset + HOVER * UP + variation.hover
    if scene.hand[2] > above[2] + LIFT:  # something may stand between here and there
        yield Move(np.array([*above[:2], scene.hand[2]]), OPEN, turn, near=0.03, contact=False)
    yield Move(scene.follow(item, offset + HOVER * UP + variation.hover), OPEN, turn, near=0.03, contact=False)
    yield Move(scene.follow(item, offset), OPEN, turn, near=0.005)
    yield Move(scene.hand, CLOSED, turn, steps=CLOSE_STEPS)
    return turn


def pick_and_place(scene: Scene, relation: str, item: str, place: str, variation: Variation) -> Iterator[Move]:
    """Put ``item`` on, or into, ``place``; again and again, if need be."""
    attempt = 0
    while True:
        turn = yield from reach(scene, relation, item, place, attempt, variation)
        aside = np.append(variation.place, 0.0)
        anchor, hold = scene.hand, scene.hand - scene.position(item)
        height = max(anchor[2] + LIFT + variation.lift, scene.goal_position(relation, place)[2] + hold[2] + CLEARANCE)
        yield Move(np.array([*anchor[:2], height]), CLOSED, turn, near=0.02, contact=False)
        attempt += 1
        if (scene.hand - scene.position(item) - hold)[2] > LOST:
            variation = NO_VARIATION
            continue
        top = scene.hand
        across = scene.goal_position(relation, place) + aside + top - scene.position(item)
        yield Move(np.array([*across[:2], top[2]]), CLOSED, turn, contact=False)
        hold = aside + scene.hand - scene.position(item)
        yield Move(scene.follow_goal(relation, place, hold), CLOSED, turn, near=0.005)
        anchor = scene.hand
        yield Move(anchor, OPEN, turn, steps=RELEASE_STEPS)
        variation = NO_VARIATION
        yield Move(anchor + LIFT * UP, OPEN, turn, near=0.03, contact=False)


def open_drawer(scene: Scene, region: str, variation: Variation) -> Iterator[Move]:
    """Take the bar of a drawer from the front and pull it out."""
    site = scene.env.object_sites_dict[region]
    joint = scene.env.sim.model.joint_name2id(site.joints[0])
    model, data = scene.env.sim.model._model, scene.env.sim.data._data
    body = model.jnt_bodyid[joint]
    outward = -data.xaxis[joint]
    turn = FRONT * np.cross(UP, outward)
    pointing = np.cos(FRONT) * -UP - np.sin(FRONT) * outward
    before = 0.08 * outward + variation.hover
    sideways = variation.along * 3 * np.cross(outward, UP)

    def bar() -> np.ndarray:
        boxes = grasps.boxes_of_bodies(scene.env, [body])
        return boxes.center[np.argmax(boxes.center @ outward)] + sideways - BAR_REACH * pointing

    while True:
        yield Move(lambda: bar() + before + 0.04 * outward + 0.08 * UP, OPEN, turn, near=0.03, contact=False)
        yield Move(lambda: bar() + 0.08 * outward, OPEN, turn, near=0.01, contact=False)
        yield Move(bar, OPEN, turn, near=0.005)
        anchor = scene.hand
        yield Move(anchor, CLOSED, turn, steps=CLOSE_STEPS)
        yield Move(anchor + PULL * outward, CLOSED, turn, near=0.02, speed=0.6)
        anchor = scene.hand
        yield Move(anchor, OPEN, turn, steps=RELEASE_STEPS)
        yield Move(anchor + 0.06 * outward, OPEN, turn, near=0.02)


def turn_on(scene: Scene, fixture: str, variation: Variation) -> Iterator[Move]:
    """Take the ridge of a stove's knob and turn it."""
    joint = scene.env.sim.model.joint_name2id(scene.env.get_object(fixture).joints[0])
    model, data = scene.env.sim.model._model, scene.env.sim.data._data
    body = model.jnt_bodyid[joint]
    while True:
        across = data.xmat[body].reshape(3, 3)[:, 0]
        yaw = (np.arctan2(across[1], across[0]) + np.pi) % np.pi - np.pi / 2
        over = data.xpos[body] + (KNOB + variation.height) * UP
        turn, turned = (yaw + variation.yaw) * UP, (yaw + KNOB_TURN) * UP
        yield Move(over + HOVER * UP + variation.hover, OPEN, turn, near=0.03, contact=False)
        yield Move(over, OPEN, turn, near=0.005)
        yield Move(over, CLOSED, turn, steps=CLOSE_STEPS)
        yield Move(over, CLOSED, turned)
        yield Move(over, OPEN, turned, steps=RELEASE_STEPS)
        variation = NO_VARIATION


def slide(scene: Scene, item: str, place: str, variation: Variation) -> Iterator[Move]:
    """Draw a plate by its rim to ``place``, without lifting it."""
    attempt = 0
    while True:
        turn = yield from reach(scene, "on", item, place, attempt, variation)
        height = scene.hand[2]
        hold = scene.hand - scene.position(item) + np.append(variation.place, 0.0)
        end = (scene.position(place) + hold)[:2]
        yield Move(np.array([*end, height]), CLOSED, turn, near=0.02, speed=0.5)
        yield Move(scene.hand, OPEN, turn, steps=RELEASE_STEPS)
        yield Move(scene.hand + HOVER * UP, OPEN, turn, near=0.03, contact=False)
        attempt, variation = attempt + 1, NO_VARIATION


def script(scene: Scene, goal: tuple[str, ...], variation: Variation) -> Iterator[Move]:
    """The waypoints that reach a goal."""
    relation, item, *places = goal
    if relation == "open":
        yield from open_drawer(scene, item, variation)
    elif relation == "turnon":
        yield from turn_on(scene, item, variation)
    elif "plate" in item:
        yield from slide(scene, item, places[0], variation)
    else:
        yield from pick_and_place(scene, relation, item, places[0], variation)


def rotation_between(wanted: np.ndarray, axes: np.ndarray) -> np.ndarray:
    """From orientation ``axes`` to ``wanted`` (``[3,3]``), axis-angle ``[3]``."""
    return Rotation.from_matrix(wanted @ axes.T).as_rotvec()
