"""Datasets in ``tests/data/lerobot`` were written by lerobot 0.4.4's own ``LeRobotDataset`` (format 3.0).

``images`` keeps its pictures in the parquet file, ``films`` as AV1. Four episodes of 9, 12, 14 and 5 rows; in row t of
episode e the agent view is ``10 + 50 e + 3 t`` all over and the wrist view 255 minus that, the state is
``100 e + t + (0, ..., 7)`` and the action ``(e, t, 0, 0, 0, 0, t % 2)``; tasks 0 and 1 of the table top in turn.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hydra import compose, initialize_config_dir
from PIL import Image
from pyarrow import parquet
from rich.console import Console
from tensordict import TensorDict

from tests.conftest import make_policy
from wamrl_torchrl.config import CONFIG_DIR, RunConfig, parse_config
from wamrl_torchrl.data.episodes import EpisodeStore
from wamrl_torchrl.data.lerobot import LeRobotConfig, LeRobotReader, fix_grippers, normal, select
from wamrl_torchrl.demos import provide_demonstrations
from wamrl_torchrl.envs.tabletop import TABLETOP_INSTRUCTIONS
from wamrl_torchrl.modules.checkpoint import save_policy
from wamrl_torchrl.pretrain import Pretraining
from wamrl_torchrl.run import prepare_start

HERE = Path(__file__).parent / "lerobot"
LENGTHS = (9, 12, 14, 5)
USED = (9, 11, 14, 5)  # the picture after the 12th action is not in the dataset


def read(root: Path, *, image_size: tuple[int, int] = (64, 128), **options) -> list[TensorDict]:
    reader = LeRobotReader(LeRobotConfig(path=str(root), **options), image_size=image_size)
    chosen = select(reader.entries, TABLETOP_INSTRUCTIONS, [0, 1], 100)
    episodes = [reader.read(entry, task_id=task) for entry, task in chosen]
    fix_grippers(episodes, reader.config.gripper)
    return episodes


def write_dataset(
    root: Path, episodes: list[dict], *, names: dict[str, str] | None = None, version: str = "v2.1"
) -> Path:
    """Write episodes (``task``, ``pictures`` uint8 [T,2,H,W,3], ``actions`` [T,7], more columns) in format 2."""
    names = {"agent": "image", "wrist": "wrist_image", "state": "state", "action": "actions", **(names or {})}
    (root / "meta").mkdir(parents=True)
    lines = []
    for index, episode in enumerate(episodes):
        count, height = len(episode["actions"]), episode["pictures"].shape[2]
        columns: dict[str, object] = {
            names["state"]: [[float(t)] * 8 for t in range(count)],
            names["action"]: episode["actions"].tolist(),
            "frame_index": list(range(count)),
            "episode_index": [index] * count,
            **episode.get("columns", {}),
        }
        for view, name in enumerate((names["agent"], names["wrist"])):
            files = []
            for picture in episode["pictures"][:, view]:
                file = io.BytesIO()
                Image.fromarray(picture).save(file, "PNG")
                files.append({"bytes": file.getvalue(), "path": None})
            columns[name] = files
        path = root / f"data/chunk-000/episode_{index:06d}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.table(columns), path)
        lines.append(json.dumps({"episode_index": index, "tasks": [episode["task"]], "length": count}))
    (root / "meta" / "episodes.jsonl").write_text("\n".join(lines) + "\n")
    extra = {name: {"dtype": "bool", "shape": [1]} for episode in episodes for name in episode.get("columns", {})}
    features = {
        **{names[view]: {"dtype": "image", "shape": [height, height, 3]} for view in ("agent", "wrist")},
        names["state"]: {"dtype": "float32", "shape": [8]},
        names["action"]: {"dtype": "float32", "shape": [7]},
        **extra,
    }
    info = {"codebase_version": version, "fps": 10, "chunks_size": 1000, "features": features}
    info["data_path"] = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    (root / "meta" / "info.json").write_text(json.dumps(info))
    return root


def episode(
    task: int = 0, *, count: int = 6, size: int = 64, gripper: tuple[float, float] = (-1, 1), **columns
) -> dict:
    random = np.random.default_rng(task)
    actions = random.uniform(-1, 1, (count, 7)).astype(np.float32)
    actions[:, 6] = [gripper[t % 2] for t in range(count)]
    pictures = random.integers(0, 256, (count, 2, size, size, 3)).astype(np.uint8)
    return {"task": TABLETOP_INSTRUCTIONS[task], "pictures": pictures, "actions": actions, "columns": columns}


class TestWhatLeRobotWrites:
    @pytest.mark.parametrize(("kind", "error"), [("images", 0), ("films", 1)])
    def test_comes_back(self, kind, error):
        """Films are compressed: their greys may be one off."""
        found = read(HERE / kind)
        assert [len(each["actions"]) for each in found] == list(USED)
        assert [int(each["task_id"]) for each in found] == [0, 1, 0, 1]
        for number, (each, used) in enumerate(zip(found, USED, strict=True)):
            rows = torch.arange(0, used + 1, 4)
            grey = (10 + 50 * number + 3 * rows)[:, None, None, None].float()
            assert each["frames"].shape == (len(rows), 3, 64, 128)
            assert (each["frames"][..., :64].float() - grey).abs().max() <= error
            assert (each["frames"][..., 64:].float() - (255 - grey)).abs().max() <= error
            assert torch.equal(each["states"], (100 * number + rows[:, None] + torch.arange(8)).float())
            steps = torch.arange(used)
            assert torch.equal(each["actions"][:, :2], torch.stack([torch.full_like(steps, number), steps], 1).float())
            assert torch.equal(each["actions"][:, 6], 1.0 - 2 * (steps % 2))  # 1 opens there, -1 opens here
            assert bool(each["success"])

    def test_is_an_episode_store(self, tmp_path):
        store = EpisodeStore()
        for each in read(HERE / "images"):
            store.add(each)
        store.save(tmp_path / "store")
        assert len(EpisodeStore.load(tmp_path / "store")) == 4

    def test_a_film_that_is_too_short(self, tmp_path):
        shutil.copytree(HERE / "films", tmp_path / "d")
        path = tmp_path / "d/meta/episodes/chunk-000/file-000.parquet"
        table = parquet.read_table(path)
        key = "videos/observation.images.image/from_timestamp"
        late = pa.array([value + 1.9 for value in table[key].to_pylist()])
        parquet.write_table(table.set_column(table.column_names.index(key), key, late), path)
        with pytest.raises(ValueError, match=r"file-000.mp4 has no pictures \[.*of episode"):
            read(tmp_path / "d")


class TestFormat2:
    @pytest.mark.parametrize("version", ["v2.0", "v2.1"])
    def test_pictures_are_resized_as_the_environment_s(self, tmp_path, version):
        one = episode(count=6, size=256)
        (found,) = read_one(write_dataset(tmp_path / "d", [one], version=version), image_size=(224, 448))
        for view in range(2):
            picture = Image.fromarray(one["pictures"][4, view]).resize((224, 224), Image.Resampling.BILINEAR)
            half = found["frames"][1][..., 224 * view : 224 * (view + 1)]
            assert torch.equal(half, torch.from_numpy(np.array(picture)).permute(2, 0, 1))

    def test_turn(self, tmp_path):
        one = episode()
        root = write_dataset(tmp_path / "d", [one])
        (found,), (turned,) = read_one(root), read_one(root, turn=True)
        assert torch.equal(found["frames"][..., :64], turned["frames"][..., :64].flip(-1, -2))
        assert torch.equal(found["frames"][..., 64:], turned["frames"][..., 64:].flip(-1, -2))

    @pytest.mark.parametrize(
        "names",
        [
            {"agent": "observation.images.image", "wrist": "observation.images.wrist_image"},
            {"agent": "images.agentview_rgb", "wrist": "images.wrist_rgb", "action": "action"},
        ],
    )
    def test_known_names(self, tmp_path, names):
        (found,) = read_one(write_dataset(tmp_path / "d", [episode()], names=names))
        assert found["frames"].shape == (2, 3, 64, 128)

    def test_names_can_be_given(self, tmp_path):
        names = {"agent": "front", "wrist": "hand", "state": "pose", "action": "command"}
        root = write_dataset(tmp_path / "d", [episode()], names=names)
        with pytest.raises(ValueError, match=r"no features.*agent and wrist view.*'front'.*demos\.lerobot\.cameras"):
            read(root)
        with pytest.raises(ValueError, match=r"for the state.*'pose'.*demos\.lerobot\.state"):
            read(root, cameras=["front", "hand"])
        (found,) = read_one(root, cameras=["front", "hand"], state="pose", action="command")
        assert len(found["actions"]) == 6
        with pytest.raises(ValueError, match=r"command.*shape \[7\].*\[8\].*demos\.lerobot\.state"):
            read(root, cameras=["front", "hand"], state="command", action="command")


def read_one(root: Path, *, image_size: tuple[int, int] = (64, 128), **options) -> list[TensorDict]:
    reader = LeRobotReader(LeRobotConfig(path=str(root), **options), image_size=image_size)
    return [reader.read(reader.entries[0], task_id=0)]


class TestTasks:
    def test_instructions_are_compared_as_read(self):
        assert normal("Put_the red  Block on it. ") == normal("put the red block on it")

    def test_first_of_each_task(self):
        entries = LeRobotReader(LeRobotConfig(path=str(HERE / "images")), image_size=(64, 128)).entries
        assert [(entry.index, task) for entry, task in select(entries, TABLETOP_INSTRUCTIONS, [1], 9)] == [
            (1, 1),
            (3, 1),
        ]
        assert [entry.index for entry, _ in select(entries, TABLETOP_INSTRUCTIONS, [0, 1], 1)] == [0, 1]
        with pytest.raises(ValueError, match=r"no episode of \['put the green block.*it has \['Put the red block"):
            select(entries, TABLETOP_INSTRUCTIONS, [0, 2], 1)


class TestGripper:
    def fixed(self, values: list[float], kind: str) -> list[float]:
        actions = torch.zeros(len(values), 7)
        actions[:, 6] = torch.tensor(values)
        episodes = [TensorDict({"actions": part}) for part in actions.split(2)]
        fix_grippers(episodes, kind)
        return torch.cat([each["actions"] for each in episodes])[:, 6].tolist()

    def test_conventions(self):
        assert self.fixed([-1, 1, 1, -1], "auto") == [-1, 1, 1, -1]
        assert self.fixed([0, 1, 1, 0.25], "auto") == [1, -1, -1, 0.5]
        assert self.fixed([1, 1], "opens") == [-1, -1]
        assert self.fixed([1, 1], "env") == [1, 1]

    def test_what_fits_both_or_neither(self):
        with pytest.raises(ValueError, match=r"1\.\.1, which fits both.*demos\.lerobot\.gripper"):
            self.fixed([1, 1], "auto")
        with pytest.raises(ValueError, match=r"-1\.\.1; demos\.lerobot\.gripper=opens means 0\.\.1"):
            self.fixed([-1, 1], "opens")
        with pytest.raises(ValueError, match=r"-1\.\.3; demos\.lerobot\.gripper=env"):
            self.fixed([-1, 3], "auto")


class TestBadDatasets:
    def test_nothing_there(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"info\.json is not there: demos\.lerobot\.path"):
            read(tmp_path)

    def test_unknown_version(self, tmp_path):
        with pytest.raises(ValueError, match=r"'v1\.6'; known are v2\.0"):
            read(write_dataset(tmp_path / "d", [episode()], version="v1.6"))

    def test_a_missing_file_is_named(self, tmp_path):
        root = write_dataset(tmp_path / "d", [episode(0), episode(1)])
        (root / "data/chunk-000/episode_000001.parquet").unlink()
        with pytest.raises(FileNotFoundError, match=r"episode 1 .*episode_000001\.parquet"):
            read(root)

    def test_rows_are_counted(self, tmp_path):
        root = write_dataset(tmp_path / "d", [episode(0), episode(1)])
        path = root / "meta/episodes.jsonl"
        path.write_text(path.read_text().replace('"length": 6', '"length": 7'))
        with pytest.raises(ValueError, match=r"000000\.parquet has 6 rows of episode 0, meta/ says 7"):
            read(root)

    def test_pyarrow_is_an_extra(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(ImportError, match=r"wamrl_torchrl\[lerobot\]"):
            read(HERE / "images")


def load(directory: Path, *overrides: str) -> RunConfig:
    options = ("env=tabletop", "env.task_ids=[0,1]", f"logger.directory={directory}", "demos.episodes_per_task=5")
    with initialize_config_dir(CONFIG_DIR, version_base="1.3"):
        return parse_config(compose("train", [*options, *overrides]))


class TestUse:
    def test_failures_are_left_out(self, tmp_path):
        columns = [{"is_success": [flag] * 6} for flag in (True, False, True)]
        root = write_dataset(tmp_path / "d", [episode(n % 2, **c) for n, c in zip((0, 0, 1), columns, strict=True)])
        console = Console(record=True, file=io.StringIO(), width=150)
        store = provide_demonstrations(load(tmp_path / "run", f"demos.lerobot.path={root}"), console)
        assert len(store) == 2
        assert "3 of 3 episodes" in console.export_text()
        root = write_dataset(tmp_path / "e", [episode(0, **columns[0]), episode(1, **columns[1])])
        with pytest.raises(RuntimeError, match=r"no successful episode of tasks \[1\]"):
            provide_demonstrations(load(tmp_path / "run", f"demos.lerobot.path={root}"), console)

    def test_pretraining_learns_from_it(self, tmp_path):
        config = load(tmp_path / "run", f"demos.lerobot.path={HERE / 'images'}", "pretrain.batch_size=8", "device=cpu")
        demos = provide_demonstrations(config, Console(quiet=True))
        training = Pretraining(config, demos, make_policy().stats)
        training.step()
        first = training.seen.read()
        for _ in range(8):
            training.step()
        assert training.seen.read()["action"] < first["action"]

    def test_a_given_policy_can_mix_it_into_its_video_update(self, tmp_path):
        policy = save_policy(make_policy(), tmp_path / "policy")
        options = (f"model.policy={policy}", f"demos.lerobot.path={HERE / 'images'}")
        start = prepare_start(load(tmp_path / "a", *options), Console(quiet=True))
        assert start.demos is not None
        assert len(start.demos) == 4
        assert prepare_start(load(tmp_path / "b", *options, "algo.mode=actor_only"), Console(quiet=True)).demos is None

    def test_a_curriculum_needs_simulator_states(self, tmp_path):
        with pytest.raises(ValueError, match=r"algo\.curriculum\.fraction.*LeRobot"):
            load(tmp_path, "demos.lerobot.path=x", "algo.curriculum.fraction=0.5")

    def test_options_are_checked(self, tmp_path):
        with pytest.raises(ValueError, match=r"demos\.lerobot\.gripper.*'up'"):
            load(tmp_path, "demos.lerobot.gripper=up")
        with pytest.raises(ValueError, match=r"demos\.lerobot\.cameras must be \[agent view, wrist view\]"):
            load(tmp_path, "demos.lerobot.cameras=[front]")
