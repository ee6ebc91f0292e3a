from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from wamrl_torchrl.build import choose_device, frame_offsets, make_env, task_ids
from wamrl_torchrl.config import CONFIG_DIR, EnvConfig, RunConfig, check_held_out, parse_config


def load(*overrides: str) -> RunConfig:
    with initialize_config_dir(CONFIG_DIR, version_base="1.3"):
        return parse_config(compose("train", list(overrides)))


class TestCompose:
    def test_defaults(self):
        config = load()
        assert config.env.suite == "libero_spatial"
        assert config.model.preset == "tiny"
        assert config.sde.count == 1

    @pytest.mark.parametrize("path", sorted((Path(CONFIG_DIR) / "preset").glob("*.yaml")), ids=lambda path: path.stem)
    def test_every_preset_is_valid(self, path):
        load(f"preset={path.stem}")

    @pytest.mark.parametrize("path", sorted((Path(CONFIG_DIR) / "env").glob("*.yaml")), ids=lambda path: path.stem)
    def test_every_world_is_valid(self, path):
        load(f"env={path.stem}")

    def test_command_line_beats_preset(self):
        assert load("preset=laptop", "algo.iterations=7").algo.iterations == 7

    @pytest.mark.parametrize("suite", ["libero_goal+libero_spatial_swap", "/data/libero_goal/*_add_*.bddl"])
    def test_suite_needs_no_quotes(self, suite):
        assert load(f"env.suite={suite}").env.suite == suite


class TestBadOptions:
    @pytest.mark.parametrize(
        ("override", "name"),
        [
            ("algo.mode=dream", "algo.mode.*'dream'"),
            ("algo.group_size=1", "algo.group_size"),
            ("pretrain.validation=2", "pretrain.validation"),
            ("pretrain.validations=0", "pretrain.validations"),
            ("algo.reward=fun", "algo.reward.*'fun'"),
            ("algo.advantage=td", "algo.advantage.*'td'"),
            ("algo.imagination=dreamt", "algo.imagination.*'dreamt'"),
            ("algo.imagination_decay=2", "algo.imagination_decay"),
            ("algo.reward_space=sounds", "algo.reward_space.*'sounds'"),
            ("algo.motion_weight=-1", "algo.motion_weight"),
            ("algo.critic.gamma=1.5", "algo.critic.gamma"),
            ("algo.critic.epochs=0", "algo.critic.epochs"),
            ("algo.video_frames=painted", "algo.video_frames.*'painted'"),
            ("env.future_frames=false", "algo.weight_rec=0.1.*needs env.future_frames=true"),
            ("env.replan_steps=10", "env.replan_steps.*multiple of 4"),
            ("model.action_mode=joint", "model.action_mode"),
            ("model.action_mode=idm", "pretrain.action_idm_prob above 0"),
            ("pretrain.action_idm_prob=1", "pretrain.action_idm_prob below 1"),
            ("algo.imagination_shift=0", "algo.imagination_shift"),
            ("model.lora.rank=0", "rank"),
            ("model.actor.kind=head", "kind"),
            ("model.idm.num_steps=0", "num_steps"),
            ("pretrain.action_idm_prob=2", "pretrain.action_idm_prob"),
            ("pretrain.execution=fast", "pretrain.execution.*'fast'"),
            ("env.name=gridworld", "env.name"),
            ("collector.topology=ring", "collector.topology"),
            ("algo.minibatch_size=0", "algo.minibatch_size"),
            ("env.train_init_states=[5,5]", "train_init_states"),
            ("sde.stochastic_steps=11", "K_sde"),
            ("sde.stochastic_steps=none", "at least one"),
            ("algo.task_weights=balanced", "algo.task_weights.*'balanced'"),
            ("algo.task_weights=list", "task_weight_list"),
            ("algo.task_weight_list=[1,2]", "task_weight_list.*'mixed'"),
            ("algo.task_weight_floor=0", "task_weight_floor"),
            ("algo.task_weight_gamma=-1", "task_weight_gamma"),
            ("algo.actor_loss=reinforce", "algo.actor_loss.*'reinforce'"),
            ("algo.rows=some", "algo.rows.*'some'"),
            ("algo.row_reduction=max", "algo.row_reduction.*'max'"),
            ("algo.anchor=rope", "algo.anchor.*'rope'"),
            ("algo.anchor_weight=-1", "algo.anchor_weight"),
            ("algo.weighting=best", "algo.weighting.*'best'"),
            ("algo.temperature=0", "algo.temperature"),
            ("algo.nft_beta=0", "algo.nft_beta"),
            ("algo.kl_target=0", "algo.kl_target"),
            ("algo.lr_range=[1e-3,1e-4]", "algo.lr_range"),
            ("algo.step_loss_weights=[1,2]", "algo.step_loss_weights must be sde.num_steps=10"),
            ("algo.self_imitation.weight=-1", "algo.self_imitation.weight"),
            ("algo.self_imitation.capacity=0", "algo.self_imitation.capacity"),
            ("algo.self_imitation.steps=0", "algo.self_imitation.steps"),
            ("algo.self_imitation.discount=1.1", "algo.self_imitation.discount"),
            ("algo.actor_average=-0.1", "algo.actor_average"),
            ("algo.actor_lr_final=-1", "algo.actor_lr_final"),
            ("demos.start_spread=0.1", "demos.start_spread=0.1 .*are for env.name=tabletop"),
            ("demos.aligned=0.01", "demos.aligned=0.01 are for env.name=tabletop"),
            ("demos.grasp_offset=[0.01,0]", "demos.grasp_offset.*grasp_variation"),
        ],
    )
    def test_values_are_refused_by_name(self, override, name):
        with pytest.raises(ValueError, match=name):
            load(override)

    @pytest.mark.parametrize(
        ("overrides", "name"),
        [
            (
                ("algo.anchor=velocity", "algo.actor_loss=nft"),
                "algo.anchor=velocity is part of algo.actor_loss=flow_ppo",
            ),
            (("algo.reward=rec", "algo.weight_rec=0"), "leaves no reward"),
            (("algo.reward_space=latents", "algo.motion_weight=0.5"), "algo.motion_weight=0.5 weights pixels"),
            (("algo.advantage=gae", "algo.normalize_advantage=true"), "algo.critic.normalize"),
            (("algo.kl_target=0.03", "algo.actor_lr=1"), "algo.actor_lr=1 lies outside algo.lr_range"),
            (("algo.kl_target=0.03", "algo.actor_lr_final=0"), "excludes algo.kl_target"),
            (
                ("pretrain.execution=graphs", "pretrain.action_idm_prob=0.1"),
                "pretrain.execution=graphs with pretrain.action_idm_prob",
            ),
        ],
    )
    def test_options_that_exclude_each_other(self, overrides, name):
        with pytest.raises(ValueError, match=name):
            load(*overrides)

    @pytest.mark.parametrize("override", ["algo.lambda=1", "algo.epochs=many", "env=moon", "preset=huge"])
    def test_unknown_keys_types_and_groups(self, override):
        with pytest.raises(HydraException, match=override.split("=", maxsplit=1)[0].split(".")[-1] + "|moon|huge"):
            load(override)

    def test_training_states_are_no_evaluation_states(self):
        """An evaluation alone may use any."""
        config = load("env.eval_init_states=[30,50]")
        with pytest.raises(ValueError, match=r"share \[30, .*39\]"):
            check_held_out(config)
        assert check_held_out(load()) == []

    def test_training_on_evaluation_states_must_be_asked_for(self):
        everything = ("env.train_init_states=[0,50]", "env.eval_init_states=[0,50]")
        with pytest.raises(ValueError, match=r"env\.allow_overlap=true"):
            check_held_out(load(*everything))
        assert check_held_out(load(*everything, "env.allow_overlap=true")) == [*range(50)]

    @pytest.mark.parametrize("weights", ["[1,-1]", "[0,0]", "[nan,1]", "[inf,1]"])
    def test_task_weights_that_are_none(self, weights):
        with pytest.raises(ValueError, match="task_weight_list must hold"):
            load("algo.task_weights=list", f"algo.task_weight_list={weights}")

    def test_actor_only_takes_any_replan(self):
        assert load("env.replan_steps=10", "algo.mode=actor_only").env.replan_steps == 10

    def test_rendered_video_takes_any_replan_and_needs_no_future_frames(self):
        rendered = ("algo.video_frames=rendered", "env.replan_steps=10")
        assert load(*rendered).algo.weight_rec == 0.1
        config = load(*rendered, "env.future_frames=false", "algo.weight_rec=0")
        assert frame_offsets(config.env) == ()

    def test_rendered_video_is_libero_s(self):
        with pytest.raises(ValueError, match=r"video_frames=rendered needs LIBERO.*tabletop.*video_frames=live"):
            load("env=tabletop", "algo.video_frames=rendered")

    def test_live_video_needs_future_frames(self):
        with pytest.raises(ValueError, match=r"video_frames=live needs env.future_frames=true.*rendered"):
            load("env.future_frames=false", "algo.weight_rec=0")
        assert not load("env.future_frames=false", "algo.weight_rec=0", "algo.mode=actor_only").env.future_frames

    def test_unknown_task(self):
        with pytest.raises(ValueError, match=r"env.task_ids.*0\.\.5.*\[9\]"):
            task_ids(EnvConfig(name="tabletop", task_ids=[9]))

    def test_replan_beyond_the_chunk(self):
        with pytest.raises(ValueError, match=r"replan_steps.*1\.\.32.*40"):
            make_env(EnvConfig(name="tabletop", num_envs=1, image_size=[64, 128], replan_steps=40))

    def test_device(self):
        assert choose_device("cpu").type == "cpu"
        with pytest.raises(ValueError, match="'abacus'"):
            choose_device("abacus")


class TestCommands:
    """A mistake on the command line ends in one line that names it, not in a traceback."""

    @pytest.mark.parametrize(
        ("module", "override", "message"),
        [
            ("train", "algo.group_size=1", "algo.group_size"),
            ("evaluate", "env=tabletop", "model.policy"),
            ("evaluate", "model.policy=/nowhere", "/nowhere"),
            ("pretrain", "logger.directory=/nowhere", "/nowhere"),
            ("train", "model.preset=huge env=tabletop logger.directory={tmp}", "unknown model preset 'huge'"),
        ],
    )
    def test_messages(self, module, override, message, tmp_path):
        command = [sys.executable, "-m", f"wamrl_torchrl.{module}", *override.format(tmp=tmp_path / "run").split()]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 1
        assert message in done.stderr
        assert "Traceback" not in done.stderr
