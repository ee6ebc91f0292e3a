"""Pictures of the table top: an oblique agent view and a wrist view that follows the gripper, side by side.

Every sprite is a soft-edged box or disc painted into a small window of the picture, so that the cost is that of the
pixels a sprite covers; all pictures are painted together. Soft edges carry positions finer than a pixel. No sum runs
over pixels or over the batch: a picture is bit for bit the same whatever is painted beside it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wamrl_torchrl.envs import tabletop_world as world

OBJECT_COLOURS = ((220, 40, 40), (40, 175, 60), (50, 80, 225))
GOAL_COLOURS = ((245, 215, 70), (170, 80, 195))
TABLE, FLOOR, STEEL, SHADOW = (190, 160, 122), (70, 76, 86), (40, 42, 48), (60, 48, 36)
TINT_X, TINT_Y = (130.0, 130.0, 130.0), (80.0, 0.0, -80.0)  # change of the table's colour per metre: says where one is
TABLE_HALF = 0.23

VIEW_HALF = 0.26  # half the width of the agent view, on the table
LIFT = 0.6  # how far a height moves a point up the agent view, in metres of table per metre
VIEW_SHIFT = 0.25  # moves the agent view down, which leaves room for the lifted gripper
GROWTH = 1.5  # growth of a sprite of the agent view per metre of height
CAMERA_HEIGHT = 0.12  # of the wrist camera above the tip
FOCAL = 2.0  # half the wrist view is CAMERA_HEIGHT / FOCAL = 0.06 m at the tip
RIM = 0.75  # of a sprite's size: what lies outside is drawn darker
DARK = 0.62

FINGER_HALF, FINGER_LENGTH, PALM_HALF = 0.008, 0.045, (0.05, 0.011)
BLOCK = 128  # pictures painted together: bounds the working set


def render(states: Tensor, image_size: tuple[int, int]) -> Tensor:
    """Paint world states.

    Args:
        states: float64 [B, STATE_DIM] of :mod:`wamrl_torchrl.envs.tabletop_world`.
        image_size: height and width of the two views together.

    Returns:
        Uint8 [B,3,H,W]: agent view, wrist view.
    """
    height, width = image_size
    pictures = torch.empty(len(states), 3, height, width, dtype=torch.uint8)
    for start in range(0, len(states), BLOCK):
        block = states[start : start + BLOCK].float()
        part = pictures[start : start + BLOCK]
        _paint_agent_view(_View(part, 0, width // 2), block)
        _paint_wrist_view(_View(part, width // 2, width // 2), block)
    return pictures


#: Maps offsets from the centre, du [M,1,Q] and dv [M,P,1], to weights [M,P,Q] and colours [M,3,P,Q] or [M,3,1,1].
Shape = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
#: Maps du, dv, a half-width [M,1,1] and the width of the soft edge to weights [M,P,Q].
Sprite = Callable[[Tensor, Tensor, Tensor, float], Tensor]


class _View:
    """Columns ``left .. left + width`` of ``pictures``; coordinates ``u`` (right) and ``v`` (down) run from -1 to 1."""

    def __init__(self, pictures: Tensor, left: int, width: int) -> None:
        self.pictures = pictures
        self.left = left
        self.height, self.width = pictures.shape[2], width
        self.edge = 2 / self.height  # a soft edge is one pixel wide

    def fill(self, x0: Tensor, y0: Tensor, half: Tensor) -> None:
        """Paint the table, seen from above around (x0, y0) [M] out to ``half`` [M] metres; M may be 1 for all."""
        x = x0[:, None] - half[:, None] * _centres(self.height)
        y = y0[:, None] + half[:, None] * _centres(self.width)
        soft = (self.edge * half)[:, None]
        floor = _colour(FLOOR)[:, None, None]
        rows = x[:, None, :, None] * _colour(TINT_X)[:, None, None] + (_colour(TABLE)[:, None, None] - floor)
        columns = y[:, None, None, :] * _colour(TINT_Y)[:, None, None]
        inside = _ramp(TABLE_HALF - x.abs(), soft)[:, :, None] * _ramp(TABLE_HALF - y.abs(), soft)[:, None, :]
        shade = (rows + columns).mul_(inside[:, None]).add_(floor + 0.5)
        self.pictures[..., self.left : self.left + self.width] = shade.to(torch.uint8)

    def paint(self, shape: Shape, which: Tensor, u: Tensor, v: Tensor, reach_u: float, reach_v: float) -> None:
        """Paint a sprite at (u, v) [M] in pictures ``which`` [M]; it must vanish beyond the reach from its centre."""
        rows, dv = _window(v, reach_v, self.height)
        columns, du = _window(u, reach_u, self.width)
        alpha, colour = shape(du[:, None, :], dv[:, :, None])
        batch, channel, row, _ = self.pictures.stride()
        corner = (which * batch + self.left)[:, None, None] + (rows * row)[:, :, None] + columns[:, None, :]
        index = (corner[:, None] + (torch.arange(3) * channel)[:, None, None]).view(-1)
        pixels = self.pictures.view(-1)
        # index_select and scatter_ cost a quarter of reading and writing by `pixels[index]`.
        under = pixels.index_select(0, index).view(len(which), 3, *alpha.shape[1:]).float()
        blend = (colour - under).mul_(alpha[:, None]).add_(under).add_(0.5)
        pixels.scatter_(0, index, blend.to(torch.uint8).view(-1))


def _colour(rgb: tuple[float, ...]) -> Tensor:
    return torch.tensor(rgb, dtype=torch.float32)


def _centres(pixels: int) -> Tensor:
    return (torch.arange(pixels) + 0.5) * (2 / pixels) - 1


def _window(centre: Tensor, reach: float, pixels: int) -> tuple[Tensor, Tensor]:
    """Indices int64 [M,P] of the pixels around ``centre`` [M], kept within the view, and their offsets from it."""
    span = min(int(reach * pixels) + 3, pixels)
    first = ((centre + 1) * (0.5 * pixels) - 0.5 * span).round().clamp(0, pixels - span)
    index = first[:, None] + torch.arange(span)
    return index.long(), (index + 0.5) * (2 / pixels) - 1 - centre[:, None]


def _ramp(depth: Tensor, soft: float | Tensor) -> Tensor:
    """Weight of a point ``depth`` inside a shape whose edge is ``soft`` wide."""
    return (depth / soft + 0.5).clamp(0.0, 1.0)


def _box(du: Tensor, dv: Tensor, half_u: float | Tensor, half_v: float | Tensor, soft: float) -> Tensor:
    return _ramp(half_u - du.abs(), soft) * _ramp(half_v - dv.abs(), soft)


def _disc(du: Tensor, dv: Tensor, radius: Tensor, soft: float) -> Tensor:
    # (r² - d²) / 2r is r - d to first order at the edge, and needs no root.
    return _ramp((radius * radius - (du * du + dv * dv)) / (2 * radius), soft)


def _rimmed(colour: Tensor, core: Tensor) -> Tensor:
    """``colour`` [M,3] where ``core`` [M,P,Q] is 1, and a darker shade of it where it is 0."""
    return colour[:, :, None, None] * (DARK + (1 - DARK) * core)[:, None]


def _stacked_objects(states: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Objects from the lowest to the highest, as positions [B,3] and colours [B,3]: the painter's order from above."""
    positions = states[:, world.OBJECT_POSITIONS].unflatten(-1, (len(world.OBJECTS), 3))
    order = positions[..., 2].sort(dim=-1, stable=True).indices
    rows = torch.arange(len(states))
    palette = torch.tensor(OBJECT_COLOURS, dtype=torch.float32)
    return [(positions[rows, column], palette[column]) for column in order.unbind(-1)]


def _goals(states: Tensor) -> list[tuple[Tensor, Tensor]]:
    positions = states[:, world.GOAL_POSITIONS].unflatten(-1, (len(world.GOALS), 2))
    return [(xy, _colour(rgb)[None]) for xy, rgb in zip(positions.unbind(1), GOAL_COLOURS, strict=True)]


def _paint_agent_view(view: _View, states: Tensor) -> None:
    everywhere = torch.arange(len(states))
    soft, scale = view.edge, 1 / VIEW_HALF
    largest = scale * (1 + GROWTH * (world.WORKSPACE_HIGH[2] + world.OBJECT_HALF))
    view.fill(torch.tensor([VIEW_SHIFT * VIEW_HALF]), torch.zeros(1), torch.tensor([VIEW_HALF]))

    def project(x: Tensor, y: Tensor, z: Tensor | float) -> tuple[Tensor, Tensor]:
        return y * scale, VIEW_SHIFT - (x + LIFT * z) * scale

    radius = torch.tensor(world.GOAL_RADIUS * scale)
    for xy, colour in _goals(states):

        def plate(du: Tensor, dv: Tensor, colour: Tensor = colour) -> tuple[Tensor, Tensor]:
            return _disc(du, dv, radius, soft), _rimmed(colour, _disc(du, dv, RIM * radius, soft))

        view.paint(plate, everywhere, *project(xy[:, 0], xy[:, 1], 0.0), float(radius), float(radius))

    x, y, z = states[:, world.POSITION].unbind(-1)
    shade = _colour(SHADOW)[None, :, None, None]

    def shadow(du: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        return 0.6 * _disc(du, dv, torch.tensor(0.022 * scale), 2 * soft), shade

    reach = 0.022 * scale + soft
    view.paint(shadow, everywhere, *project(x, y, 0.0), reach, reach)

    for position, colour in _stacked_objects(states):
        half = (world.OBJECT_HALF * scale * (1 + GROWTH * position[:, 2]))[:, None, None]
        side = LIFT * half  # half the height of the front face

        def block(
            du: Tensor, dv: Tensor, half: Tensor = half, side: Tensor = side, colour: Tensor = colour
        ) -> tuple[Tensor, Tensor]:
            return _box(du, dv, half, half + side, soft), _rimmed(colour, _ramp(half - side - dv, soft))

        reach = world.OBJECT_HALF * largest
        view.paint(block, everywhere, *project(*position.unbind(-1)), reach, (1 + LIFT) * reach)

    grow = (scale * (1 + GROWTH * z))[:, None, None]
    apart, steel = states[:, world.WIDTH][:, None, None] + FINGER_HALF, _colour(STEEL)[None, :, None, None]
    middle = 0.5 * LIFT * FINGER_LENGTH  # the sprite is centred on half the fingers' length

    def gripper(du: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        fingers = _box(du.abs() - apart * grow, dv, FINGER_HALF * grow, middle * grow, soft)
        palm = _box(du, dv + middle * grow, PALM_HALF[0] * grow, PALM_HALF[1] * grow, soft)
        return torch.maximum(fingers, palm), steel

    reach_u, reach_v = (world.OPEN_WIDTH + 2 * FINGER_HALF) * largest, (middle + PALM_HALF[1]) * largest
    view.paint(gripper, everywhere, *project(x, y, z + 0.5 * FINGER_LENGTH), reach_u, reach_v)


def _paint_wrist_view(view: _View, states: Tensor) -> None:
    soft = view.edge
    x, y, z = states[:, world.POSITION].unbind(-1)
    view.fill(x, y, (z + CAMERA_HEIGHT) / FOCAL)

    def paint(sprite: Sprite, position: Tensor, height: Tensor | float, size: float, colour: Tensor) -> None:
        """Paint those sprites of half-width ``size`` metres whose upper face, at ``height``, can be seen."""
        scale = FOCAL / (z + CAMERA_HEIGHT - height)
        u, v = (position[:, 1] - y) * scale, (x - position[:, 0]) * scale
        reach = size * scale + soft
        which = ((u.abs() < 1 + reach) & (v.abs() < 1 + reach)).nonzero().squeeze(-1)
        half, colour = (size * scale)[which][:, None, None], colour.expand(len(x), 3)[which]

        def shape(du: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
            return sprite(du, dv, half, soft), _rimmed(colour, sprite(du, dv, RIM * half, soft))

        # The nearest sprite sets the windows, which change what a sprite costs and not how it looks.
        largest = float(half.max()) if len(which) else 0.0
        view.paint(shape, which, u[which], v[which], largest, largest)

    for xy, colour in _goals(states):
        paint(_disc, xy, 0.0, world.GOAL_RADIUS, colour)
    for position, colour in _stacked_objects(states):
        paint(_square, position, position[:, 2] + world.OBJECT_HALF, world.OBJECT_HALF, colour)

    scale = FOCAL / CAMERA_HEIGHT
    apart = ((states[:, world.WIDTH] + FINGER_HALF) * scale)[:, None, None]
    steel = _colour(STEEL)[None, :, None, None]

    def fingers(du: Tensor, dv: Tensor) -> tuple[Tensor, Tensor]:
        return _box(du.abs() - apart, dv, FINGER_HALF * scale, 1.5 * FINGER_HALF * scale, soft), steel

    centre = torch.zeros(len(states))
    reach_u, reach_v = (world.OPEN_WIDTH + 2 * FINGER_HALF) * scale, 1.5 * FINGER_HALF * scale
    view.paint(fingers, torch.arange(len(states)), centre, centre, reach_u, reach_v)


def _square(du: Tensor, dv: Tensor, half: Tensor, soft: float) -> Tensor:
    return _box(du, dv, half, half, soft)
