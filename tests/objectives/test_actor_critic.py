from __future__ import annotations

import pytest
import torch
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.envs import Compose

from tests.conftest import make_policy, make_record
from wamrl_torchrl import schema
from wamrl_torchrl.config import CriticConfig
from wamrl_torchrl.learner import ValueUpdate
from wamrl_torchrl.modules.value import ValueHead
from wamrl_torchrl.objectives.transforms import CriticAdvantage, GroupAdvantage

LENGTHS, WON = (3, 1, 4, 2), (True, False, True, False)


@pytest.fixture
def policy():
    return make_policy()


@pytest.fixture
def rollout(policy):
    """Four episodes of one group, of 3, 1, 4 and 2 decisions; the first and the third succeed."""
    record = make_record(policy, sum(LENGTHS))
    lengths = torch.tensor(LENGTHS)
    episode = torch.arange(4).repeat_interleave(lengths)
    index = torch.cat([torch.arange(n) for n in LENGTHS])
    last = index == lengths[episode] - 1
    for key in (schema.TASK_ID, schema.INIT_STATE_ID, schema.GROUP_ID):
        record[key].zero_()
    record[schema.EPISODE_ID] = episode[:, None]
    record[schema.CHUNK_INDEX] = index[:, None]
    record["next", "done"] = last[:, None]
    record["next", schema.SUCCESS] = (last & torch.tensor(WON)[episode])[:, None]
    return record.exclude(schema.ADVANTAGE)


def make_head(policy) -> ValueHead:
    torch.manual_seed(3)
    head = ValueHead(policy.model, hidden=16, horizon=8)
    torch.nn.init.normal_(head.head[-1].weight)
    return head


def estimate(values: list[float], rewards: list[float], gamma: float, lmbda: float) -> list[float]:
    """Advantages of one episode by the definition."""
    following = [*values[1:], 0.0]
    errors = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    return [sum((gamma * lmbda) ** k * error for k, error in enumerate(errors[t:])) for t in range(len(errors))]


class TestCriticAdvantage:
    def test_is_generalised_advantage_estimation_episode_by_episode(self, policy, rollout):
        transform = CriticAdvantage(
            make_head(policy), gamma=0.9, lmbda=0.8, weight_task=2.0, normalize=False, batch_size=3
        )
        out = transform.inv(rollout)
        for episode, (length, won) in enumerate(zip(LENGTHS, WON, strict=True)):
            rows = (out[schema.EPISODE_ID] == episode).squeeze(-1)
            values = out["state_value"][rows].squeeze(-1).tolist()
            expected = estimate(values, [0.0] * (length - 1) + [2.0 * won], 0.9, 0.8)
            torch.testing.assert_close(out[schema.ADVANTAGE][rows].squeeze(-1), torch.tensor(expected))
        torch.testing.assert_close(out["value_target"], out[schema.ADVANTAGE] + out["state_value"])

    def test_order_of_rows_does_not_matter(self, policy, rollout):
        transform = CriticAdvantage(make_head(policy), normalize=False, batch_size=16)
        torch.manual_seed(0)
        shuffled = rollout[torch.randperm(len(rollout))]
        first, second = transform.inv(rollout.clone()), transform.inv(shuffled)
        assert torch.equal(first[schema.EPISODE_ID], second[schema.EPISODE_ID])
        torch.testing.assert_close(first[schema.ADVANTAGE], second[schema.ADVANTAGE], rtol=1e-4, atol=1e-5)

    def test_reconstruction_reward_enters_where_there_is_one(self, policy, rollout):
        torch.manual_seed(0)
        rec, mask = torch.randn(len(rollout), 1), torch.rand(len(rollout), 1) < 0.6
        rollout[schema.REWARD_REC], rollout[schema.REWARD_REC_MASK] = rec, mask
        # A head that says 0 and no discount: the advantage is the sum of what is to come.
        head = ValueHead(policy.model, horizon=8)
        out = CriticAdvantage(head, gamma=1.0, lmbda=1.0, weight_rec=0.5, normalize=False).inv(rollout)
        reward = out["next", schema.SUCCESS].float() + 0.5 * rec * mask
        for episode in range(4):
            rows = (out[schema.EPISODE_ID] == episode).squeeze(-1)
            expected = reward[rows].flip(0).cumsum(0).flip(0)
            torch.testing.assert_close(out[schema.ADVANTAGE][rows], expected)

    def test_normalised_advantages(self, policy, rollout):
        advantage = CriticAdvantage(make_head(policy)).inv(rollout)[schema.ADVANTAGE]
        assert float(advantage.mean()) == pytest.approx(0, abs=1e-6)
        assert float(advantage.std()) == pytest.approx(1, abs=1e-4)

    def test_missing_decisions_are_named(self, policy, rollout):
        transform = CriticAdvantage(make_head(policy))
        with pytest.raises(ValueError, match=r"episodes \[2\]"):
            transform.inv(rollout[torch.arange(len(rollout)) != 5])
        with pytest.raises(ValueError, match=r"episodes \[3\]"):
            transform.inv(rollout[:-1])

    def test_missing_reward_is_named(self, policy, rollout):
        with pytest.raises(ValueError, match="reward_rec"):
            CriticAdvantage(make_head(policy), weight_rec=0.1).inv(rollout)

    def test_in_a_replay_buffer_after_the_groups_statistics(self, policy, rollout):
        """Whole groups that agree in success are kept, as no group is compared."""
        rollout["next", schema.SUCCESS][:] = False
        group = GroupAdvantage(4, weight_rec=0, drop_degenerate=False)
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(20), transform=Compose(CriticAdvantage(make_head(policy)), group)
        )
        buffer.extend(rollout)
        assert len(buffer) == len(rollout)
        assert group.report is not None
        assert group.report.successes == 0
        assert float(buffer.storage[:][schema.ADVANTAGE].abs().max()) > 0  # the critic's; the group's would be 0


class TestValueUpdate:
    def test_learns_its_targets(self, policy, rollout):
        head = make_head(policy)
        update = ValueUpdate(head, CriticConfig(lr=1e-2, epochs=200, batch_size=4))
        records = CriticAdvantage(head, gamma=1.0, lmbda=1.0).inv(rollout)
        metrics = update(records)
        with torch.no_grad():
            error = head(records.select("value_features"))["state_value"] - records["value_target"]
        assert float(error.abs().max()) < 0.1
        assert metrics["critic/explained_variance"] < 0.5  # of the head before
