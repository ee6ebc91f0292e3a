"""The commands of docs/released_weights.md, from files in the released layouts to a trained policy, at tiny size."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.synthetic_release import CHECKPOINT, STATS, TEXT_ENCODER, TOKENIZER, VAE, write_release
from tests.conftest import make_policy
from tests.test_train import load, scalars, tensors
from wamrl_torchrl import context_cli, weights_cli
from wamrl_torchrl.evaluate import _main as evaluate
from wamrl_torchrl.modules.adapter_files import load_adapters, save_adapters
from wamrl_torchrl.modules.checkpoint import load_policy, save_policy
from wamrl_torchrl.modules.fastwam.codec import TinyCodec
from wamrl_torchrl.modules.fastwam.released import read_checkpoint
from wamrl_torchrl.modules.fastwam.wan_codec import WanCodec
from wamrl_torchrl.modules.lora import merged_state
from wamrl_torchrl.train import train

TINY = ("--preset", "tiny", "--suite", "tabletop", "--image-size", "64", "128", "--dtype", "float32")


def run(main, *arguments: object) -> None:
    argv, sys.argv = sys.argv, ["command", *map(str, arguments)]
    try:
        main()
    finally:
        sys.argv = argv


@pytest.fixture(scope="module")
def release(tmp_path_factory) -> Path:
    """Random files in the released layouts, and the context cache made with them."""
    directory = tmp_path_factory.mktemp("release")
    write_release(directory, preset_name="tiny", device=torch.device("cpu"))
    build = ("--text-encoder", directory / TEXT_ENCODER, "--tokenizer", directory / TOKENIZER, "--tabletop")
    run(context_cli.main, "build", *build, "--length", 24, "--out", directory / "contexts.safetensors")
    return directory


def import_options(release: Path, out: Path) -> tuple[object, ...]:
    files = ("--checkpoint", release / CHECKPOINT, "--stats", release / STATS, "--vae", release / VAE)
    return ("import", *files, "--contexts", release / "contexts.safetensors", "--out", out, *TINY)


@pytest.fixture(scope="module")
def imported(release, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("imported") / "policy"
    run(weights_cli.main, *import_options(release, directory))
    return directory


@pytest.fixture(scope="module")
def trained(imported, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("trained") / "run"
    options = (f"model.policy={imported}", "model.action_mode=idm", "model.idm.num_steps=2", "model.lora.rank=2")
    options += ("algo.curriculum.fraction=0", "algo.iterations=1", "env.num_envs=2", "evaluation.episodes=1")
    options += ("algo.groups_per_iteration=1", "algo.group_size=2", "env.max_episode_steps=8")
    train(load(directory, *options), Console(quiet=True))
    return directory


class TestImport:
    def test_everything_comes_from_the_files(self, release, imported):
        policy = load_policy(imported)
        raw = torch.load(release / CHECKPOINT, weights_only=True)
        assert all(
            torch.equal(value, raw["mot"][name].float()) for name, value in policy.model.mot.state_dict().items()
        )
        assert policy.model.config.action_shift == 1.0
        assert policy.model.config.action_modes == ("first_frame", "idm")
        stats = json.loads((release / STATS).read_text())
        assert policy.stats.action_max.tolist() == stats["action"]["default"]["global_max"]
        assert policy.stats.state_min.tolist() == stats["state"]["default"]["global_min"]
        assert isinstance(policy.model.codec, WanCodec)
        assert policy.model.contexts.contexts.dtype == torch.bfloat16
        assert policy.model.contexts.instructions[0] == "put the red block on the yellow plate"

    def test_show(self, release, imported, capsys):
        run(weights_cli.main, "show", imported)
        run(weights_cli.main, "show", release / CHECKPOINT)
        shown = capsys.readouterr().out
        assert "first_frame, idm" in shown
        assert "20000" in shown
        assert f"{sum(p.numel() for p in load_policy(imported).model.parameters()):,}" in shown

    def test_does_not_replace_a_policy_unasked(self, release, imported, capsys):
        with pytest.raises(SystemExit, match="holds a policy already"):
            run(weights_cli.main, *import_options(release, imported))
        run(weights_cli.main, *import_options(release, imported), "--overwrite")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (("--action-shift", "5.0"), r"trained with action_shift 1.0, the configuration says 5.0"),
            (("--preset", "libero"), r"contexts of \(24, 32\) .*the model reads \(128, 4096\)"),
            (("--suite", "libero_goal"), "has no 'open the middle drawer of the cabinet'"),
            (("--vae", "nowhere.pth"), "nowhere.pth does not exist"),
            (("--stats", "nowhere.json"), "nowhere.json"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, release, tmp_path, change, message):
        with pytest.raises(SystemExit, match=message):
            run(weights_cli.main, *import_options(release, tmp_path / "out"), *change)
        assert not (tmp_path / "out").exists()

    def test_a_renamed_file_needs_its_shift(self, release, tmp_path):
        other = tmp_path / "mine.pt"
        other.write_bytes((release / CHECKPOINT).read_bytes())
        with pytest.raises(SystemExit, match=r"does not tell its action shift.*--action-shift"):
            run(weights_cli.main, *import_options(release, tmp_path / "out"), "--checkpoint", other)
        run(
            weights_cli.main, *import_options(release, tmp_path / "out"), "--checkpoint", other, "--action-shift", "5.0"
        )
        config = load_policy(tmp_path / "out").model.config
        assert (config.action_shift, config.action_modes) == (5.0, ("first_frame",))

    def test_statistics_of_another_robot_are_refused(self, release, tmp_path):
        stats = json.loads((release / STATS).read_text())
        stats["state"]["default"]["global_max"] = [1.0] * 14
        (tmp_path / "stats.json").write_text(json.dumps(stats))
        with pytest.raises(SystemExit, match=r"state.default.global_max.*list of 8 numbers"):
            run(weights_cli.main, *import_options(release, tmp_path / "out"), "--stats", tmp_path / "stats.json")


class TestUse:
    def test_trains_in_idm_mode(self, imported, trained):
        assert set(scalars(trained, "rollout/parity_gap").values()) == {0.0}
        start, end = tensors(imported), tensors(trained / "policy")
        assert set(start) <= {name.replace(".base_layer", "") for name in end}
        assert (trained / "rollout.mp4").exists()

    def test_evaluates(self, release, imported, tmp_path, capsys):
        options = ("evaluation.episodes=2", "env.max_episode_steps=8", "env.eval_init_states=[0,50]")
        contexts = f"model.contexts={release / 'contexts.safetensors'}"
        evaluate(load(tmp_path, f"model.policy={imported}", contexts, *options), Console(width=120))
        result = json.loads((tmp_path / "evaluation.json").read_text())
        assert [task["task_id"] for task in result["tasks"]] == [0, 1]
        assert result["policy"] == str(imported)
        assert "put the red block on the yellow plate" in capsys.readouterr().out

    def test_a_vae_that_moved_is_asked_for(self, release, imported, tmp_path):
        config = json.loads((imported / "config.json").read_text())
        config["codec"]["path"] = str(tmp_path / "gone.pth")
        moved = tmp_path / "policy"
        shutil.copytree(imported, moved)
        (moved / "config.json").write_text(json.dumps(config))
        with pytest.raises(FileNotFoundError, match=rf"VAE of {moved} is gone .*gone.pth.*model.vae"):
            load_policy(moved)
        codec = load_policy(moved, vae=release / VAE).model.codec
        assert isinstance(codec, WanCodec)
        assert codec.source == str(release / VAE)
        with pytest.raises(ValueError, match="codec 'tiny', which has no file"):
            load_policy(save_policy(make_policy(), tmp_path / "tiny"), vae=release / VAE)

    def test_exports_merged_weights_that_import_again(self, release, trained, tmp_path):
        run(weights_cli.main, "export", "--policy", trained / "policy", "--out", tmp_path / "merged.pt")
        policy = load_policy(trained / "policy", codec=TinyCodec())
        tensors = read_checkpoint(tmp_path / "merged.pt").tensors
        assert all(torch.equal(value, tensors[f"mot.{name}"]) for name, value in merged_state(policy.model).items())
        stats = tmp_path / "merged_dataset_stats.json"
        options = ("--checkpoint", tmp_path / "merged.pt", "--stats", stats)
        run(weights_cli.main, *import_options(release, tmp_path / "again"), *options)
        again = load_policy(tmp_path / "again", codec=TinyCodec())
        assert again.model.config == policy.model.config
        assert all(torch.equal(a, b) for a, b in zip(again.stats.buffers(), policy.stats.buffers(), strict=True))

    def test_adapters_go_alone(self, imported, trained, tmp_path):
        policy = load_policy(trained / "policy", codec=TinyCodec())
        save_adapters(policy.model, tmp_path / "adapters")
        fresh = load_policy(imported, codec=TinyCodec())
        load_adapters(fresh.model, tmp_path / "adapters")
        mine, theirs = (model.mot.video.state_dict() for model in (policy.model, fresh.model))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
