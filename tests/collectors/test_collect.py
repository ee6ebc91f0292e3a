from __future__ import annotations

import logging
from functools import partial

import pytest
import torch

from tests.conftest import make_model, make_stats
from wamrl_torchrl import schema
from wamrl_torchrl.build import EnvFactory
from wamrl_torchrl.collectors.collect import (
    collect_episodes,
    join_episodes,
    make_collector,
    push_weights,
    trainable_weights,
)
from wamrl_torchrl.config import EnvConfig
from wamrl_torchrl.envs.chunk import Outcome
from wamrl_torchrl.envs.episodes import EpisodePlan
from wamrl_torchrl.envs.tabletop import TableTopEnv
from wamrl_torchrl.modules.checkpoint import load_policy, save_policy
from wamrl_torchrl.modules.lora import VideoLoRA, add_video_lora
from wamrl_torchrl.modules.policy import FlowPolicy, FlowSDEConfig
from wamrl_torchrl.modules.trainable import actor_parameters

GROUPS = torch.tensor([[0, 1, 5], [2, 3, 6]])


def make_policy() -> FlowPolicy:
    model = add_video_lora(make_model(), VideoLoRA(rank=2))
    return FlowPolicy(model, make_stats(), sde=FlowSDEConfig(num_steps=3), executed_rows=8)


@pytest.fixture
def plan():
    plan = EpisodePlan()
    yield plan
    plan.close()


@pytest.fixture
def factory(plan):
    config = EnvConfig(name="tabletop", num_envs=3, image_size=[64, 128], max_episode_steps=20)
    return EnvFactory(config, make_stats(), plan)


@pytest.fixture
def collector(request, factory, plan, tmp_path):
    """A collector of the wanted topology, with the learner's policy."""
    policy = make_policy()
    if request.param == "direct":
        collector = make_collector(factory, policy=policy)
    else:
        path = save_policy(policy, tmp_path / "policy")
        collector = make_collector(
            factory,
            topology="multi_async",
            policy_factory=partial(load_policy, path),
            num_workers=2,
            envs_per_worker=3,
        )
    yield collector, iter(collector), policy
    plan.close()
    collector.shutdown()


def collect(iterator, plan, group_size=4):
    released = plan.release(GROUPS, group_size)
    return released, join_episodes(list(collect_episodes(iterator, plan, len(released))))


class TestCollect:
    @pytest.mark.parametrize("collector", ["direct", "multi_async"], indirect=True)
    def test_two_iterations_with_a_push_between(self, collector, plan):
        collector, iterator, policy = collector
        released, rollout = collect(iterator, plan)
        schema.validate_macro_step(rollout)
        last = rollout[rollout["next", "done"].squeeze(-1)]
        found = torch.cat([last[key] for key in schema.EPISODE_KEYS], -1)
        assert torch.equal(found, released), "exactly the released episodes, in order"
        assert rollout[schema.CHUNK_INDEX].squeeze(-1).tolist() == [0, 1, 2] * len(released)
        assert rollout["next", schema.EXECUTED_MASK].sum(-1).tolist() == [8, 8, 4] * len(released)
        torch.testing.assert_close(policy.log_prob_rows(rollout), rollout["log_prob_rows"], rtol=0, atol=1e-4)

        with torch.no_grad():
            for parameter in actor_parameters(policy.model):
                parameter.mul_(1.1)
        push_weights(collector, policy)
        _, rollout = collect(iterator, plan)
        assert rollout["policy_version"].unique().tolist() == [1]
        torch.testing.assert_close(policy.log_prob_rows(rollout), rollout["log_prob_rows"], rtol=0, atol=1e-4)

    @pytest.mark.parametrize("collector", ["multi_async"], indirect=True)
    def test_a_step_of_the_learner_reaches_no_worker_before_the_push(self, collector, plan):
        collector, iterator, policy = collector
        push_weights(collector, policy)
        before = [parameter.clone() for parameter in actor_parameters(policy.model)]
        with torch.no_grad():
            for parameter in actor_parameters(policy.model):
                parameter.zero_()
        _, rollout = collect(iterator, plan)
        with torch.no_grad():
            for parameter, value in zip(actor_parameters(policy.model), before, strict=True):
                parameter.copy_(value)
        torch.testing.assert_close(policy.log_prob_rows(rollout), rollout["log_prob_rows"], rtol=0, atol=1e-4)


class LossyTableTop(TableTopEnv):
    """Loses its simulator at the second decision of some episodes, as often as ``losses`` says by episode."""

    def __init__(self, losses: dict[int, int]) -> None:
        super().__init__(3, image_size=(64, 128), max_episode_steps=20)
        self.losses = dict(losses)

    def _execute(self, slots: torch.Tensor, actions: torch.Tensor, limits: torch.Tensor) -> Outcome:
        outcome = super()._execute(slots, actions, limits)
        lost = torch.zeros(len(slots), dtype=torch.bool)
        for row, (episode, chunk) in enumerate(zip(self._episodes[slots, -1], self._chunk_index[slots], strict=True)):
            if chunk == 1 and self.losses.get(int(episode), 0):
                self.losses[int(episode)] -= 1
                lost[row] = True
        return outcome._replace(executed=outcome.executed * ~lost, success=outcome.success & ~lost, lost=lost)


class TestLostSimulators:
    def collect(self, factory, plan, losses: dict[int, int]):
        env = LossyTableTop(losses)
        collector = make_collector(lambda *_: factory.wrap(env), policy=make_policy())
        try:
            return collect(iter(collector), plan)
        finally:
            collector.shutdown()

    def test_their_episodes_are_run_again(self, factory, plan, caplog):
        with caplog.at_level(logging.WARNING):
            released, rollout = self.collect(factory, plan, {0: 1, 5: 2, 6: 1})
        last = rollout[rollout["next", "done"].squeeze(-1)]
        assert torch.equal(torch.cat([last[key] for key in schema.EPISODE_KEYS], -1), released)
        assert not rollout["next", schema.INVALID].any()
        assert rollout[schema.CHUNK_INDEX].squeeze(-1).tolist() == [0, 1, 2] * len(released)
        assert sum("run again" in text and text.endswith("episode_id 5") for text in caplog.messages) == 2

        other = EpisodePlan()
        undisturbed = self.collect(EnvFactory(factory.config, factory.stats, other), other, {})[1]
        other.close()
        for key in (schema.NOISE_SEED, schema.K_STAR, ("next", schema.SUCCESS)):
            assert torch.equal(rollout[key], undisturbed[key]), key
        # The policy's products are summed in another order when a slot is parked.
        torch.testing.assert_close(rollout["chain"], undisturbed["chain"], rtol=0, atol=1e-4)

    def test_the_run_stops_when_an_episode_loses_every_one(self, factory, plan):
        with pytest.raises(RuntimeError, match=r"3 attempts: task_id 2, init_state_id 3, env_seed 6, .*episode_id 5"):
            self.collect(factory, plan, {5: 3})


class TestRecords:
    def test_do_not_depend_on_the_number_of_slots(self, plan):
        rollouts = []
        for num_envs in (1, 4):
            plan = EpisodePlan()
            config = EnvConfig(name="tabletop", num_envs=num_envs, image_size=[64, 128], max_episode_steps=16)
            collector = make_collector(EnvFactory(config, make_stats(), plan), policy=make_policy())
            rollouts.append(collect(iter(collector), plan, group_size=2)[1])
            collector.shutdown()
            plan.close()
        one, four = rollouts
        for key in (*schema.EPISODE_KEYS, schema.CHUNK_INDEX, schema.NOISE_SEED, schema.K_STAR, ("next", "success")):
            assert torch.equal(one[key], four[key]), key
        torch.testing.assert_close(one["chain"], four["chain"], rtol=0, atol=1e-4)

    def test_keep_outcomes_under_next_only(self, factory, plan):
        collector = make_collector(factory, policy=make_policy())
        _, rollout = collect(iter(collector), plan, group_size=1)
        collector.shutdown()
        keys = set(rollout.keys(True, True))
        assert not keys & set(schema.OUTCOME_KEYS)
        assert not any(isinstance(key, tuple) and key[:2] == ("next", "observation") for key in keys)
        assert {("next", key) for key in schema.OUTCOME_KEYS} <= keys

    def test_join_restores_the_order(self, factory, plan):
        collector = make_collector(factory, policy=make_policy())
        released = plan.release(GROUPS, 2)
        episodes = list(collect_episodes(iter(collector), plan, len(released)))
        collector.shutdown()
        assert torch.equal(join_episodes(episodes[::-1])["chain"], join_episodes(episodes)["chain"])


class TestWeights:
    def test_only_what_is_trained_travels(self):
        policy = make_policy()
        weights = trainable_weights(policy)
        names = {".".join(key) if isinstance(key, tuple) else key for key in weights.keys(True, True)}
        expected = {name for name, p in policy.named_parameters() if p.requires_grad} | {"version"}
        assert names == expected
        assert all(not value.requires_grad for value in weights.values(True, True))


class TestBadOptions:
    @pytest.mark.parametrize(
        ("options", "name"),
        [
            ({"topology": "direct"}, "policy="),
            ({"topology": "multi_async"}, "policy_factory"),
            ({"topology": "star"}, "'star'"),
        ],
    )
    def test_refused_by_name(self, factory, options, name):
        with pytest.raises(ValueError, match=name):
            make_collector(factory, **options)
