"""Pre-training on demonstrations, and what is held out of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console
from tensordict import TensorDict
from torchrl.checkpoint import CheckpointError

from tests.conftest import IMAGE_SIZE, make_policy
from tests.test_train import load
from wamrl_torchrl import schema
from wamrl_torchrl.data.episodes import EpisodeStore
from wamrl_torchrl.learner import normalize_windows
from wamrl_torchrl.pretrain import Pretraining, Smoothed, pretrain
from wamrl_torchrl.validation import Validation, hold_out


def make_demos(episodes: int, *, steps: int = 36) -> EpisodeStore:
    """Episodes of two tasks in turn, of made-up pictures that brighten from frame to frame."""
    generator = torch.Generator().manual_seed(0)
    store, frames = EpisodeStore(), steps // 4 + 1
    for index in range(episodes):
        first = torch.randint(0, 200, (1, 3, *IMAGE_SIZE), generator=generator)
        pictures = first + 5 * torch.arange(frames)[:, None, None, None]
        episode = {
            "frames": pictures.to(torch.uint8),
            "states": torch.rand(frames, 8, generator=generator) * 2 - 1,
            "is_decision": torch.ones(frames, dtype=torch.bool),
            "actions": torch.rand(steps, 7, generator=generator) * 2 - 1,
            schema.TASK_ID: torch.tensor([index % 2]),
            schema.INIT_STATE_ID: torch.tensor([index]),
            schema.ENV_SEED: torch.tensor([0]),
            schema.SUCCESS: torch.tensor([True]),
        }
        store.add(TensorDict(episode, batch_size=[]))
    return store


class TestHoldOut:
    def test_both_parts_together_are_all_and_hold_every_task(self):
        demos = make_demos(40)
        train, held = hold_out(demos, 0.1)
        assert held is not None
        ids = [[int(e[schema.INIT_STATE_ID]) for e in part] for part in (train, held)]
        assert sorted(ids[0] + ids[1]) == list(range(40))
        assert len(ids[1]) == 4
        assert max(b - a for a, b in zip(ids[1], ids[1][1:], strict=False)) <= 11  # evenly spaced

    @pytest.mark.parametrize(("episodes", "share"), [(9, 0.5), (20, 0.0)])
    def test_nothing_of_few_or_by_choice(self, episodes, share):
        demos = make_demos(episodes)
        assert hold_out(demos, share) == (demos, None)

    def test_at_least_one(self):
        assert len(hold_out(make_demos(10), 0.01)[1]) == 1


class TestValidation:
    def test_looks_are_repeatable_and_notice_the_weights(self):
        policy, validation = make_policy(), Validation(make_demos(3), windows=6, batch_size=4)
        first = validation.losses(policy)
        torch.manual_seed(99)
        assert validation.losses(policy) == first
        with torch.no_grad():
            policy.model.mot.action.head.bias.add_(1.0)
        second = validation.losses(policy)
        assert second["action"] != first["action"]
        assert second["video"] == first["video"]

    def test_errors_of_copying_and_of_the_codec(self):
        policy, demos = make_policy(), make_demos(3)
        errors = Validation(demos, windows=12, batch_size=5).imagination(policy, num_steps=1)
        # Pictures brighten by 5/255 in 4 steps and 10/255 in 8; windows near the end reach neither, or the first only.
        low, high = (5 / 255) ** 2, (10 / 255) ** 2
        assert low < errors["copied"] < (low + high) / 2 + 1e-7
        windows = normalize_windows(demos.sample_windows(12, generator=torch.Generator().manual_seed(0)), policy)
        reached = ~windows["image_is_pad"][:, [1, 2]]
        expected = (reached * torch.tensor([low, high])).sum() / reached.sum()
        assert errors["copied"] == pytest.approx(float(expected), rel=1e-4)
        decoded = policy.model.codec.decode(policy.model.codec.encode(windows["video"].transpose(1, 2)))
        decoded = (decoded[:, :, [1, 2]].transpose(1, 2) + 1) / 2
        error = (decoded - windows["video"][:, [1, 2]].float() / 255).square().flatten(2).mean(-1)
        assert errors["codec"] == pytest.approx(float((error * reached).sum() / reached.sum()), rel=1e-3)
        assert errors["imagined"] > errors["codec"]


class TestPretrain:
    def test_logs_what_it_trains_on_and_what_it_does_not(self, tmp_path):
        config = load(tmp_path, "pretrain.steps=6", "pretrain.validation=0.2", "pretrain.validations=3")
        console = Console(record=True, width=120)
        pretrain(config, make_demos(10), console)
        for name in ("train/action", "train/video", "validation/action", "validation/video"):
            assert set(curve(tmp_path, name)) == {2, 4, 6}, name
        assert set(curve(tmp_path, "frames/imagined_mse")) == {6}
        assert "held out action" in console.export_text(clear=False)
        assert "PSNR" in console.export_text()

    def test_held_out_demonstrations_are_not_trained_on(self, tmp_path):
        """Spoiling them changes no weight."""
        weights = []
        for spoilt in (False, True):
            demos = make_demos(10)
            held = hold_out(demos, 0.1)[1]
            if spoilt:
                for episode in demos:
                    if int(episode[schema.INIT_STATE_ID]) == int(held[0][schema.INIT_STATE_ID]):
                        episode["frames"] = 255 - episode["frames"]
            options = ("pretrain.steps=3", "pretrain.validation=0.1")
            policy = pretrain(load(tmp_path / str(spoilt), *options), demos, Console(quiet=True))
            weights.append(policy.state_dict())
        assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())

    def test_goes_on_bit_for_bit(self, tmp_path, monkeypatch):
        """Interrupted after the first of two looks, and resumed."""
        options = ("pretrain.steps=4", "pretrain.validations=2", "pretrain.validation=0.1", "pretrain.video_every=3")
        quiet = Console(quiet=True)
        whole = pretrain(load(tmp_path / "whole", *options), make_demos(10), quiet).state_dict()
        step = Pretraining.step
        with monkeypatch.context() as patch:
            patch.setattr(Pretraining, "step", lambda self: interrupt() if self.steps == 3 else step(self))
            with pytest.raises(KeyboardInterrupt):
                pretrain(load(tmp_path / "parts", *options), make_demos(10), quiet)
        console = Console(record=True, width=120)
        parts = pretrain(load(tmp_path / "parts", *options), make_demos(10), console).state_dict()
        assert "after step 2" in console.export_text()
        assert [name for name, value in whole.items() if not torch.equal(value, parts[name])] == []
        assert curve(tmp_path / "parts", "train/video") == curve(tmp_path / "whole", "train/video")
        with pytest.raises(CheckpointError, match=r"pretrain\.lr=0\.002"):
            pretrain(load(tmp_path / "parts", *options, "pretrain.lr=1"), make_demos(10), quiet)
        with pytest.raises(CheckpointError, match="demonstrations=9"):
            pretrain(load(tmp_path / "parts", *options), make_demos(12), quiet)

    def test_graphs_are_refused_without_a_gpu(self, tmp_path):
        with pytest.raises(ValueError, match=r"pretrain.execution=graphs needs a GPU, device is cpu"):
            pretrain(load(tmp_path, "pretrain.execution=graphs"), make_demos(10), Console(quiet=True))
        assert not (tmp_path / "start").exists()

    def test_smoothed_means(self):
        seen = Smoothed(share=0.5)
        for value in (1.0, 3.0):
            seen.add(TensorDict({"loss": torch.tensor(value)}))
        assert seen.read() == {"loss": 2.0}


def interrupt() -> None:
    raise KeyboardInterrupt


def curve(directory: Path, name: str) -> dict[int, float]:
    path = directory / "pretraining" / "scalars" / f"{name}.csv"
    return {int(line.split(",")[0]): float(line.split(",")[1]) for line in path.read_text().split()}
