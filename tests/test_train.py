"""The whole loop on the table top: short, but every part is real."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir
from rich.console import Console
from safetensors.torch import load_file
from torchrl.checkpoint import CheckpointError
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tests.conftest import make_states
from wamrl_torchrl.config import CONFIG_DIR, RunConfig, parse_config
from wamrl_torchrl.modules.checkpoint import load_policy, save_policy
from wamrl_torchrl.objectives.transforms import GroupAdvantage
from wamrl_torchrl.train import task_weights, train

TINY_RUN = (
    "env=tabletop",
    "env.num_envs=4",
    "env.task_ids=[0,1]",
    "env.train_init_states=[0,40]",
    "env.max_episode_steps=40",
    "demos.episodes_per_task=4",
    "pretrain.steps=4",
    "pretrain.batch_size=4",
    "pretrain.video_batch_size=2",
    "sde.num_steps=3",
    "algo.iterations=2",
    "algo.groups_per_iteration=4",
    "algo.group_size=4",
    "algo.imagination_steps=1",
    "algo.video_steps=2",
    "algo.curriculum.fraction=1.0",
    "algo.curriculum.steps_before_end=[2,5,8]",
    "algo.actor_lr=1e-3",
    "evaluation.episodes=4",
    "logger.tensorboard=false",
)


def load(directory: Path, *overrides: str) -> RunConfig:
    with initialize_config_dir(CONFIG_DIR, version_base="1.3"):
        return parse_config(compose("train", [*TINY_RUN, f"logger.directory={directory}", *overrides]))


@pytest.fixture(scope="module")
def console() -> Console:
    return Console(quiet=True)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, console) -> Path:
    """A run of two iterations."""
    directory = tmp_path_factory.mktemp("run")
    train(load(directory), console)
    return directory


def scalars(directory: Path, name: str) -> dict[int, float]:
    lines = (directory / "metrics" / "scalars" / f"{name}.csv").read_text().split()
    return {int(line.split(",")[0]): float(line.split(",")[1]) for line in lines}


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "policy.safetensors")


class TestRun:
    def test_leaves_what_it_promises(self, finished):
        for name in ("start", "policy", "demos", "checkpoints", "curves.png", "rollout.mp4", "summary.json"):
            assert (finished / name).exists(), name
        summary = json.loads((finished / "summary.json").read_text())
        assert set(summary["held_out"]) == {"start", "end"}
        assert all(n == 4 and 0 <= low <= high <= 1 for _, n, low, high in summary["held_out"].values())

    def test_both_updates_changed_their_own_parameters(self, finished):
        start, end = tensors(finished / "start"), tensors(finished / "policy")
        changed = {key for key, value in start.items() if key in end and not torch.equal(value, end[key])}
        assert changed - {"version"} == {key for key in changed if "mixtures.action" in key}
        assert len(changed) > 50
        adapters = {key: value for key, value in end.items() if "lora_B" in key}
        assert adapters
        assert any(value.abs().sum() > 0 for value in adapters.values())
        assert int(end["version"]) == 2

    def test_rewards_are_not_trivial(self, finished):
        success = scalars(finished, "rollout/success")
        assert set(success) == {1, 2}
        assert 0 < success[1] < 1
        assert scalars(finished, "reconstruction/mse")[1] > 0
        assert scalars(finished, "reconstruction/mse_std")[1] > 0
        assert scalars(finished, "rollout/parity_gap")[1] < 1e-3

    def test_held_out_episodes_are_kept_by_iteration(self, finished):
        held_out = json.loads((finished / "summary.json").read_text())["held_out"]
        assert sorted(path.name for path in (finished / "held_out").iterdir()) == ["0000.json", "0002.json"]
        for name, iteration in (("start", 0), ("end", 2)):
            episodes = json.loads((finished / "held_out" / f"{iteration:04d}.json").read_text())
            assert [sum(episode["success"] for episode in episodes), len(episodes)] == held_out[name][:2]
            conditions = {
                tuple(episode[key] for key in ("task_id", "init_state_id", "env_seed")) for episode in episodes
            }
            assert len(conditions) == len(episodes)

    def test_the_saved_policy_acts(self, finished):
        policy = load_policy(finished / "policy")
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            assert torch.isfinite(policy(make_states(2))["action"]).all()

    def test_a_finished_run_is_not_overwritten(self, finished, console):
        with pytest.raises(FileExistsError, match="resume=true"):
            train(load(finished), console)


class TestResume:
    def test_continues_bit_for_bit(self, finished, tmp_path, console):
        """One iteration, a stop, and a resumed second one end where two iterations in one go do."""
        directory = tmp_path / "run"
        train(load(directory, "algo.iterations=1"), console)
        train(load(directory, "resume=true"), console)
        whole, resumed = tensors(finished / "policy"), tensors(directory / "policy")
        assert whole.keys() == resumed.keys()
        different = [key for key, value in whole.items() if not torch.equal(value, resumed[key])]
        assert different == []
        assert scalars(directory, "rollout/success") == scalars(finished, "rollout/success")

    def test_same_seed_same_run(self, finished, tmp_path, console):
        directory = tmp_path / "run"
        train(load(directory), console)
        first, second = tensors(finished / "policy"), tensors(directory / "policy")
        assert all(torch.equal(value, second[key]) for key, value in first.items())


class TestTaskWeights:
    @pytest.mark.parametrize(
        ("options", "weights"),
        [
            (("algo.task_weights=mixed",), [1 - 2 * 0.5**4] * 2),
            (("algo.task_weights=failure", "algo.task_weight_gamma=3"), [0.125] * 2),
            (("algo.task_weights=failure", "algo.task_weight_floor=0.7"), [0.7] * 2),
            (("algo.task_weights=uniform",), [1.0] * 2),
            (("algo.task_weights=list", "algo.task_weight_list=[3,0]"), [3.0, 0.0]),
        ],
    )
    def test_follow_the_options(self, tmp_path, options, weights):
        """Of tasks that were not seen yet."""
        run = SimpleNamespace(config=load(tmp_path, *options), tasks=[0, 1], advantage=GroupAdvantage(4))
        assert task_weights(run).tolist() == pytest.approx(weights)

    def test_a_list_has_a_number_for_each_task(self, tmp_path, console):
        with pytest.raises(ValueError, match=r"task_weight_list.*\[0, 1\].*\[1\.0\]"):
            train(load(tmp_path, "algo.task_weights=list", "algo.task_weight_list=[1]"), console)


class TestModes:
    @pytest.mark.parametrize(("mode", "moved"), [("actor_only", "mixtures.action"), ("video_only", "lora_B")])
    def test_a_single_update_leaves_the_rest_alone(self, tmp_path, console, mode, moved):
        train(load(tmp_path / "run", f"algo.mode={mode}", "algo.iterations=1"), console)
        start, end = tensors(tmp_path / "run" / "start"), tensors(tmp_path / "run" / "policy")
        changed = {key for key in start if key in end and not torch.equal(start[key], end[key])} - {"version"}
        changed |= {key for key in end if "lora_B" in key and end[key].abs().sum() > 0}
        assert changed
        assert all(moved in key for key in changed)

    def test_rate_zero_changes_nothing(self, tmp_path, console):
        train(load(tmp_path / "run", "algo.actor_lr=0", "algo.video_lr=0", "algo.iterations=1"), console)
        start, end = tensors(tmp_path / "run" / "start"), tensors(tmp_path / "run" / "policy")
        assert [key for key in start if key in end and not torch.equal(start[key], end[key])] == ["version"]
        assert scalars(tmp_path / "run", "actor/clip_fraction") == {1: 0.0}

    def test_joint_training_with_a_critic_resumes_bit_for_bit(self, tmp_path, console):
        options = ("algo.mode=joint", "algo.advantage=gae", "algo.imagination=ema", "algo.critic.epochs=1")
        train(load(tmp_path / "whole", *options), console)
        train(load(tmp_path / "parts", *options, "algo.iterations=1"), console)
        train(load(tmp_path / "parts", *options, "resume=true"), console)
        start, whole = tensors(tmp_path / "whole" / "start"), tensors(tmp_path / "whole" / "policy")
        parts = tensors(tmp_path / "parts" / "policy")
        assert [key for key, value in whole.items() if not torch.equal(value, parts[key])] == []
        moved = {key for key in start if key in whole and not torch.equal(start[key], whole[key])}
        assert any("mixtures.action" in key for key in moved)
        assert any("lora_B" in key and value.abs().sum() > 0 for key, value in whole.items())
        assert scalars(tmp_path / "whole", "actor/steps")[1] > 0
        for name in ("critic/loss", "critic/explained_variance", "video/loss_video", "video/feature_drift"):
            assert set(scalars(tmp_path / "whole", name)) == {1, 2}, name

    def test_the_start_need_not_be_evaluated(self, tmp_path, console):
        held_out = train(load(tmp_path / "run", "evaluation.start=false", "algo.iterations=1"), console)
        assert list(held_out) == ["end"]
        assert [path.name for path in (tmp_path / "run" / "held_out").iterdir()] == ["0001.json"]

    def test_reward_names_its_parts(self, tmp_path, console):
        train(load(tmp_path / "run", "algo.reward=task", "algo.iterations=1"), console)
        assert not (tmp_path / "run" / "metrics" / "scalars" / "reconstruction").exists()

    def test_starts_from_a_given_policy(self, finished, tmp_path, console):
        options = (f"model.policy={finished / 'policy'}", "algo.curriculum.fraction=0", "algo.iterations=1")
        before = tensors(finished / "policy")
        train(load(tmp_path / "a", *options), console)
        after = tensors(finished / "policy")
        assert all(torch.equal(value, after[key]) for key, value in before.items())  # taken, not touched
        assert not (tmp_path / "a" / "start").exists()
        start = load_policy(finished / "policy")
        with torch.no_grad():
            start.model.mot.video.patch_embedding.weight.mul_(1.01)
        save_policy(start, tmp_path / "other")
        recipe = (tmp_path / "a" / "recipe.json").read_text()
        (tmp_path / "a" / "recipe.json").write_text(recipe.replace(str(finished / "policy"), str(tmp_path / "other")))
        moved = (f"model.policy={tmp_path / 'other'}", *options[1:], "resume=true", "algo.iterations=2")
        with pytest.raises(CheckpointError, match="other frozen weights"):
            train(load(tmp_path / "a", *moved), console)
        with pytest.raises(ValueError, match="adapters"):
            train(load(tmp_path / "d", *options, "model.lora.rank=5"), console)
        options = (f"model.policy={finished / 'start'}", *options[1:])
        train(load(tmp_path / "b", *options), console)
        assert not (tmp_path / "b" / "demos").exists()
        with pytest.raises(ValueError, match=r"algo\.curriculum\.fraction"):
            train(load(tmp_path / "c", options[0]), console)

    def test_worker_processes(self, tmp_path, console):
        options = ("collector.topology=multi_async", "collector.num_workers=2", "env.num_envs=2", "algo.iterations=2")
        train(load(tmp_path / "run", *options), console)
        assert set(scalars(tmp_path / "run", "rollout/success")) == {1, 2}
        assert scalars(tmp_path / "run", "rollout/parity_gap")[2] < 1e-3
