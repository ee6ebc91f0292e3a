"""The scripted expert of LIBERO and its demonstrations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.envs._libero import PARKED, act, request
from wamrl_torchrl import schema
from wamrl_torchrl.envs.libero import LiberoEnv
from wamrl_torchrl.envs.libero_expert import NOISE_AT_CONTACT, NOISE_MEMORY, ActionNoise
from wamrl_torchrl.envs.libero_scripts import NO_VARIATION, SIZES, draw_variation

pytestmark = pytest.mark.libero
EPISODES = torch.tensor([[0, 1, 21, 0, 0], [0, 2, 22, 1, 1], [0, 45, 23, 2, 2], [0, 1, 21, 0, 3]])


@pytest.fixture(scope="module")
def env():
    env = LiberoEnv("libero_spatial", 2)
    yield env
    env.close()


@pytest.fixture(scope="module")
def noisy(env):
    return env.demonstrate(EPISODES, noise=0.4, grasp_variation=1.0, render=False)


class TestDemonstrations:
    def test_succeed(self, noisy):
        assert [bool(demo["success"]) for demo in noisy] == [True] * len(EPISODES)

    def test_shapes(self, noisy):
        for row, demo in zip(EPISODES, noisy, strict=True):
            length = len(demo["actions"])
            assert 40 < length <= 240
            assert demo["actions"].shape == demo["executed_actions"].shape == (length, 7)
            assert demo["states"].shape == (length + 1, 8)
            assert demo["sim_states"].shape == (length + 1, 195)
            assert demo["states"].dtype == demo["actions"].dtype == torch.float32
            assert [demo[key].tolist() for key in schema.EPISODE_KEYS[:3]] == row[:3, None].tolist()
            assert "frames" not in demo

    def test_noise_is_on_the_executed_positions_only(self, noisy):
        differences = [demo["executed_actions"] - demo["actions"] for demo in noisy]
        assert max(difference[:, :3].abs().max() for difference in differences) > 0.1
        assert all(bool(difference[:, :3].any()) for difference in differences)
        assert not any(bool(difference[:, 3:].any()) for difference in differences)

    def test_variation_is_in_the_choice_of_actions(self, noisy):
        # Rows 0 and 3 differ in their episode id only, and start from the same state.
        assert torch.equal(noisy[0]["sim_states"][0], noisy[3]["sim_states"][0])
        assert not torch.equal(noisy[0]["actions"][0], noisy[3]["actions"][0])

    def test_noise_and_variation_depend_on_the_episode_alone(self, env, noisy):
        again = env.demonstrate(EPISODES[[3, 1]], noise=0.4, grasp_variation=1.0, render=False)
        for key in ("actions", "executed_actions", "sim_states", "states"):
            assert torch.equal(again[0][key], noisy[3][key])
            assert torch.equal(again[1][key], noisy[1][key])
        # Rows 0 and 3 differ in their episode id only.
        assert not torch.equal(noisy[0]["executed_actions"][:20], noisy[3]["executed_actions"][:20])

    def test_frames_are_those_of_the_environment(self, env):
        demo = env.demonstrate(EPISODES[:1], frame_stride=4)[0]
        length = len(demo["actions"])
        assert torch.equal(demo["actions"], demo["executed_actions"])
        assert demo["frames"].shape == (length // 4 + 1, 3, 224, 448)
        assert demo["frames"].dtype == torch.uint8
        observation = env.reset(request(EPISODES[0, :3].tolist(), PARKED))
        assert torch.equal(observation[schema.IMAGE][0], demo["frames"][0])
        assert torch.equal(observation[schema.STATE][0], demo["states"][0])
        step = act(env, observation, demo["executed_actions"][:10])
        assert torch.equal(step[schema.FUTURE_FRAMES][0], demo["frames"][1:3])
        assert torch.equal(step[schema.STATE][0], demo["states"][10])
        assert torch.equal(step[schema.SIM_STATES][0], demo["sim_states"][:11])

    def test_parks_the_slots(self, env):
        env.reset(request(EPISODES[0, :3].tolist(), EPISODES[1, :3].tolist()))
        assert not env.parked.any()
        env.demonstrate(EPISODES[:0])
        assert env.parked.all()

    def test_may_be_left_early(self, env):
        for row, _ in env.iter_demonstrations(EPISODES, render=False):
            assert row in (0, 1)
            break
        assert env.reset(request(EPISODES[0, :3].tolist(), EPISODES[1, :3].tolist()))["done"].sum() == 0


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"noise": -0.1}, "noise must not be negative"),
            ({"grasp_variation": -1.0}, "grasp_variation must not be negative"),
            ({"frame_stride": 0}, "frame_stride must be at least 1"),
        ],
    )
    def test_options(self, env, options, message):
        with pytest.raises(ValueError, match=message):
            env.demonstrate(EPISODES, **options)

    @pytest.mark.parametrize(
        ("episode", "message"),
        [([11, 0, 0, 0, 0], "task_id 11 is out of range"), ([0, 0, 0, 0, -1], "has episode_id -1, which means none")],
    )
    def test_episodes(self, env, episode, message):
        with pytest.raises(ValueError, match=message):
            env.demonstrate(torch.tensor([episode]))


class TestGoal:
    def test_a_bottle_on_the_slope_of_the_rack(self):
        env = LiberoEnv("libero_goal", 1)
        (demo,) = env.demonstrate(torch.tensor([[9, 0, 1, 0, 0]]), grasp_variation=1.0, render=False)
        with pytest.raises(ValueError, match=r"task 3 \(open the top drawer and put the bowl inside\): it cannot put"):
            env.demonstrate(torch.tensor([[9, 0, 1, 0, 0], [3, 0, 1, 0, 1]]))
        env.close()
        assert bool(demo["success"])
        assert len(demo["actions"]) < 120


class TestVariation:
    def test_lies_within_its_sizes(self):
        generator = np.random.default_rng(0)
        drawn = [draw_variation(0.5, generator) for _ in range(500)]
        for values, size in zip(zip(*drawn, strict=True), SIZES, strict=True):
            relative = np.abs(np.stack(values)) / size
            assert relative.max() <= 0.5
            assert relative.max() > 0.48

    def test_none(self):
        drawn = draw_variation(0.0, np.random.default_rng(1))
        assert all(np.array_equal(value, none) for value, none in zip(drawn, NO_VARIATION, strict=True))
        assert not any(np.any(value) for value in drawn)


class TestActionNoise:
    def drifts(self, scale: float, seed: int, steps: int = 4000) -> np.ndarray:
        noise = ActionNoise(scale, [seed])
        return np.stack([noise(np.zeros(7), in_contact=False) for _ in range(steps)])

    def test_stationary_and_correlated(self):
        drift = self.drifts(0.2, 0)[:, :3]
        std = drift.std()
        assert 0 < std < 0.2
        assert abs(drift.mean()) < 0.05 * 0.2 + 0.05
        correlation = np.corrcoef(drift[1:].ravel(), drift[:-1].ravel())[0, 1]
        assert correlation == pytest.approx(NOISE_MEMORY, abs=0.05)

    def test_scale_is_drawn_uniformly(self):
        stds = [ActionNoise(0.4, [seed])._std for seed in range(400)]
        assert min(stds) < 0.02
        assert max(stds) > 0.38
        assert np.mean(stds) == pytest.approx(0.2, abs=0.02)

    def test_contact_scales_it(self):
        far, near = ActionNoise(0.3, [1]), ActionNoise(0.3, [1])
        for _ in range(5):
            a, b = far(np.zeros(7), in_contact=False), near(np.zeros(7), in_contact=True)
            np.testing.assert_allclose(b, NOISE_AT_CONTACT * a)

    def test_stays_in_range_and_off_the_gripper(self):
        noise, action = ActionNoise(3.0, [2]), np.array([1.0, -1, 0, 0, 0, 0.5, -1])
        for _ in range(50):
            noisy = noise(action, in_contact=False)
            assert np.abs(noisy).max() <= 1.0
            assert noisy[3:].tolist() == action[3:].tolist()

    def test_none(self):
        action = np.linspace(-1, 1, 7)
        assert ActionNoise(0.0, [3])(action, in_contact=False).tolist() == action.tolist()
