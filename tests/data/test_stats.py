from __future__ import annotations

import copy
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn
from torchrl.data import Composite, LazyTensorStorage, TensorDictReplayBuffer, Unbounded
from torchrl.envs import TransformedEnv, check_env_specs

from wamrl_torchrl import schema
from wamrl_torchrl.data.stats import DatasetStats, NormalizeProprio, gripper_to_dataset, gripper_to_env

BOUNDS = {
    "state_min": torch.tensor([-0.4, -0.3, 0.9, 2.0, -1.0, -1.5, 0.0, -0.04]),
    "state_max": torch.tensor([0.2, 0.4, 1.3, 3.6, 1.0, 1.5, 0.04, -0.04 + 5e-5]),
    "action_min": torch.tensor([-0.9, -0.8, -0.9, -0.1, -0.2, -0.3, 0.0]),
    "action_max": torch.tensor([0.9, 0.7, 0.9, 0.1, 0.2, 0.3, 1.0]),
}


@pytest.fixture
def stats() -> DatasetStats:
    return DatasetStats(**BOUNDS)


def episode(states: torch.Tensor, actions: torch.Tensor) -> TensorDict:
    return TensorDict({"states": states, "actions": actions}, batch_size=[])


class TestNormalisation:
    def test_bounds_map_to_plus_and_minus_one(self, stats):
        one = torch.ones(7)
        torch.testing.assert_close(stats.normalize_state(BOUNDS["state_min"])[:7], -one)
        torch.testing.assert_close(stats.normalize_state(BOUNDS["state_max"])[:7], one)
        torch.testing.assert_close(stats.normalize_action(BOUNDS["action_min"]), -one)
        torch.testing.assert_close(stats.normalize_action(BOUNDS["action_max"]), one)

    def test_closed_form(self, stats):
        state = torch.tensor([0.0, 0.1, 1.2, 3.0, 0.5, -0.5, 0.01, 0.7])
        low, high = BOUNDS["state_min"], BOUNDS["state_max"]
        expected = 2 * (state - low) / (high - low) - 1
        expected[7] = state[7]  # a range below 1e-4 passes through
        torch.testing.assert_close(stats.normalize_state(state), expected)

    def test_forward_clamps_and_inverse_does_not(self, stats):
        far = torch.full((7,), 100.0)
        assert torch.equal(stats.normalize_action(far), torch.full((7,), 5.0))
        assert torch.equal(stats.normalize_action(-far), torch.full((7,), -5.0))
        half = (BOUNDS["action_max"] - BOUNDS["action_min"]) / 2
        centre = (BOUNDS["action_max"] + BOUNDS["action_min"]) / 2
        torch.testing.assert_close(stats.denormalize_action(far), 100 * half + centre)

    def test_batch_dims_and_dtype(self, stats):
        state = torch.zeros(3, 4, 8, dtype=torch.float64)
        assert stats.normalize_state(state).shape == (3, 4, 8)
        assert stats.normalize_state(state).dtype == torch.float32
        assert stats.denormalize_action(torch.zeros(2, 32, 7).bfloat16()).dtype == torch.float32

    @given(st.lists(st.floats(-0.875, 0.875, width=32), min_size=7, max_size=7))
    def test_denormalise_inverts_normalise(self, values):
        stats, action = DatasetStats(**BOUNDS), torch.tensor(values) * BOUNDS["action_max"]
        torch.testing.assert_close(
            stats.denormalize_action(stats.normalize_action(action)), action, atol=1e-6, rtol=1e-5
        )


class TestGripper:
    @pytest.mark.parametrize(
        ("opening", "command"), [(1.0, -1.0), (0.0, 1.0), (0.51, -1.0), (0.49, 1.0), (0.5, -1.0), (3.0, -1.0)]
    )
    def test_to_env(self, opening, command):
        actions = torch.cat([torch.arange(6.0), torch.tensor([opening])])
        assert gripper_to_env(actions).tolist() == [0, 1, 2, 3, 4, 5, command]
        assert actions[-1] == torch.tensor(opening)  # not in place

    @pytest.mark.parametrize(("command", "opening"), [(-1.0, 1.0), (1.0, 0.0), (0.0, 0.5)])
    def test_to_dataset(self, command, opening):
        actions = torch.cat([torch.arange(6.0), torch.tensor([command])])
        assert gripper_to_dataset(actions).tolist() == [0, 1, 2, 3, 4, 5, opening]

    def test_round_trip_of_commands(self):
        actions = torch.randn(5, 3, 7)
        actions[..., -1] = actions[..., -1].sign()
        assert torch.equal(gripper_to_env(gripper_to_dataset(actions)), actions)


class TestEnvActions:
    def test_in_range_and_binary_for_any_sample(self, stats):
        actions = stats.to_env_actions(100 * torch.randn(64, 32, 7))
        assert actions.dtype == torch.float32
        assert actions.abs().max() <= 1
        assert set(actions[..., -1].flatten().tolist()) == {-1.0, 1.0}

    def test_model_plus_one_opens(self, stats):
        """Normalised +1 is the dataset's 1 = open, which the environment spells -1."""
        normalized = torch.zeros(2, 7)
        normalized[0, -1], normalized[1, -1] = 1, -1
        assert stats.to_env_actions(normalized)[:, -1].tolist() == [-1, 1]

    def test_round_trip(self, stats):
        actions = torch.rand(10, 32, 7) * 2 - 1
        actions = actions * BOUNDS["action_max"].clamp(max=0.7)
        actions[..., -1] = torch.randn(10, 32).sign()
        torch.testing.assert_close(stats.to_env_actions(stats.from_env_actions(actions)), actions)


class TestModule:
    def test_saved_and_loaded_with_its_owner(self, stats):
        owner, other = nn.Module(), nn.Module()
        owner.stats = stats
        other.stats = DatasetStats(**{key: value * 0 for key, value in BOUNDS.items()})
        other.load_state_dict(owner.state_dict())
        assert torch.equal(other.stats.action_max, BOUNDS["action_max"])

    def test_stays_float32_when_the_owner_is_cast_but_moves(self, stats):
        owner = nn.Sequential(nn.Linear(1, 1), copy.deepcopy(stats)).bfloat16()
        assert owner[0].weight.dtype == torch.bfloat16
        assert torch.equal(owner[1].state_min, BOUNDS["state_min"])
        assert owner.to("meta")[1].state_min.device.type == "meta"

    def test_does_not_alias_its_arguments(self):
        bounds = {key: value.clone() for key, value in BOUNDS.items()}
        stats = DatasetStats(**bounds)
        bounds["state_min"].zero_()
        assert torch.equal(stats.state_min, BOUNDS["state_min"])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"state_min": torch.zeros(7)}, r"state_min must have shape \[8\], found \[7\]"),
            ({"action_max": torch.zeros(1, 7)}, r"action_max must have shape \[7\]"),
            ({"action_min": torch.full((7,), torch.nan)}, "action_min must be finite"),
            ({"state_max": BOUNDS["state_min"] - 1}, "state_min exceeds state_max"),
        ],
    )
    def test_bad_bounds(self, change, message):
        with pytest.raises(ValueError, match=message):
            DatasetStats(**{**BOUNDS, **change})


class TestSources:
    def test_from_episodes(self):
        generator = torch.Generator().manual_seed(0)
        episodes = [
            episode(torch.randn(n, 8, generator=generator), torch.rand(4 * n, 7, generator=generator) * 2 - 1)
            for n in (3, 7)
        ]
        stats = DatasetStats.from_episodes(episodes)
        states, actions = (torch.cat([e[key] for e in episodes]) for key in ("states", "actions"))
        assert torch.equal(stats.state_min, states.amin(0))
        assert torch.equal(stats.state_max, states.amax(0))
        assert torch.equal(stats.action_min[:6], actions.amin(0)[:6])
        assert torch.equal(stats.action_max[:6], actions.amax(0)[:6])

    def test_a_gripper_that_never_closes_is_still_a_command(self):
        actions = torch.zeros(4, 7)
        actions[:, -1] = -1
        stats = DatasetStats.from_episodes([episode(torch.zeros(2, 8), actions)])
        assert (stats.action_min[-1], stats.action_max[-1]) == (0, 1)
        assert stats.from_env_actions(actions)[:, -1].tolist() == [1] * 4

    def test_no_episodes(self):
        with pytest.raises(ValueError, match="no episodes"):
            DatasetStats.from_episodes([])

    def test_json_round_trip(self, stats, tmp_path):
        stats.to_json(tmp_path / "stats.json")
        loaded = DatasetStats.from_json(tmp_path / "stats.json")
        for key, value in BOUNDS.items():
            assert torch.equal(getattr(loaded, key), value)

    def test_released_layout(self, tmp_path):
        """The released file holds more than is read."""
        entry = {f"{scope}_{name}": None for scope in ("global", "stepwise") for name in ("mean", "std", "q01", "q99")}
        content = {"num_episodes": 1693, "num_transition": 273465}
        for name, size in (("state", 8), ("action", 7)):
            content[name] = {"default": {**entry, "global_min": [-1] * size, "global_max": [0.5] * size}}
        path = tmp_path / "dataset_stats.json"
        path.write_text(json.dumps(content))
        assert DatasetStats.from_json(path).action_max.tolist() == [0.5] * 7

    @pytest.mark.parametrize(
        ("path", "value", "message"),
        [
            (("state",), None, "no field 'state.default.global_min'"),
            (("action", "default"), {"global_min": [0] * 7}, "no field 'action.default.global_max'"),
            (("state", "default", "global_max"), [0] * 9, "'state.default.global_max' must be a list of 8 numbers"),
            (("action", "default", "global_min"), [[0] * 7], "'action.default.global_min' must be a list of 7"),
            (("action", "default", "global_min"), ["a"] * 7, "'action.default.global_min' must be a list of 7"),
        ],
    )
    def test_bad_files(self, stats, tmp_path, path, value, message):
        file = tmp_path / "stats.json"
        stats.to_json(file)
        content = json.loads(file.read_text())
        node = content
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value
        file.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message):
            DatasetStats.from_json(file)

    def test_not_json(self, tmp_path):
        (tmp_path / "stats.json").write_text("{")
        with pytest.raises(ValueError, match=r"stats\.json is not JSON"):
            DatasetStats.from_json(tmp_path / "stats.json")


class TestNormalizeProprio:
    def test_in_an_environment(self, stats, counting_env):
        env = TransformedEnv(counting_env(3), NormalizeProprio(stats))
        check_env_specs(env)
        rollout = env.rollout(4, break_when_any_done=False)
        for data in (rollout, rollout["next"]):
            assert torch.equal(data[schema.PROPRIO], stats.normalize_state(data[schema.STATE]))
        assert rollout[schema.STATE][..., 0].max() > 0  # the state moved

    def test_in_a_replay_buffer(self, stats):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(8), batch_size=8, transform=NormalizeProprio(stats))
        buffer.extend(TensorDict({"observation": {"state": torch.randn(8, 8)}}, batch_size=[8]))
        sample = buffer.sample()
        assert torch.equal(sample[schema.PROPRIO], stats.normalize_state(sample[schema.STATE]))

    def test_keeps_its_own_statistics(self, stats):
        transform = NormalizeProprio(stats)
        stats.state_min.zero_()
        assert torch.equal(transform.stats.state_min, BOUNDS["state_min"])

    def test_missing_state(self, stats):
        spec = Composite(observation=Composite(image=Unbounded((3, 2, 4))))
        with pytest.raises(KeyError, match=r"NormalizeProprio needs .*state.*image"):
            NormalizeProprio(stats).transform_observation_spec(spec)
