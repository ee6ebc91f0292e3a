"""The actor update beyond flow-PPO: adapted rate, self-imitation, controls, and what it reports."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console
from torch.distributions import Normal, kl_divergence
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer

from tests.conftest import make_policy, make_record
from tests.objectives.test_flow_ppo import perturb
from tests.test_train import load, scalars, tensors
from wamrl_torchrl import schema
from wamrl_torchrl.config import AlgoConfig, SelfImitationConfig
from wamrl_torchrl.learner import ActorUpdate, shuffle_advantages
from wamrl_torchrl.policy_change import PolicyChange
from wamrl_torchrl.self_imitation import SuccessReplay
from wamrl_torchrl.train import train

LOSSES = ("flow_ppo", "weighted_flow", "nft", "self_imitation")


def make_buffer(policy, update: ActorUpdate, batch: int = 8) -> TensorDictReplayBuffer:
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(batch), sampler=SamplerWithoutReplacement(), batch_size=update.config.minibatch_size
    )
    record = make_record(policy, batch)
    update.loss.prepare(record, batch_size=4)
    buffer.extend(record)
    return buffer


def make_replay(policy, rollout, **options) -> SuccessReplay:
    keys = [*policy.replay_keys, ("next", schema.EXECUTED_MASK)]
    replay = SuccessReplay(options.pop("capacity", 16), batch_size=4, keys=keys, **options)
    replay.add(rollout)
    return replay


def won(record, *episodes: int):
    record["next", schema.SUCCESS][list(episodes)] = True
    return record


class TestLosses:
    @pytest.mark.parametrize("name", LOSSES)
    def test_trains_the_action_expert_and_reports(self, name):
        policy = make_policy()
        update = ActorUpdate(
            policy, AlgoConfig(actor_loss=name, minibatch_size=4, actor_lr=1e-3, epochs=2, target_kl=None)
        )
        replay = make_replay(policy, won(make_record(policy, 8), 1, 5))
        before = {key: value.clone() for key, value in policy.named_parameters()}
        metrics = update(make_buffer(policy, update), replay)
        changed = {key for key, value in policy.named_parameters() if not torch.equal(value, before[key])}
        assert changed
        assert all("mixtures.action" in key for key in changed)
        assert metrics["actor/steps"] == (2 if name == "self_imitation" else 4)
        assert metrics["actor/kl"] > 0
        assert metrics["actor/velocity_change"] > 0
        assert metrics["actor/lr"] == 1e-3

    @pytest.mark.parametrize("name", LOSSES)
    def test_rate_zero_changes_nothing(self, name):
        policy = make_policy()
        update = ActorUpdate(policy, AlgoConfig(actor_loss=name, minibatch_size=4, actor_lr=0.0))
        before = [parameter.clone() for parameter in policy.parameters()]
        metrics = update(make_buffer(policy, update), make_replay(policy, won(make_record(policy, 4), 0)))
        assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
        assert metrics["actor/kl"] == metrics["actor/velocity_change"] == 0
        assert metrics.get("actor/clip_fraction", 0) == 0

    def test_self_imitation_beside_flow_ppo_adds_its_loss(self):
        policy = make_policy()
        options = {"minibatch_size": 8, "actor_lr": 0.0, "self_imitation": SelfImitationConfig(weight=0.5)}
        update = ActorUpdate(policy, AlgoConfig(**options))
        buffer = make_buffer(policy, update)
        torch.manual_seed(0)
        metrics = update(buffer, make_replay(policy, won(make_record(policy, 8), 0, 3)))
        assert metrics["actor/loss_imitation"] > 0
        # Nothing has succeeded yet.
        assert "actor/loss_imitation" not in update(buffer, make_replay(policy, make_record(policy, 8)))

    def test_the_kl_stops_a_likelihood_free_update_too(self):
        policy = make_policy()
        options = {"minibatch_size": 4, "actor_lr": 1e-2, "epochs": 9, "target_kl": 1e-6}
        update = ActorUpdate(policy, AlgoConfig(actor_loss="nft", **options))
        assert update(make_buffer(policy, update))["actor/steps"] == 2

    def test_something_beside_happens_after_every_step(self):
        policy = make_policy()
        update = ActorUpdate(policy, AlgoConfig(minibatch_size=4, epochs=2, target_kl=None))
        done = []
        metrics = update(make_buffer(policy, update), beside=lambda: done.append(1))
        assert len(done) == metrics["actor/steps"] == 4

    @pytest.mark.parametrize(("steps", "expected"), [(None, 1), (5, 5)])
    def test_self_imitation_takes_as_many_steps_as_asked_for(self, steps, expected):
        policy = make_policy()
        options = {"actor_loss": "self_imitation", "target_kl": None, "minibatch_size": 4}
        update = ActorUpdate(policy, AlgoConfig(**options, self_imitation=SelfImitationConfig(steps=steps)))
        buffer = make_buffer(policy, update)
        assert update(buffer, make_replay(policy, won(make_record(policy, 8), 1, 5)))["actor/steps"] == expected
        # Nothing has succeeded yet.
        assert update(buffer, make_replay(policy, make_record(policy, 8)))["actor/steps"] == 0


class TestAverage:
    def test_follows_the_steps_and_is_put_in_for_a_while(self):
        policy = make_policy()
        update = ActorUpdate(policy, AlgoConfig(minibatch_size=4, actor_lr=1e-2, target_kl=None, actor_average=0.75))
        buffer, expected = make_buffer(policy, update), None

        def follow() -> None:
            nonlocal expected
            now = [parameter.detach().clone() for parameter in update.parameters]
            expected = now if expected is None else [0.75 * a + 0.25 * b for a, b in zip(expected, now, strict=True)]

        update(buffer, beside=follow)
        present = [parameter.detach().clone() for parameter in update.parameters]
        with update.averaged():
            for parameter, value in zip(update.parameters, expected, strict=True):
                torch.testing.assert_close(parameter.detach(), value, rtol=1e-5, atol=1e-7)
        assert all(torch.equal(a, b) for a, b in zip(update.parameters, present, strict=True))

    def test_there_is_none_by_default(self):
        policy = make_policy()
        update = ActorUpdate(policy, AlgoConfig(minibatch_size=4, actor_lr=1e-2))
        update(make_buffer(policy, update))
        present = [parameter.detach().clone() for parameter in update.parameters]
        with update.averaged():
            assert all(torch.equal(a, b) for a, b in zip(update.parameters, present, strict=True))


class TestRate:
    @pytest.mark.parametrize(
        ("kl", "expected"), [(0.07, 5e-4), (0.05, 1e-3), (0.02, 1e-3), (0.014, 2e-3), (0.0, 2e-3), (float("nan"), 1e-3)]
    )
    def test_follows_the_kl(self, kl, expected):
        update = ActorUpdate(make_policy(), AlgoConfig(actor_lr=1e-3, kl_target=0.03))
        update._adapt_rate(kl)
        assert update.optimizer.param_groups[0]["lr"] == pytest.approx(expected)

    def test_stays_within_its_range(self):
        update = ActorUpdate(make_policy(), AlgoConfig(actor_lr=1e-3, kl_target=0.03, lr_range=[8e-4, 1.5e-3]))
        update._adapt_rate(0.0)
        assert update.optimizer.param_groups[0]["lr"] == 1.5e-3
        for _ in range(2):
            update._adapt_rate(1.0)
        assert update.optimizer.param_groups[0]["lr"] == 8e-4

    def test_falls_linearly_to_the_last_iteration(self):
        update = ActorUpdate(make_policy(), AlgoConfig(actor_lr=1e-3, actor_lr_final=2e-4))
        rates = []
        for progress in (0.0, 0.5, 1.0, 1.5):
            update.anneal(progress)
            rates.append(update.optimizer.param_groups[0]["lr"])
        assert rates == pytest.approx([1e-3, 6e-4, 2e-4, 2e-4])

    def test_is_fixed_by_default(self):
        update = ActorUpdate(make_policy(), AlgoConfig(actor_lr=1e-3))
        update._adapt_rate(1.0)
        update.anneal(0.5)
        assert update.optimizer.param_groups[0]["lr"] == 1e-3


class TestPolicyChange:
    def test_is_the_divergence_of_the_steps(self):
        policy = make_policy(stochastic_steps=2)
        record = make_record(policy, 5)
        change, before = PolicyChange(policy, record), policy.transitions(record)
        assert change.read() == {"kl": 0.0, "velocity_change": 0.0}
        perturb(policy)
        now, mask = policy.transitions(record), record["next", schema.EXECUTED_MASK][:, None]
        std = now.std[..., None, None]
        divergence = (kl_divergence(Normal(before.mean, std), Normal(now.mean, std)).sum(-1) * mask).sum(-1).mean()
        assert change.read()["kl"] == pytest.approx(divergence.item(), rel=1e-3)
        square = (now.velocity - before.velocity).square().mean(-1)
        rms = ((square * mask).sum(-1) / mask.sum(-1)).mean().sqrt()
        assert change.read()["velocity_change"] == pytest.approx(rms.item(), rel=1e-3)


class TestReplay:
    def test_keeps_the_newest_successful_decisions(self):
        policy = make_policy()
        rollout = won(make_record(policy, 8), 0, 2, 5, 7)
        replay = make_replay(policy, rollout, capacity=3)
        assert len(replay) == 3
        kept = {tuple(state.tolist()) for state in replay.buffer.storage[:3][schema.PROPRIO]}
        assert kept == {tuple(state.tolist()) for state in rollout[[2, 5, 7]][schema.PROPRIO]}
        sample = replay.sample()
        assert sample.batch_size == (4,)
        assert bool((sample[schema.ADVANTAGE] == 1).all())

    def test_every_decision_of_a_successful_episode_counts(self):
        policy = make_policy()
        rollout = make_record(policy, 6)
        rollout[schema.EPISODE_ID] = torch.tensor([7, 7, 8, 8, 8, 9])[:, None]
        assert len(make_replay(policy, won(rollout, 4))) == 3
        assert len(make_replay(policy, won(rollout, 1))) == 5

    def test_a_decision_counts_less_the_longer_success_took(self):
        policy = make_policy()
        rollout = make_record(policy, 6)
        rollout[schema.EPISODE_ID] = torch.tensor([7, 7, 8, 8, 8, 9])[:, None]
        rollout["next", "done"] = torch.tensor([0, 1, 0, 0, 1, 1], dtype=torch.bool)[:, None]
        replay = make_replay(policy, won(rollout, 4, 5), discount=0.5)
        assert replay.buffer.storage[:4][schema.ADVANTAGE].squeeze(-1).tolist() == [0.25, 0.5, 1.0, 1.0]

    def test_survives_a_checkpoint(self, tmp_path):
        policy = make_policy()
        first = make_replay(policy, won(make_record(policy, 8), 0, 2, 5))
        first.dump(tmp_path)
        second = make_replay(policy, make_record(policy, 2))
        assert len(second) == 0
        second.load(tmp_path)
        assert len(second) == 3
        for replay in (first, second):
            replay.add(won(make_record(policy, 4, seed=9), 1))
        samples = []
        for replay in (first, second):
            torch.manual_seed(0)
            samples.append(replay.sample())
        assert bool((samples[0] == samples[1]).all())

    def test_an_empty_one_leaves_nothing(self, tmp_path):
        policy = make_policy()
        make_replay(policy, make_record(policy, 2)).dump(tmp_path)
        assert list(tmp_path.iterdir()) == []


class TestShuffle:
    def test_exchanges_whole_episodes(self):
        policy = make_policy()
        record = make_record(policy, 30)
        record[schema.EPISODE_ID] = (torch.arange(30) // 3)[:, None]
        record[schema.ADVANTAGE] = (torch.arange(30) // 3)[:, None].float()
        torch.manual_seed(0)
        shuffle_advantages(record)
        after = record[schema.ADVANTAGE].view(10, 3)
        assert bool((after == after[:, :1]).all())
        assert sorted(after[:, 0].tolist()) == list(range(10))
        assert after[:, 0].tolist() != list(range(10))

    def test_exchanges_decisions_where_each_has_its_own(self):
        policy = make_policy()
        record = make_record(policy, 30)
        record[schema.EPISODE_ID] = (torch.arange(30) // 3)[:, None]
        record[schema.ADVANTAGE] = torch.arange(30.0)[:, None]
        torch.manual_seed(0)
        shuffle_advantages(record, by_episode=False)
        after = record[schema.ADVANTAGE].squeeze(-1).tolist()
        assert sorted(after) == list(range(30))
        assert after != list(range(30))

    def test_as_many_episodes_are_imitated_but_others(self):
        policy = make_policy()
        rollout = won(make_record(policy, 40), *range(10))
        keys = [schema.PROPRIO, *policy.replay_keys, ("next", schema.EXECUTED_MASK)]
        replay = SuccessReplay(64, batch_size=4, keys=keys)
        torch.manual_seed(0)
        replay.add(rollout, shuffled=True)
        assert len(replay) == 10
        chosen = {tuple(state.tolist()) for state in replay.buffer.storage[:10][schema.PROPRIO]}
        assert chosen != {tuple(state.tolist()) for state in rollout[:10][schema.PROPRIO]}
        assert int(rollout["next", schema.SUCCESS].sum()) == 10


class TestRun:
    def test_self_imitation_and_an_adapted_rate_resume_bit_for_bit(self, tmp_path):
        options = (
            "algo.mode=actor_only",
            "algo.actor_loss=weighted_flow",
            "algo.self_imitation.weight=0.5",
            "algo.self_imitation.batch_size=8",
            "algo.self_imitation.discount=0.9",
            "algo.actor_average=0.5",
            "algo.kl_target=1e-9",
            "algo.weight_rec=0",
            "algo.shuffle_advantages=true",
        )
        console = Console(quiet=True)
        train(load(tmp_path / "whole", *options), console)
        train(load(tmp_path / "parts", *options, "algo.iterations=1"), console)
        train(load(tmp_path / "parts", *options, "resume=true"), console)
        whole, parts = tensors(tmp_path / "whole" / "policy"), tensors(tmp_path / "parts" / "policy")
        assert [key for key, value in whole.items() if not torch.equal(value, parts[key])] == []
        assert scalars(tmp_path / "parts", "actor/lr") == {1: 5e-4, 2: 2.5e-4}
        assert scalars(tmp_path / "whole", "actor/loss_imitation").keys() == {1, 2}
