from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from wamrl_torchrl import schema
from wamrl_torchrl.objectives.transforms import GroupAdvantage


def make_rollout(outcomes: dict[int, list[bool]], *, lengths=None, rec=None, first_episode: int = 0) -> TensorDict:
    """Episodes by group: ``outcomes[group]`` are the successes of its episodes."""
    rows, episode = [], first_episode
    for group, wins in outcomes.items():
        for won in wins:
            length = 2 if lengths is None else lengths[episode % len(lengths)]
            for step in range(length):
                last = step == length - 1
                ids = {"task_id": group % 3, "init_state_id": group, "env_seed": 7, "group_id": group}
                row = {key: torch.tensor([value]) for key, value in {**ids, "episode_id": episode}.items()}
                reward = 0.0 if rec is None else rec(episode, step)
                row["next"] = {
                    "done": torch.tensor([last]),
                    "success": torch.tensor([last and won]),
                    "reward_rec": torch.tensor([reward]),
                    "reward_rec_mask": torch.tensor([reward == reward]),
                }
                rows.append(TensorDict(row, batch_size=[]))
            episode += 1
    rollout = torch.stack(rows)
    return rollout.set(("next", "reward_rec"), rollout["next", "reward_rec"].nan_to_num(99.0))


class TestAdvantage:
    def test_is_the_return_minus_the_groups_mean(self):
        rollout = make_rollout({0: [True, False, False, False], 1: [True, True, True, False]})
        out = GroupAdvantage(4, weight_rec=0).inv(rollout)
        expected = [0.75, -0.25, -0.25, -0.25, 0.25, 0.25, 0.25, -0.75]
        assert out["advantage"].shape == (16, 1)
        torch.testing.assert_close(out["advantage"][::2, 0], torch.tensor(expected))
        assert torch.equal(out["advantage"][::2], out["advantage"][1::2])

    def test_normalised_by_the_unbiased_deviation(self):
        out = GroupAdvantage(4, weight_rec=0, normalize=True).inv(make_rollout({0: [True, False, False, False]}))
        returns = torch.tensor([1.0, 0, 0, 0])
        torch.testing.assert_close(out["advantage"][::2, 0], (returns - 0.25) / (returns.std() + 1e-6))

    def test_return_takes_the_mean_of_valid_reconstruction_rewards(self):
        """NaN stands for a decision without reward; longer episodes are not paid more."""
        values = {0: [1.0, 3.0, float("nan")], 1: [float("nan")] * 3}
        rollout = make_rollout({0: [True, False]}, lengths=[3], rec=lambda episode, step: values[episode][step])
        out = GroupAdvantage(2, weight_task=1.0, weight_rec=0.1).inv(rollout)
        torch.testing.assert_close(out["return"][[0, 3], 0], torch.tensor([1.2, 0.0]))

    @given(
        wins=st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=4),
        lengths=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    )
    @settings(max_examples=30, deadline=None)
    def test_kept_groups_are_the_mixed_ones_and_their_advantages_sum_to_zero(self, wins, lengths):
        rollout = make_rollout(dict(enumerate(wins)), lengths=lengths)
        transform = GroupAdvantage(4, weight_rec=0.1)
        out = transform.inv(rollout)
        mixed = [group for group, w in enumerate(wins) if 0 < sum(w) < 4]
        assert (out is None) == (not mixed)
        if out is not None:
            assert out["group_id"].unique().tolist() == mixed
            last = out[out["next", "done"].squeeze(-1)]
            for group in mixed:
                total = last["advantage"][last["group_id"] == group].sum()
                assert float(total) == pytest.approx(0, abs=1e-5)
        assert transform.report.kept == len(mixed)
        assert transform.report.successes == sum(map(sum, wins))


class TestDropping:
    @pytest.mark.parametrize("won", [True, False])
    def test_judged_on_success_whatever_the_dense_reward(self, won):
        rollout = make_rollout({0: [won] * 4}, rec=lambda episode, step: float(episode))
        assert GroupAdvantage(4, weight_rec=0.5).inv(rollout) is None
        kept = GroupAdvantage(4, weight_rec=0.5, drop_degenerate=False).inv(rollout)
        assert len(kept) == 8
        assert float(kept["advantage"].abs().max()) > 0

    def test_nothing_to_write_leaves_the_buffer_empty(self):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), transform=GroupAdvantage(2, weight_rec=0))
        buffer.extend(make_rollout({0: [True, True]}))
        assert len(buffer) == 0
        buffer.extend(make_rollout({1: [True, False]}, first_episode=2))
        assert len(buffer) == 4


class TestIncompleteGroups:
    def test_wait_until_they_are_complete(self):
        transform = GroupAdvantage(4, weight_rec=0)
        whole = make_rollout({0: [True, False, True, False], 1: [True, True, False, False]})
        first, second = whole[:6], whole[6:]
        assert transform.inv(first) is None
        assert transform.report.groups == 0
        out = transform.inv(second)
        assert torch.equal(out["advantage"], GroupAdvantage(4, weight_rec=0).inv(whole)["advantage"])

    def test_survive_a_checkpoint(self):
        whole = make_rollout({0: [True, False]})
        first, second = GroupAdvantage(2, weight_rec=0), GroupAdvantage(2, weight_rec=0)
        first.inv(whole[:2])
        second.load_state_dict(first.state_dict())
        assert len(second.inv(whole[2:])) == 4


class TestLostSimulators:
    """An episode whose simulator was lost counts neither as a failure nor as a member of its group."""

    def spoil(self, rollout: TensorDict, episode: int) -> TensorDict:
        rollout = rollout.clone()
        last = (rollout["episode_id"] == episode) & rollout["next", "done"]
        return rollout.set(("next", schema.INVALID), last)

    def test_a_group_waits_for_the_next_attempt(self):
        rollout = make_rollout({0: [True, False, True, False], 1: [True, False, False, False]})
        spoilt = self.spoil(rollout, 5)
        again = spoilt[(rollout["episode_id"] == 5).squeeze(-1)]
        again["next", schema.INVALID] = torch.zeros_like(again["next", schema.INVALID])
        expected = GroupAdvantage(4, weight_rec=0).inv(rollout)
        transform = GroupAdvantage(4, weight_rec=0)
        first = transform.inv(spoilt)
        assert first["group_id"].unique().tolist() == [0]
        assert transform.report.episodes == 4
        second = transform.inv(again)
        assert torch.equal(torch.cat([first, second])["advantage"].sort(0).values, expected["advantage"].sort(0).values)

        both = GroupAdvantage(4, weight_rec=0).inv(torch.cat([spoilt, again]))
        assert torch.equal(both["advantage"].sort(0).values, expected["advantage"].sort(0).values)

    def test_nothing_else_is_there(self):
        rollout = make_rollout({0: [True]})
        transform = GroupAdvantage(2, weight_rec=0)
        assert transform.inv(self.spoil(rollout, 0)) is None
        assert transform.report.episodes == 0


class TestTaskWeights:
    def test_prefer_tasks_whose_groups_are_mixed(self):
        transform = GroupAdvantage(4, weight_rec=0, success_momentum=0.0)
        for start in range(0, 64, 8):
            outcomes = {start + 3: [True] * 4, start + 4: [True, False] * 2, start + 5: [False] * 4}
            transform.inv(make_rollout({g - g % 3 + (g - start) % 3: o for g, o in outcomes.items()}))
        tasks = sorted(transform.report.task_success)
        weights = transform.task_weights(tasks, floor=0.1)
        rates = [transform._success[task] for task in tasks]
        expected = [max(0.1, 1 - p**4 - (1 - p) ** 4) for p in rates]
        torch.testing.assert_close(weights, torch.tensor(expected))
        assert float(transform.task_weights([99])) == pytest.approx(1 - 2 * 0.5**4)

        failure = transform.task_weights([*tasks, 99], kind="failure", floor=0.2, gamma=2.0)
        expected = [max(0.2, (1 - p) ** 2) for p in [*rates, 0.5]]
        torch.testing.assert_close(failure, torch.tensor(expected))
        assert transform.task_weights(tasks, kind="failure", gamma=0.0).tolist() == [1.0] * len(tasks)


class TestBadInput:
    def test_group_size(self):
        with pytest.raises(ValueError, match=r"group_size.*1"):
            GroupAdvantage(1)

    def test_episode_without_its_end(self):
        with pytest.raises(ValueError, match=r"episodes \[3\]"):
            GroupAdvantage(4, weight_rec=0).inv(make_rollout({0: [True, False, True, False]})[:-1])

    def test_group_of_different_starts(self):
        rollout = make_rollout({0: [True, False]})
        rollout["env_seed"][-2:] = 8
        with pytest.raises(ValueError, match=r"groups \[0\].*'env_seed'"):
            GroupAdvantage(2, weight_rec=0).inv(rollout)

    def test_group_with_too_many_episodes(self):
        with pytest.raises(ValueError, match=r"groups \[0\].*group_size=2"):
            GroupAdvantage(2, weight_rec=0).inv(make_rollout({0: [True, False, True]}))

    def test_missing_reconstruction_reward(self):
        rollout = make_rollout({0: [True, False]})
        rollout = rollout.exclude(schema.REWARD_REC)
        with pytest.raises(ValueError, match="weight_rec"):
            GroupAdvantage(2).inv(rollout)
