"""The scripted expert of the table top."""

from __future__ import annotations

import pytest
import torch

from tests.envs._tabletop import above_object, close_gripper, episodes_of
from wamrl_torchrl import schema
from wamrl_torchrl.envs import tabletop_world as world
from wamrl_torchrl.envs.tabletop import TABLETOP_INSTRUCTIONS, TableTopEnv
from wamrl_torchrl.envs.tabletop_expert import demonstrate, expert_action
from wamrl_torchrl.envs.tabletop_render import render

TASKS = len(TABLETOP_INSTRUCTIONS)


def _grasp_errors(demos):
    """The tip's distance from the held object's centre, x and y, wherever something is held."""
    states = torch.cat([demo["sim_states"] for demo in demos])
    held = states[states[:, world.HELD] >= 0]
    items = held[:, world.OBJECT_POSITIONS].unflatten(-1, (-1, 3))
    return (held[:, world.POSITION] - items[torch.arange(len(held)), held[:, world.HELD].long()])[:, :2]


class TestExpert:
    def test_always_succeeds_without_noise(self):
        env = TableTopEnv(1)
        demos = env.demonstrate(episodes_of(600), render=False)
        assert all(demo["success"].item() for demo in demos)
        lengths = torch.tensor([len(demo["actions"]) for demo in demos]).float()
        # Three to six chunks of 8.
        assert lengths.min() > 16
        assert lengths.max() <= 48

    @pytest.mark.parametrize(("noise", "rate"), [(0.15, 1.0), (0.3, 0.98)])
    def test_nearly_always_succeeds_with_noise(self, noise, rate):
        demos = TableTopEnv(1).demonstrate(episodes_of(300), noise=noise, render=False)
        assert sum(demo["success"].item() for demo in demos) >= rate * len(demos)

    @pytest.mark.parametrize("offset", [(0.016, 0.0), (-0.01, 0.016)])
    def test_flawed_grasps_are_where_they_were_asked_for(self, offset):
        demos = TableTopEnv(1).demonstrate(episodes_of(100), grasp_offset=offset, render=False)
        assert all(demo["success"].item() for demo in demos)
        gap = _grasp_errors(demos) - torch.tensor(offset, dtype=torch.float64)
        assert gap.abs().max() < 0.0041

    @pytest.mark.parametrize("offset", [(0.017, 0.0), (0.0,), (0.0, -0.02)])
    def test_refuses_grasps_that_hold_nothing(self, offset):
        with pytest.raises(ValueError, match=r"grasp_offset must be x and y \(m\) of at most \[0.016, 0.016\]"):
            TableTopEnv(1).demonstrate(episodes_of(2), grasp_offset=offset, render=False)

    @pytest.mark.parametrize(("noise", "rate"), [(0.0, 1.0), (0.3, 0.98)])
    def test_a_content_expert_succeeds(self, noise, rate):
        demos = TableTopEnv(1).demonstrate(episodes_of(300), noise=noise, aligned=0.01, render=False)
        assert sum(demo["success"].item() for demo in demos) >= rate * len(demos)

    def test_a_content_expert_acts_from_further_off(self):
        """It closes the open hand 8 mm beside the block, where the exacting one goes on to the centre."""
        state, task = above_object(0, offset=(0.008, 0.0, 0.0)), torch.tensor([0])
        grips = [expert_action(state, task, aligned=aligned)[0, 6].item() for aligned in (0.01, 0.004)]
        assert grips == [1.0, -1.0]

    @pytest.mark.parametrize("aligned", [0.003, 0.02])
    def test_refuses_to_act_where_nothing_is_grasped(self, aligned):
        with pytest.raises(ValueError, match=rf"aligned must lie in 0.004..0.02 m.*got {aligned}"):
            TableTopEnv(1).demonstrate(episodes_of(2), aligned=aligned, render=False)

    def test_starts_are_spread_over_the_workspace(self):
        episodes, spread = episodes_of(200), 0.1
        usual = TableTopEnv(1).demonstrate(episodes, render=False)
        demos = TableTopEnv(1).demonstrate(episodes, start_spread=spread, render=False)
        assert all(demo["success"].item() for demo in demos)
        first, other = (torch.stack([demo["sim_states"][0] for demo in each]) for each in (usual, demos))
        shift = (other - first)[:, world.POSITION]
        assert torch.equal(first[:, world.WIDTH :], other[:, world.WIDTH :])
        assert shift.abs().max() <= spread
        assert shift[:, :2].abs().mean(0).sub(spread / 2).abs().max() < 0.01  # of a uniform displacement
        low, high = torch.tensor((world.WORKSPACE_LOW, world.WORKSPACE_HIGH), dtype=torch.float64)
        assert ((other[:, world.POSITION] >= low) & (other[:, world.POSITION] <= high)).all()
        # Each row by itself: neither other rows nor repetitions change it.
        again = TableTopEnv(1).demonstrate(episodes[7:8], start_spread=spread, render=False)
        assert torch.equal(again[0]["sim_states"], demos[7]["sim_states"])

    @pytest.mark.parametrize("option", ["noise", "start_spread"])
    def test_refuses_negative_numbers(self, option):
        with pytest.raises(ValueError, match=f"{option}.*must not be negative"):
            TableTopEnv(1).demonstrate(episodes_of(2), render=False, **{option: -0.1})

    def test_lets_go_of_a_wrong_object(self):
        state, task = close_gripper(above_object(1)), torch.tensor([0])
        demo = demonstrate(
            torch.tensor([[0, 0, 0, 0, 0]]), state, max_episode_steps=64, image_size=(32, 64), render_frames=False
        )[0]
        assert demo["success"].item()
        assert expert_action(state, task)[0, 6] == -1

    def test_demo_has_the_documented_keys_shapes_and_times(self):
        env = TableTopEnv(1, image_size=(32, 64))
        for stride in (1, 3, 4):
            for demo in env.demonstrate(episodes_of(7), noise=0.2, frame_stride=stride):
                length = len(demo["actions"])
                want = {
                    "frames": (torch.uint8, (length // stride + 1, 3, 32, 64)),
                    "states": (torch.float32, (length + 1, 8)),
                    "actions": (torch.float32, (length, 7)),
                    "executed_actions": (torch.float32, (length, 7)),
                    "sim_states": (torch.float64, (length + 1, world.STATE_DIM)),
                    "task_id": (torch.int64, (1,)),
                    "init_state_id": (torch.int64, (1,)),
                    "env_seed": (torch.int64, (1,)),
                    "success": (torch.bool, (1,)),
                }
                assert {key: (value.dtype, tuple(value.shape)) for key, value in demo.items()} == want
                assert torch.equal(demo["frames"], render(demo["sim_states"][::stride], (32, 64)))
                assert torch.equal(demo["states"], world.proprioception(demo["sim_states"]))
                assert demo["actions"].abs().max() <= 1
                assert demo["executed_actions"].abs().max() <= 1
        assert "frames" not in env.demonstrate(episodes_of(1), render=False)[0]
        assert env.demonstrate(episodes_of(0)) == []

    def test_executed_actions_replay_to_the_same_states(self):
        env = TableTopEnv(1)
        for demo in env.demonstrate(episodes_of(6), noise=0.3, render=False):
            state = demo["sim_states"][:1]
            for step, taken in enumerate(demo["executed_actions"]):
                assert torch.equal(expert_action(state, demo["task_id"])[0], demo["actions"][step])
                state = world.advance(state, taken[None])
                assert torch.equal(state[0], demo["sim_states"][step + 1])
            assert world.succeeded(state, demo["task_id"]).item() == demo["success"].item()

    def test_noise_has_the_asked_size_and_spares_the_gripper(self):
        demos = TableTopEnv(1).demonstrate(episodes_of(1200), noise=0.2, render=False)
        states = torch.stack([d["sim_states"][3] for d in demos])
        away = world.target_object(states, torch.cat([d["task_id"] for d in demos])) - states[:, world.POSITION]
        far = away[:, :2].abs().amax(-1) > 0.02
        chosen = torch.stack([d["actions"][3, :3] for d in demos])[far]
        added = torch.stack([d["executed_actions"][3, :3] for d in demos])[far] - chosen
        unclipped = chosen.abs() < 0.3
        after_four = 0.2 * (1 - 0.8**8) ** 0.5  # the innovations since rest
        assert unclipped.sum() > 100
        assert added[unclipped].std().item() == pytest.approx(after_four, rel=0.15)
        for demo in demos:
            assert torch.equal(demo["actions"][:, 3:], demo["executed_actions"][:, 3:])

    def test_without_noise_the_expert_executes_its_choice(self):
        for demo in TableTopEnv(1).demonstrate(episodes_of(6), render=False):
            assert torch.equal(demo["actions"], demo["executed_actions"])

    def test_demo_depends_on_its_ids_and_the_seed_alone(self):
        env = TableTopEnv(1, image_size=(32, 64))
        episodes = episodes_of(20)
        together = env.demonstrate(episodes, noise=0.3, seed=5)
        for row in (0, 7, 19):
            alone = env.demonstrate(episodes[row : row + 1], noise=0.3, seed=5)[0]
            assert all(torch.equal(value, together[row][key]) for key, value in alone.items())
        twin = episodes[:1].clone()
        twin[0, 4] = 99
        assert not torch.equal(env.demonstrate(twin, noise=0.3, seed=5)[0]["states"], together[0]["states"])
        other = env.demonstrate(episodes[:1], noise=0.3, seed=6)[0]
        assert not torch.equal(other["states"], together[0]["states"])

    def test_slots_are_not_touched(self):
        env = TableTopEnv(3)
        first = env.reset()
        chunk = torch.zeros(3, schema.CHUNK, schema.ACTION_DIM)
        plain = env.step(first.clone().set("action", chunk))["next"]
        env.reset(first.select(*schema.EPISODE_KEYS).set(schema.EPISODE_ID, first[schema.EPISODE_ID] + 50))
        env.demonstrate(episodes_of(5))
        again = env.step(first.clone().set("action", chunk))["next"]
        assert torch.equal(plain["observation", "image"], again["observation", "image"])

    def test_horizon_ends_a_demo(self):
        demos = TableTopEnv(1, max_episode_steps=10).demonstrate(episodes_of(4), render=False)
        assert all(len(demo["actions"]) == 10 and not demo["success"].item() for demo in demos)

    @pytest.mark.parametrize(("options", "name"), [({"noise": -0.1}, "noise"), ({"frame_stride": 0}, "frame_stride")])
    def test_bad_options_are_named(self, options, name):
        with pytest.raises(ValueError, match=name):
            TableTopEnv(1).demonstrate(episodes_of(1), **options)
