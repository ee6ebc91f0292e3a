"""Where the scripted expert of LIBERO takes hold of an object: chosen from the collision geometry, by clearance.

All poses are the simulator's, in metres and in the world's axes: x away from the robot, y to its left, z up. The hand
points down; at yaw 0, as it starts, its fingers open along y.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

ENOUGH = 0.015  # metres of clearance: more is not better
MAX_WIDTH = 0.072  # the fingers open to 8 cm
SQUARE = 0.001  # metres: square to the sides is what is not wider by this than the grasps next to it
FINGER_LENGTH = 0.05  # what stands higher above the grip touches the palm
RIM_DEPTH = 0.033  # of the grip below the upper edge of a bowl; a plate is less deep:
GROUND = 0.01  # of the grip above what a plate stands on
RIM_ANGLES = np.arange(16) * np.pi / 8
YAWS = np.arange(-7, 9) * np.pi / 16

#: Points on the open hand, relative to the grip: along the thickness of the fingers, along their opening, up.
HAND = np.array(
    [(t, s * o, h) for t in (-0.01, 0.01) for s in (-1, 1) for o in (0.045, 0.06) for h in (0.0, 0.02, 0.04)]
    + [(t, o, h) for t in (-0.03, 0.03) for o in (-0.1, -0.05, 0.0, 0.05, 0.1) for h in (0.07, 0.1, 0.13)]
)
APPROACH = (0.0, 0.04, 0.08)  # metres above a pose where the hand has to fit too


class Boxes(NamedTuple):
    """Oriented boxes around collision geoms."""

    center: np.ndarray  # [B,3]
    half: np.ndarray  # [B,3]
    axes: np.ndarray  # [B,3,3], columns

    def corners(self) -> np.ndarray:
        """Corners, ``[B,8,3]``."""
        signs = np.stack(np.meshgrid([-1, 1], [-1, 1], [-1, 1], indexing="ij"), -1).reshape(8, 3)
        return self.center[:, None] + np.einsum("bij,bkj->bki", self.axes, signs * self.half[:, None])

    def distance(self, points: np.ndarray) -> float:
        """Smallest distance from ``points`` ``[P,3]`` to any box; 0 inside."""
        if not len(self.center):
            return np.inf
        local = np.einsum("bij,pbi->pbj", self.axes, points[:, None] - self.center)
        return float(np.linalg.norm(np.maximum(np.abs(local) - self.half, 0.0), axis=-1).min())


class Grasp(NamedTuple):
    """A pose of the hand."""

    position: np.ndarray  # of the grip, [3]
    yaw: float  # radians


def boxes_of(env: Any, names: Collection[str]) -> Boxes:
    """Boxes of the named objects and fixtures of a LIBERO environment, where they are now."""
    return boxes_of_bodies(env, [env.obj_body_id[name] for name in names])


def boxes_of_bodies(env: Any, bodies: Collection[int]) -> Boxes:
    """Boxes of bodies and all that is attached to them."""
    model, data = env.sim.model._model, env.sim.data._data
    inside = np.zeros(model.nbody, dtype=bool)
    for body, parent in enumerate(model.body_parentid):  # parents come first
        inside[body] = body in bodies or (body > 0 and inside[parent])
    geoms = np.flatnonzero(inside[model.geom_bodyid] & ((model.geom_contype > 0) | (model.geom_conaffinity > 0)))
    axes = data.geom_xmat[geoms].reshape(-1, 3, 3)
    center = data.geom_xpos[geoms] + np.einsum("bij,bj->bi", axes, model.geom_aabb[geoms, :3])
    return Boxes(center, model.geom_aabb[geoms, 3:], axes)


def opening(yaw: float) -> np.ndarray:
    """The direction, ``[2]``, along which the fingers open."""
    return np.array([-np.sin(yaw), np.cos(yaw)])


def rim_grasps(item: Boxes) -> list[Grasp]:
    """Hold a bowl or a plate by its rim; small turns and the side on the robot's right come first."""
    corners = item.corners()
    low, high = corners.min((0, 1)), corners.max((0, 1))
    center, radius = (low + high)[:2] / 2, (high - low)[:2].mean() / 2 - 0.009
    height = max(high[2] - RIM_DEPTH, low[2] + GROUND)
    grasps = []
    for angle in RIM_ANGLES:
        position = np.array([*(center + radius * np.array([np.cos(angle), np.sin(angle)])), height])
        yaw = (angle + np.pi / 2 + np.pi / 2) % np.pi - np.pi / 2
        grasps.append(Grasp(position, yaw))
    return sorted(grasps, key=lambda grasp: (round(abs(grasp.yaw), 3), grasp.position[1]))


def side_grasps(item: Boxes) -> list[Grasp]:
    """Hold an object between its sides, at mid-height or as low as the palm allows.

    Grasps that are square to the sides come first, small turns before large ones.
    """
    corners = item.corners()
    low, high = corners[..., 2].min(), corners[..., 2].max()
    height = max((low + high) / 2, high - FINGER_LENGTH)
    here = (corners[..., 2].min(1) < height + 0.01) & (corners[..., 2].max(1) > height - 0.01)
    corners = corners[here, :, :2].reshape(-1, 2)
    middle = (corners.min(0) + corners.max(0)) / 2
    directions = np.stack([opening(yaw) for yaw in YAWS])
    across = (corners - middle) @ directions.T
    widths, shifts = np.ptp(across, 0), (across.max(0) + across.min(0)) / 2
    is_square = widths < np.minimum(np.roll(widths, 1), np.roll(widths, -1)) + SQUARE
    order = sorted(np.flatnonzero(widths < MAX_WIDTH), key=lambda i: (not is_square[i], round(float(abs(YAWS[i])), 3)))
    return [Grasp(np.append(middle + shifts[i] * directions[i], height), float(YAWS[i])) for i in order]


def hand_points(grasp: Grasp) -> np.ndarray:
    """Points on the open hand on its way down to ``grasp``, ``[P,3]``."""
    cos, sin = np.cos(grasp.yaw), np.sin(grasp.yaw)
    turned = HAND @ np.array([[cos, sin, 0.0], [-sin, cos, 0.0], [0.0, 0.0, 1.0]])
    return np.concatenate([grasp.position + turned + np.array([0.0, 0.0, up]) for up in APPROACH])


def most_clear(grasps: list[Grasp], obstacles: list[tuple[Boxes, np.ndarray]], *, skip: int = 0) -> Grasp:
    """The first of ``grasps`` that leaves enough room, else that with the most.

    Args:
        grasps: in order of preference; not empty.
        obstacles: boxes that the hand must clear, after a shift ``[3]`` of the hand.

    Keyword Args:
        skip: leave so many of the best out: they have failed before.
    """
    room = [min([ENOUGH, *(boxes.distance(hand_points(g) + shift) for boxes, shift in obstacles)]) for g in grasps]
    order = np.argsort(-np.array(room), kind="stable")
    return grasps[order[skip % len(order)]]
