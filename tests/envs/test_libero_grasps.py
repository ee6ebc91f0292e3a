"""Where the scripted expert of LIBERO takes hold: geometry alone, no simulator."""

from __future__ import annotations

import numpy as np
import pytest

from wamrl_torchrl.envs.libero_grasps import (
    ENOUGH,
    FINGER_LENGTH,
    GROUND,
    Boxes,
    Grasp,
    hand_points,
    most_clear,
    opening,
    rim_grasps,
    side_grasps,
)

NOWHERE = np.zeros(3)


def boxes(*rows: tuple[list[float], list[float], float]) -> Boxes:
    """Boxes from (center, half sizes, yaw)."""
    center, half, yaws = (np.array(column) for column in zip(*rows, strict=True))
    cos, sin, zero, one = np.cos(yaws), np.sin(yaws), np.zeros(len(yaws)), np.ones(len(yaws))
    axes = np.stack([cos, -sin, zero, sin, cos, zero, zero, zero, one], -1).reshape(-1, 3, 3)
    return Boxes(center, half, axes)


class TestBoxes:
    def test_corners(self):
        corners = boxes(([1.0, 2.0, 3.0], [0.1, 0.2, 0.3], np.pi / 2)).corners()[0]
        np.testing.assert_allclose(corners.max(0), [1.2, 2.1, 3.3])
        np.testing.assert_allclose(corners.min(0), [0.8, 1.9, 2.7])

    @pytest.mark.parametrize(
        ("point", "distance"), [([0.1, 0.05, 0.0], 0.0), ([0.0, 1.0, 0.0], 0.8), ([0.4, 0.6, 0.0], 0.5)]
    )
    def test_distance(self, point, distance):
        # Turned by a quarter: 0.1 along x, 0.2 along y.
        box = boxes(([0.0, 0.0, 0.0], [0.2, 0.1, 0.3], np.pi / 2))
        assert box.distance(np.array([point])) == pytest.approx(distance)

    def test_nearest_of_many(self):
        two = boxes(([0.0, 0.0, 0.0], [0.1] * 3, 0.0), ([1.0, 0.0, 0.0], [0.1] * 3, 0.0))
        assert two.distance(np.array([[0.8, 0.0, 0.0], [0.4, 0.0, 0.0]])) == pytest.approx(0.1)


class TestSideGrasps:
    @pytest.mark.parametrize("yaw", [-1.2, -0.5, 0.0, 0.4, 0.9])
    def test_across_the_narrow_side(self, yaw):
        # 8 cm along its own x, 4 cm along its own y.
        best = side_grasps(boxes(([0.3, -0.2, 0.01], [0.04, 0.02, 0.01], yaw)))[0]
        assert abs(np.angle(np.exp(2j * (best.yaw - yaw)))) / 2 < np.pi / 32 + 1e-9
        np.testing.assert_allclose(best.position, [0.3, -0.2, 0.01], atol=1e-9)

    def test_too_wide(self):
        assert side_grasps(boxes(([0.0] * 3, [0.05, 0.05, 0.02], 0.0))) == []

    def test_as_low_as_the_palm_allows(self):
        # A bottle: what counts is the width of the neck, off the body's middle.
        bottle = boxes(([0.0, 0.0, 0.05], [0.05, 0.05, 0.05], 0.0), ([0.01, 0.02, 0.16], [0.01, 0.01, 0.06], 0.0))
        np.testing.assert_allclose(side_grasps(bottle)[0].position, [0.01, 0.02, 0.22 - FINGER_LENGTH])


class TestRimGrasps:
    def test_fingers_open_across_the_rim(self):
        for grasp in rim_grasps(boxes(([0.1, 0.2, 0.03], [0.05, 0.05, 0.03], 0.0))):
            outward = grasp.position[:2] - [0.1, 0.2]
            assert np.linalg.norm(outward) == pytest.approx(0.041)
            assert abs(outward @ opening(grasp.yaw)) == pytest.approx(0.041)
            assert -np.pi / 2 <= grasp.yaw < np.pi / 2

    def test_stays_off_the_ground(self):
        plate = boxes(([0.0, 0.0, 0.01], [0.07, 0.07, 0.01], 0.0))
        assert {grasp.position[2] for grasp in rim_grasps(plate)} == {GROUND}


class TestMostClear:
    FAR = boxes(([5.0, 5.0, 5.0], [0.1] * 3, 0.0))
    FIRST, SECOND = Grasp(np.zeros(3), 0.0), Grasp(np.zeros(3), np.pi / 2)
    BESIDE = boxes(([0.0, 0.05, 0.0], [0.01, 0.005, 0.02], 0.0))  # where a finger of the first would be

    def test_order_where_there_is_room(self):
        assert most_clear([self.FIRST, self.SECOND], [(self.FAR, NOWHERE)]) is self.FIRST
        assert most_clear([self.FIRST, self.SECOND], [(self.FAR, NOWHERE)], skip=1) is self.SECOND
        assert most_clear([self.FIRST, self.SECOND], [(self.FAR, NOWHERE)], skip=2) is self.FIRST

    def test_room_for_the_fingers(self):
        assert self.BESIDE.distance(hand_points(self.FIRST)) < ENOUGH
        assert most_clear([self.FIRST, self.SECOND], [(self.BESIDE, NOWHERE)]) is self.SECOND

    def test_room_where_it_is_put(self):
        there = Boxes(self.BESIDE.center + 0.7, self.BESIDE.half, self.BESIDE.axes)
        assert most_clear([self.FIRST, self.SECOND], [(there, NOWHERE)]) is self.FIRST
        assert most_clear([self.FIRST, self.SECOND], [(there, NOWHERE + 0.7)]) is self.SECOND

    def test_room_on_the_way_down(self):
        above = Boxes(self.BESIDE.center + np.array([0.0, 0.0, 0.1]), self.BESIDE.half, self.BESIDE.axes)
        assert most_clear([self.FIRST, self.SECOND], [(above, NOWHERE)]) is self.SECOND
