"""Episodes of a LeRobot dataset on disk, as demonstrations: the formats 2.0, 2.1 and 3.0, by pyarrow and PyAV.

What the dataset means is found in its ``meta/``; what it does not say (the gripper's sign, how the cameras stand) is an
option. A row of a dataset is the observation before an action and that action, so the picture after the last action is
not in it: where the window grid of every 4th step would need that one, the last action is left out.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from tensordict import TensorDict
from torch import Tensor

from wamrl_torchrl import schema

#: Names that published LIBERO datasets give to what a policy needs, the first that is there counts.
CAMERAS = (
    ("observation.images.image", "observation.images.wrist_image"),
    ("observation.images.image", "observation.images.image2"),
    ("observation.images.agentview", "observation.images.wrist"),
    ("images.agentview_rgb", "images.wrist_rgb"),
    ("image", "wrist_image"),
)
STATES, ACTIONS = ("observation.state", "state"), ("action", "actions")
SUCCESSES = ("is_success", "next.success", "success")
#: Init state and env seed of episodes that do not say where they started.
UNKNOWN = -1


@dataclass
class LeRobotConfig:
    """Where the episodes are and what their numbers mean."""

    path: str | None = None  # directory of the dataset, with meta/info.json; scripted demonstrations if null
    cameras: list[str] | None = None  # features of agent and wrist view; found by known names if null
    state: str | None = None  # feature of the 8 numbers of proprioception; found by known names if null
    action: str | None = None  # feature of the 7 numbers of an action; found by known names if null
    gripper: str = "auto"  # env: -1 opens, 1 closes; opens: 1 opens, 0 closes; auto: env if any number is negative
    turn: bool = False  # turn the pictures by 180 degrees: LIBERO's own files store them upside down


@dataclass(frozen=True)
class Entry:
    """An episode as the metadata describes it."""

    index: int
    length: int
    task: str
    row: dict[str, Any]


class LeRobotReader:
    """Reads a dataset, episode by episode.

    Args:
        config: where it is and how to read it.

    Keyword Args:
        image_size: height and width of the two views side by side, to which pictures are resized as LIBERO's are.

    Raises:
        FileNotFoundError: no dataset there.
        ValueError: a format that is not known, or features that are not in it.
        ImportError: pyarrow is not installed.
    """

    def __init__(self, config: LeRobotConfig, *, image_size: tuple[int, int]) -> None:
        self.parquet = _import_parquet()
        self.root, self.config = Path(config.path or ""), config
        self.height, self.width = image_size[0], image_size[1] // 2
        path = self.root / "meta" / "info.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is not there: demos.lerobot.path must be the directory of a LeRobot dataset"
            )
        self.info = json.loads(path.read_text(encoding="utf-8"))
        version = str(self.info.get("codebase_version"))
        if version not in ("v2.0", "v2.1", "v3.0"):
            raise ValueError(f"{path} has codebase_version {version!r}; known are v2.0, v2.1 and v3.0")
        self.in_files = version == "v3.0"  # many episodes to a file, or one
        self.features: dict[str, dict] = self.info["features"]
        pairs = CAMERAS if config.cameras is None else (tuple(config.cameras),)
        found = [pair for pair in pairs if all(name in self.features for name in pair)]
        if len(pairs[0]) != 2 or not found:
            raise ValueError(self._not_there("cameras", "agent and wrist view", pairs))
        self.cameras = found[0]
        self.state = self._find("state", config.state, STATES, schema.STATE_DIM)
        self.action = self._find("action", config.action, ACTIONS, schema.ACTION_DIM)
        self.success = next((name for name in SUCCESSES if name in self.features), None)

    def _not_there(self, option: str, what: str, tried: Sequence[object]) -> str:
        return (
            f"{self.root} has no features {' or '.join(map(str, tried))} for the {what}; it has "
            f"{sorted(self.features)}: set demos.lerobot.{option}"
        )

    def _find(self, option: str, given: str | None, names: Sequence[str], size: int) -> str:
        tried = names if given is None else (given,)
        name = next((name for name in tried if name in self.features), None)
        if name is None:
            raise ValueError(self._not_there(option, option, tried))
        shape = list(self.features[name]["shape"])
        if shape != [size]:
            raise ValueError(f"{name} of {self.root} has shape {shape}, wanted is [{size}]: set demos.lerobot.{option}")
        return name

    # ---- metadata ---------------------------------------------------------------------------------------------------
    @cached_property
    def entries(self) -> list[Entry]:
        """All episodes, in order."""
        meta = self.root / "meta"
        if self.in_files:
            paths = sorted((meta / "episodes").rglob("*.parquet"))
            # Statistics of every feature are stored in the same rows.
            skipped = ("stats/",)
            rows: list[dict] = []
            for path in paths:
                names = [name for name in self.parquet.read_schema(path).names if not name.startswith(skipped)]
                rows += self.parquet.read_table(path, columns=names).to_pylist()
        else:
            lines = (meta / "episodes.jsonl").read_text(encoding="utf-8").splitlines()
            rows = [json.loads(line) for line in lines if line.strip()]
        if not rows:
            raise FileNotFoundError(f"{meta} lists no episodes")
        entries = [Entry(int(row["episode_index"]), int(row["length"]), str(row["tasks"][0]), row) for row in rows]
        return sorted(entries, key=lambda entry: entry.index)

    def _path(self, template: str, entry: Entry, kind: str, **names: str) -> Path:
        if self.in_files:
            numbers = {part: entry.row[f"{kind}/{part}"] for part in ("chunk_index", "file_index")}
        else:
            size = int(self.info.get("chunks_size", 1000))
            numbers = {"episode_chunk": entry.index // size, "episode_index": entry.index}
        path = self.root / template.format(**numbers, **names)
        if not path.is_file():
            raise FileNotFoundError(f"episode {entry.index} of {self.root} should be in {path}, which is not there")
        return path

    # ---- data -------------------------------------------------------------------------------------------------------
    def read(self, entry: Entry, *, task_id: int) -> TensorDict:
        """Read an episode in the layout of :mod:`wamrl_torchrl.data.episodes`, its gripper as the dataset has it.

        Raises:
            FileNotFoundError: a file of it is missing.
            ValueError: it has another number of rows or pictures than the metadata says, or no action.
        """
        path = self._path(self.info["data_path"], entry, "data")
        pictures = [name for name in self.cameras if self.features[name]["dtype"] == "image"]
        columns = ["frame_index", self.state, self.action, *([self.success] if self.success else []), *pictures]
        table = self.parquet.read_table(path, columns=columns, filters=[("episode_index", "=", entry.index)])
        table = table.sort_by("frame_index")
        if len(table) != entry.length:
            raise ValueError(f"{path} has {len(table)} rows of episode {entry.index}, meta/ says {entry.length}")
        length = entry.length - (entry.length % schema.VIDEO_STRIDE == 0)
        if length < 1:
            raise ValueError(f"episode {entry.index} of {self.root} has no action")
        grid = range(0, length + 1, schema.VIDEO_STRIDE)
        views = []
        for name in self.cameras:
            if name in pictures:
                views.append(self._decode(table.column(name).take(list(grid)).to_pylist()))
            else:
                views.append(self._decode_video(entry, name, grid))
        states = torch.tensor(table.column(self.state).to_pylist(), dtype=torch.float32)
        success = bool(np.ravel(table.column(self.success)[-1].as_py())[-1]) if self.success else True
        return TensorDict({
            "frames": torch.cat(views, -1),
            "states": states[list(grid)],
            "is_decision": torch.ones(len(grid), dtype=torch.bool),
            "actions": torch.tensor(table.column(self.action).to_pylist(), dtype=torch.float32)[:length],
            schema.TASK_ID: torch.tensor([task_id]),
            schema.INIT_STATE_ID: torch.tensor([UNKNOWN]),
            schema.ENV_SEED: torch.tensor([UNKNOWN]),
            schema.SUCCESS: torch.tensor([success]),
        })  # fmt: skip

    def _fit(self, picture: Image.Image) -> Tensor:
        """A picture as the environment would return it, uint8 [3,H,W]."""
        picture = ImageOps.fit(picture.convert("RGB"), (self.width, self.height), Image.Resampling.BILINEAR)
        if self.config.turn:
            picture = picture.transpose(Image.Transpose.ROTATE_180)
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1)

    def _decode(self, pictures: list[dict]) -> Tensor:
        """Pictures from a parquet column, uint8 [F,3,H,W]."""
        opened = (
            Image.open(io.BytesIO(picture["bytes"]) if picture["bytes"] else self.root / picture["path"])
            for picture in pictures
        )
        return torch.stack([self._fit(picture) for picture in opened])

    def _decode_video(self, entry: Entry, name: str, grid: range) -> Tensor:
        """Pictures number ``grid`` of an episode from its film, uint8 [F,3,H,W]."""
        import av  # slow to import, and only films need it

        path = self._path(self.info["video_path"], entry, f"videos/{name}", video_key=name)
        begin, fps = float(entry.row.get(f"videos/{name}/from_timestamp", 0.0)), float(self.info["fps"])
        found: dict[int, Tensor] = {}
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            assert stream.time_base is not None
            container.seek(int(begin / stream.time_base), stream=stream)  # to the key frame before
            for frame in container.decode(stream):
                number = round((float(frame.time or 0.0) - begin) * fps)
                if number in grid and number not in found:
                    found[number] = self._fit(frame.to_image())
                if number >= grid[-1]:
                    break
        missing = sorted(set(grid) - found.keys())
        if missing:
            raise ValueError(
                f"{path} has no pictures {missing} of episode {entry.index}: the film is too short or damaged"
            )
        return torch.stack([found[number] for number in grid])


def _import_parquet() -> ModuleType:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(f"LeRobot datasets need pyarrow ({error}): pip install 'wamrl_torchrl[lerobot]'") from error
    return parquet


def normal(instruction: str) -> str:
    """An instruction without what datasets write differently."""
    return " ".join(instruction.replace("_", " ").casefold().split()).rstrip(".")


def select(
    entries: Sequence[Entry], instructions: Sequence[str], tasks: Sequence[int], most: int
) -> list[tuple[Entry, int]]:
    """Episodes of ``tasks`` and their task ids, the first ``most`` of each.

    Args:
        entries: episodes of a dataset.
        instructions: of all tasks of the world, in the order of their ids.
        tasks: ids of the tasks wanted.
        most: episodes of a task.

    Raises:
        ValueError: a task has no episode.
    """
    wanted = {normal(instructions[task]): task for task in tasks}
    counts, chosen = dict.fromkeys(tasks, 0), []
    for entry in entries:
        task = wanted.get(normal(entry.task))
        if task is not None and counts[task] < most:
            counts[task] += 1
            chosen.append((entry, task))
    without = [instructions[task] for task, count in counts.items() if not count]
    if without:
        has = sorted({entry.task for entry in entries})
        raise ValueError(
            f"the dataset has no episode of {without}; it has {has[:12]}{' ...' if len(has) > 12 else ''}: choose "
            "other env.task_ids or another demos.lerobot.path"
        )
    return chosen


def fix_grippers(episodes: Sequence[TensorDict], kind: str) -> None:
    """Turn the gripper's column of the actions into the environment's convention, in place.

    Args:
        episodes: all that were read.
        kind: ``demos.lerobot.gripper``.

    Raises:
        ValueError: the numbers do not say which convention they follow, or do not follow the one given.
    """
    values = torch.cat([episode.get("actions")[:, -1] for episode in episodes])
    low, high = float(values.min()), float(values.max())
    if kind == "auto":
        if low >= 0 and not (low < 0.5 < high):
            raise ValueError(
                f"the gripper's actions lie in {low:g}..{high:g}, which fits both conventions: set "
                "demos.lerobot.gripper"
            )
        kind = "env" if low < 0 else "opens"
    bounds = {"env": -1.0, "opens": 0.0}
    if not bounds[kind] - 1e-3 <= low <= high <= 1 + 1e-3:
        raise ValueError(
            f"the gripper's actions lie in {low:g}..{high:g}; demos.lerobot.gripper={kind} means {bounds[kind]:g}..1"
        )
    if kind == "opens":
        for episode in episodes:
            actions = episode.get("actions")
            actions[:, -1] = 1 - 2 * actions[:, -1]
