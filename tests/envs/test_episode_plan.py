from __future__ import annotations

import pickle

import pytest
import torch
from torchrl.envs import TransformedEnv

from wamrl_torchrl import schema
from wamrl_torchrl.envs.episodes import DealEpisodes, EpisodePlan
from wamrl_torchrl.envs.tabletop import TableTopEnv

GROUPS = torch.tensor([[0, 1, 5], [2, 3, 6]])


@pytest.fixture
def plan():
    plan = EpisodePlan()
    yield plan
    plan.close()


def ids(tensordict) -> list[int]:
    return tensordict[schema.EPISODE_ID].squeeze(-1).tolist()


class TestPlan:
    def test_numbers_episodes_and_groups(self, plan):
        episodes = plan.release(GROUPS, 3)
        assert episodes[:, 3].tolist() == [0, 0, 0, 1, 1, 1]
        assert episodes[:, 4].tolist() == list(range(6))
        more = plan.release(GROUPS[:1], 2)
        assert more[:, 3:].tolist() == [[2, 6], [2, 7]]
        assert torch.equal(plan.episode(4), episodes[4])
        assert plan.episode(8) is None

    def test_a_copy_in_another_process_sees_releases(self, plan):
        copy = pickle.loads(pickle.dumps(plan))
        assert copy.episode(0) is None
        episodes = plan.release(GROUPS, 1)
        assert torch.equal(copy.episode(1), episodes[1])
        plan.close()
        assert copy.closed

    def test_long_runs_reuse_the_table(self, plan):
        for _ in range(5):
            episodes = plan.release(GROUPS, 1 << 14)
        assert plan.released == 5 << 15
        assert torch.equal(plan.episode(plan.released - 1), episodes[-1])

    def test_resumes_its_numbering(self, plan):
        plan.release(GROUPS, 3)
        other = EpisodePlan()
        other.load_state_dict(plan.state_dict())
        assert other.release(GROUPS, 1)[:, 3:].tolist() == [[2, 6], [3, 7]]
        other.close()

    @pytest.mark.parametrize("groups", [torch.zeros(2, 4), torch.zeros(3)])
    def test_bad_groups(self, plan, groups):
        with pytest.raises(ValueError, match=r"\[M,3\]"):
            plan.release(groups.long(), 2)

    def test_more_than_it_holds(self, plan):
        with pytest.raises(ValueError, match="plan holds"):
            plan.release(GROUPS, 1 << 16)

    def test_closing_removes_a_temporary_table(self):
        plan = EpisodePlan()
        plan.close()
        assert not plan.directory.exists()


class TestDealing:
    def make_env(self, plan, num_envs=3, **options):
        return TransformedEnv(TableTopEnv(num_envs), DealEpisodes(plan, **options))

    def test_deals_in_order_and_parks_the_rest(self, plan):
        env = self.make_env(plan)
        episodes = plan.release(GROUPS[:1], 2)
        start = env.reset()
        assert ids(start) == [0, 1, schema.PARKED]
        assert start[schema.TASK_ID].squeeze(-1).tolist() == [0, 0, schema.PARKED]
        assert start[schema.ENV_SEED][:2].squeeze(-1).tolist() == episodes[:, 2].tolist()

    def test_an_automatic_reset_deals_the_next_episode(self, plan):
        env = self.make_env(plan, num_envs=1)
        plan.release(GROUPS, 1)
        td = env.reset()
        seen = []
        for _ in range(20):
            seen += ids(td)
            td["action"] = torch.zeros(1, 32, 7)
            _, td = env.step_and_maybe_reset(td)
        assert list(dict.fromkeys(seen)) == [0, 1, schema.PARKED]
        plan.release(GROUPS[:1], 1)
        td["action"] = torch.zeros(1, 32, 7)
        _, td = env.step_and_maybe_reset(td)
        assert ids(td) == [2]

    def test_workers_share_the_order(self, plan):
        dealers = [DealEpisodes(plan, worker=w, num_workers=2) for w in range(2)]
        plan.release(GROUPS, 3)
        dealt = [[int(dealer._deal()[-1]) for _ in range(4)] for dealer in dealers]
        assert dealt == [[0, 2, 4, schema.PARKED], [1, 3, 5, schema.PARKED]]

    @pytest.mark.parametrize("worker", [0, 1, 2])
    def test_a_late_worker_starts_with_what_is_released_next(self, plan, worker):
        plan.release(GROUPS, 2)
        dealer = DealEpisodes(plan, worker=worker, num_workers=3)
        assert int(dealer._deal()[-1]) == schema.PARKED
        plan.release(GROUPS, 2)
        first = int(dealer._deal()[-1])
        assert first >= 4
        assert first % 3 == worker

    def test_stops_after_the_plan_is_closed(self, plan):
        env = self.make_env(plan)
        plan.close()
        with pytest.raises(RuntimeError, match="closed"):
            env.reset()

    def test_bad_worker(self, plan):
        with pytest.raises(ValueError, match=r"worker.*0\.\.1"):
            DealEpisodes(plan, worker=2, num_workers=2)
