from __future__ import annotations

import pytest
import torch
from torchrl.envs.utils import ExplorationType, check_env_specs, set_exploration_type

from tests.conftest import make_policy, make_record, make_states
from wamrl_torchrl import schema
from wamrl_torchrl.modules.policy import FlowSDEConfig


class TestForward:
    def test_emits_what_the_spec_says(self, policy):
        out = policy(make_states(4)).select(*policy.out_keys)
        assert set(out.keys()) == set(policy.spec.keys())
        assert all(policy.spec[key].is_in(out[0][key]) for key in out.keys())  # noqa: SIM118
        schema.validate_macro_step(out, required=())

    def test_log_prob_sums_the_executed_prefix(self, policy):
        out = policy(make_states(3))
        torch.testing.assert_close(out["action_log_prob"], out["log_prob_rows"][..., :8].sum(-1))

    def test_actions_are_in_the_environments_convention(self, policy):
        out = policy(make_states(4))
        assert torch.equal(out["action"], policy.stats.to_env_actions(out["chain"][:, -1]))
        assert out["action"].abs().max() <= 1
        assert set(out["action"][..., -1].unique().tolist()) <= {-1.0, 1.0}

    def test_noise_belongs_to_the_episode_not_to_the_batch(self, policy):
        states = make_states(5)
        whole = policy(states.clone())
        alone = policy(states[2:3].clone())
        assert torch.equal(whole["noise_seed"][2:3], alone["noise_seed"])
        assert torch.equal(whole["chain"][2:3, 0], alone["chain"][:, 0])
        assert torch.equal(whole["k_star"][2:3], alone["k_star"])
        torch.testing.assert_close(whole["chain"][2:3], alone["chain"], rtol=0, atol=2e-6)

    @pytest.mark.parametrize("key", [schema.EPISODE_ID, schema.CHUNK_INDEX])
    def test_another_decision_has_other_noise(self, policy, key):
        states = make_states(3)
        other = states.clone()
        other[key] += 1
        assert not torch.equal(policy(states)["chain"][:, 0], policy(other)["chain"][:, 0])

    def test_a_single_state_without_batch(self, policy):
        states = make_states(3)
        single = policy(states[1].clone())
        assert single.batch_size == torch.Size([])
        torch.testing.assert_close(single["chain"], policy(states)["chain"][1], rtol=0, atol=2e-6)

    def test_version_is_stamped(self, policy):
        policy.version += 7
        assert policy(make_states(2))["policy_version"].tolist() == [[7], [7]]


class TestDeterministic:
    def test_is_the_ode_and_ignores_the_episode(self, policy):
        states = make_states(3)
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            first = policy(states.clone())
            states["episode_id"] += 100
            second = policy(states.clone())
        assert torch.equal(first["chain"], second["chain"])
        assert (first["k_star"] == -1).all()
        assert (first["action_log_prob"] == 0).all()

    def test_random_and_deterministic_differ(self, policy):
        random = policy(make_states(3))
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            assert not torch.equal(policy(make_states(3))["action"], random["action"])


class TestReplay:
    @pytest.mark.parametrize("steps", ["one_random", 2, "all"])
    def test_record_gives_back_its_log_prob_bit_for_bit(self, steps):
        policy = make_policy(stochastic_steps=steps)
        record = policy(make_states(5))
        assert torch.equal(policy.log_prob_rows(record), record["log_prob_rows"])

    def test_get_dist_is_the_distribution_of_x_next(self):
        policy = make_policy()
        record = make_record(policy, 5)
        log_prob = policy.get_dist(record).log_prob(policy.x_next(record))
        torch.testing.assert_close(log_prob[:, None], record["action_log_prob"], rtol=1e-5, atol=1e-4)

    def test_get_dist_needs_one_step(self):
        policy = make_policy(stochastic_steps=2)
        with pytest.raises(ValueError, match="one stochastic step"):
            policy.get_dist(make_record(policy, 2))


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "name"),
        [
            ({"num_steps": 4, "stochastic_steps": 5}, "K_sde"),
            ({"num_steps": 4, "stochastic_steps": "none"}, "at least one"),
            ({"num_steps": 4, "stochastic_steps": "some"}, "some"),
            ({"num_steps": 4, "stochastic_steps": "all", "ignore_last": True}, "ignore_last"),
            ({"num_steps": 4, "stochastic_steps": 2, "window": (0, 1)}, "window"),
        ],
    )
    def test_sde_options_are_refused_by_name(self, options, name):
        with pytest.raises(ValueError, match=name):
            FlowSDEConfig(**options)

    @pytest.mark.parametrize("rows", [0, 33])
    def test_executed_rows(self, rows):
        with pytest.raises(ValueError, match=f"executed_rows.*{rows}"):
            make_policy(executed_rows=rows)

    def test_ignore_last_never_chooses_the_last_step(self):
        policy = make_policy(ignore_last=True)
        assert int(policy(make_states(60))["k_star"].max()) == 2


def test_policy_drives_an_environment_under_its_specs():
    from torchrl.envs import TransformedEnv

    from wamrl_torchrl.data.stats import NormalizeProprio
    from wamrl_torchrl.envs.tabletop import TableTopEnv

    policy = make_policy()
    env = TransformedEnv(TableTopEnv(3, task_ids=[0, 2]), NormalizeProprio(policy.stats))
    check_env_specs(env)
    rollout = env.rollout(3, policy)
    assert rollout["action"].shape == (3, 3, 32, 7)
    assert torch.equal(policy.log_prob_rows(rollout[:, 1].contiguous()), rollout[:, 1]["log_prob_rows"])
