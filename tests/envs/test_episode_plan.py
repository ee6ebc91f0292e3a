from __future__ import annotations

import multiprocessing
import os
import pickle
import signal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrl.envs import TransformedEnv

from wamrl_torchrl import schema
from wamrl_torchrl.envs.episodes import DealEpisodes, EpisodePlan, match_episodes
from wamrl_torchrl.envs.tabletop import TableTopEnv

GROUPS = torch.tensor([[0, 1, 5], [2, 3, 6]])


@pytest.fixture
def plan():
    plan = EpisodePlan()
    yield plan
    plan.close()


def ids(tensordict) -> list[int]:
    return tensordict[schema.EPISODE_ID].squeeze(-1).tolist()


def claim(plan: EpisodePlan, held: list[int], *, worker: int = 0) -> list[int]:
    """Claim for slots that hold the tasks ``held``; the episodes' numbers."""
    free = torch.ones(len(held), dtype=torch.bool)
    return plan.claim(free, torch.tensor(held), worker=worker)[:, -1].tolist()


def groups_of(tasks: list[int]) -> torch.Tensor:
    return torch.tensor([[task, 0, 0] for task in tasks])


class TestRelease:
    def test_numbers_episodes_and_groups(self, plan):
        episodes = plan.release(GROUPS, 3)
        assert episodes[:, 3].tolist() == [0, 0, 0, 1, 1, 1]
        assert episodes[:, 4].tolist() == list(range(6))
        more = plan.release(GROUPS[:1], 2)
        assert more[:, 3:].tolist() == [[2, 6], [2, 7]]
        assert (plan.released, plan.unclaimed) == (8, 8)

    def test_a_copy_in_another_process_sees_releases(self, plan):
        copy = pickle.loads(pickle.dumps(plan))
        assert copy.unclaimed == 0
        episodes = plan.release(GROUPS, 1)
        assert torch.equal(copy.claim(torch.ones(2, dtype=torch.bool), torch.tensor([-1, -1])), episodes)
        assert plan.unclaimed == 0
        plan.close()
        assert copy.closed

    def test_long_runs_reuse_the_table(self, plan):
        for turn in range(5):
            plan.release(groups_of([0]), 1 << 14)
            taken = [number for _ in range(4) for number in claim(plan, [0] * (1 << 12))]
            assert taken == list(range(turn << 14, (turn + 1) << 14))

    def test_resumes_its_numbering(self, plan):
        plan.release(GROUPS, 3)
        other = EpisodePlan()
        other.load_state_dict(plan.state_dict())
        assert claim(other, [-1]) == [schema.PARKED]
        assert other.release(GROUPS, 1)[:, 3:].tolist() == [[2, 6], [3, 7]]
        assert claim(other, [-1]) == [6]
        other.close()

    @pytest.mark.parametrize("groups", [torch.zeros(2, 4), torch.zeros(3)])
    def test_bad_groups(self, plan, groups):
        with pytest.raises(ValueError, match=r"\[M,3\]"):
            plan.release(groups.long(), 2)

    def test_more_than_it_holds(self, plan):
        plan.release(GROUPS, 3)
        with pytest.raises(ValueError, match=r"plan holds \d+, 6 are waiting"):
            plan.release(GROUPS, (1 << 15) - 2)


class TestMatch:
    @given(
        tasks=st.lists(st.integers(0, 4), max_size=20),
        held=st.lists(st.integers(-1, 5), min_size=1, max_size=8),
        others=st.lists(st.integers(0, 4), max_size=8),
    )
    @settings(max_examples=60, deadline=None)
    def test_properties(self, tasks, held, others):
        rows = match_episodes(
            torch.tensor(tasks, dtype=torch.int64), torch.tensor(held), torch.tensor([*held, *others])
        ).tolist()
        given_away = [row for row in rows if row >= 0]
        assert len(set(given_away)) == len(given_away) == min(len(tasks), len(held)), "as many as there can be, once"
        for task in set(tasks):
            of_task = [row for row, its in enumerate(tasks) if its == task]
            taken = [row for row in of_task if row in given_away]
            assert taken == of_task[: len(taken)], "in the order of release"
            stayed = sum(row in of_task for row, own in zip(rows, held, strict=True) if own == task)
            assert stayed == min(len(of_task), held.count(task)), "nobody leaves a task that has an episode for it"

    @pytest.mark.parametrize(
        ("tasks", "held", "others", "rows"),
        [
            ([0, 0, 0, 1, 1], [-1, -1, -1], [], [0, 3, 1]),  # 3:2, 1.5:2, 1.5:1
            ([1, 0], [-1, -1], [], [0, 1]),  # a tie goes to the older episode
            ([0, 0, 0, 0, 1], [-1], [0, 0, 0, 0], [4]),  # 4 episodes for 5 slots against 1 for 1
            ([0, 0, 0, 0, 1], [-1], [0, 0], [0]),  # 4 episodes for 3 slots against 1 for 1
            ([0, 1], [1, 0], [], [1, 0]),
            ([0, 1], [1, 1], [], [1, 0]),
            ([], [0], [], [-1]),
        ],
    )
    def test_who_is_given_what(self, tasks, held, others, rows):
        found = match_episodes(torch.tensor(tasks, dtype=torch.int64), torch.tensor(held), torch.tensor(held + others))
        assert found.tolist() == rows


def run_workload(
    plan: EpisodePlan, tasks: list[int], durations: torch.Tensor, workers: list[int], *, affine: bool = True
) -> tuple[list[int], int, int]:
    """Run a group for each of ``tasks``, all released at once.

    Args:
        durations: of each episode.
        workers: slots of each worker.
        affine: whether the plan is told the tasks; else it deals in the order of release.

    Returns:
        the episodes in the order of their claims, changes of a slot's task, and the time that all took.
    """
    group_size = len(durations) // len(tasks)
    plan.release(groups_of(tasks if affine else [0] * len(tasks)), group_size)
    held = [torch.full((slots,), -1) for slots in workers]
    ends = [torch.zeros(slots, dtype=torch.int64) for slots in workers]
    claimed, changes, time = [], 0, 0
    while plan.unclaimed:
        for worker, (own, end) in enumerate(zip(held, ends, strict=True)):
            for slot, episode in enumerate(plan.claim(end <= time, own, worker=worker)[:, -1].tolist()):
                if episode != schema.PARKED:
                    task = tasks[episode // group_size]
                    claimed.append(episode)
                    changes += int(own[slot]) not in (task, -1)
                    own[slot] = task
                    end[slot] = time + int(durations[episode])
        time += 1
    return claimed, changes, int(torch.cat(ends).max())


class TestClaims:
    @given(
        workers=st.lists(st.integers(1, 4), min_size=1, max_size=3),
        tasks=st.lists(st.integers(0, 3), min_size=1, max_size=5),
        group_size=st.integers(1, 4),
        seed=st.integers(0, 99),
    )
    @settings(max_examples=25, deadline=None)
    def test_groups_complete_for_any_number_of_workers_and_slots(self, workers, tasks, group_size, seed):
        durations = torch.randint(1, 6, (len(tasks) * group_size,), generator=torch.Generator().manual_seed(seed))
        runs = []
        for _ in range(2):
            plan = EpisodePlan()
            runs.append(run_workload(plan, tasks, durations, workers))
            plan.close()
        assert sorted(runs[0][0]) == list(range(len(durations))), "every episode exactly once"
        assert runs[0] == runs[1], "the same resets are dealt the same episodes"

    def test_slots_keep_their_task(self):
        """Ten tasks' groups of 8 on 8 slots, against dealing in the order of release."""
        generator = torch.Generator().manual_seed(0)
        tasks = torch.randint(10, (32,), generator=generator).tolist()
        durations = torch.randint(10, 40, (256,), generator=generator)
        found = {}
        for affine in (True, False):
            plan = EpisodePlan()
            _, changes, time = run_workload(plan, tasks, durations, [4, 4], affine=affine)
            found[affine] = changes, time
            plan.close()
        assert found[True][0] < found[False][0] / 8, found
        assert found[True][1] < 1.05 * found[False][1], "no slot waits for it"

    def test_slots_that_are_not_free_and_slots_without_work(self, plan):
        plan.release(GROUPS[:1], 2)
        dealt = plan.claim(torch.tensor([False, True, True, True]), torch.tensor([0, -1, -1, -1]))
        assert dealt[:, -1].tolist() == [schema.PARKED, 0, 1, schema.PARKED]
        assert dealt[1].tolist() == [0, 1, 5, 0, 0]
        assert (dealt[[0, 3]] == schema.PARKED).all()

    def test_workers_know_of_each_others_tasks(self, plan):
        plan.release(groups_of([0, 1]), 3)
        assert claim(plan, [0, 0], worker=1) == [0, 1]
        assert claim(plan, [-1], worker=0) == [3], "task 0 has its slots"

    def test_more_slots_than_it_knows(self, plan):
        with pytest.raises(ValueError, match="4097"):
            claim(plan, [0] * 4097)


class TestRequeue:
    def test_deals_the_same_ids_again(self, plan):
        episodes = plan.release(GROUPS, 2)
        assert claim(plan, [0, 2, 0, 2]) == [0, 2, 1, 3]
        plan.requeue(torch.tensor([2, 1]))
        assert plan.unclaimed == 2
        dealt = plan.claim(torch.ones(3, dtype=torch.bool), torch.tensor([0, 2, -1]))
        assert torch.equal(dealt[:2], episodes[[1, 2]])
        assert dealt[2, -1] == schema.PARKED

    def test_gives_up_after_so_many_attempts(self):
        plan = EpisodePlan(max_attempts=2)
        plan.release(GROUPS, 1)
        claim(plan, [0, 2])
        plan.requeue(torch.tensor([0, 1]))
        claim(plan, [0, 2])
        with pytest.raises(RuntimeError, match=r"2 attempts: task_id 2, init_state_id 3, env_seed 6, .*episode_id 1$"):
            plan.requeue(torch.tensor([1]))
        plan.close()

    @pytest.mark.parametrize("episode", [-1, 1, 2])
    def test_of_what_is_not_claimed(self, plan, episode):
        plan.release(GROUPS, 1)
        claim(plan, [-1])
        with pytest.raises(ValueError, match=rf"claimed.*{episode}"):
            plan.requeue(torch.tensor([episode]))

    @given(steps=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=25))
    @settings(max_examples=25, deadline=None)
    def test_everything_released_is_claimed_once_and_once_more_when_lost(self, steps):
        plan = EpisodePlan(max_attempts=99)
        expected, claimed = [], []
        for action, count in steps:
            if action == 0:
                expected += plan.release(groups_of([count % 3]), count)[:, -1].tolist()
            elif action == 1:
                claimed += [number for number in claim(plan, [count % 3] * count) if number != schema.PARKED]
            else:
                lost = [
                    number
                    for number in dict.fromkeys(claimed[:count])
                    if claimed.count(number) == expected.count(number)
                ]
                plan.requeue(torch.tensor(lost, dtype=torch.int64))
                expected += lost
        while plan.unclaimed:
            claimed += [number for number in claim(plan, [0, 1, 2]) if number != schema.PARKED]
        plan.close()
        assert sorted(claimed) == sorted(expected)


def claim_all(plan: EpisodePlan, worker: int, barrier, results) -> None:
    barrier.wait()
    claimed, held = [], torch.tensor([worker, -1])
    while plan.released < 600 or plan.unclaimed:
        dealt = plan.claim(torch.ones(2, dtype=torch.bool), held, worker=worker)
        claimed += [number for number in dealt[:, -1].tolist() if number != schema.PARKED]
    results.put(claimed)


def claim_and_die(plan: EpisodePlan) -> None:
    claim(plan, [-1, -1])
    with plan._lock():
        os.kill(os.getpid(), signal.SIGKILL)


class TestProcesses:
    """Forked, as that takes no time; the tests of collectors share a plan with spawned processes."""

    fork = multiprocessing.get_context("fork")

    def test_deal_every_episode_once(self, plan):
        plan.release(groups_of([0, 1, 2]), 100)
        barrier, results = self.fork.Barrier(3), self.fork.Queue()
        workers = [self.fork.Process(target=claim_all, args=(plan, w, barrier, results)) for w in range(3)]
        for worker in workers:
            worker.start()
        plan.release(groups_of([2, 1, 0]), 100)  # while they claim
        claimed = [results.get(timeout=60) for _ in workers]
        for worker in workers:
            worker.join()
        assert sorted(number for of_worker in claimed for number in of_worker) == list(range(600))
        assert min(map(len, claimed)) > 0

    def test_a_dead_one_keeps_its_claims_and_no_lock(self, plan):
        plan.release(GROUPS, 2)
        process = self.fork.Process(target=claim_and_die, args=(plan,))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert plan.unclaimed == 2
        assert claim(plan, [-1] * 3) == [1, 3, schema.PARKED]
        plan.requeue(torch.tensor([0]))
        assert claim(plan, [-1]) == [0]


class TestDealing:
    def make_env(self, plan, num_envs=3, **options):
        return TransformedEnv(TableTopEnv(num_envs, **options), DealEpisodes(plan))

    def step(self, env, td):
        td["action"] = torch.zeros(*env.batch_size, 32, 7)
        return env.step_and_maybe_reset(td)[1]

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
            td = self.step(env, td)
        assert list(dict.fromkeys(seen)) == [0, 1, schema.PARKED]
        plan.release(GROUPS[:1], 1)
        assert ids(self.step(env, td)) == [2]

    def test_slots_keep_the_task_they_hold_while_parked(self, plan):
        env = self.make_env(plan, num_envs=2, max_episode_steps=8)
        plan.release(GROUPS, 1)
        td = env.reset()
        assert td[schema.TASK_ID].squeeze(-1).tolist() == [0, 2]
        td = self.step(env, td)
        assert ids(td) == [schema.PARKED] * 2
        plan.release(GROUPS.flip(0), 1)
        assert self.step(env, td)[schema.TASK_ID].squeeze(-1).tolist() == [0, 2]

    def test_asks_nothing_of_slots_that_are_still_starting(self, plan):
        env = self.make_env(plan, max_episode_steps=8)
        td = env.reset()
        plan.release(GROUPS, 3)
        env.base_env._starting[1] = torch.tensor([0, 0, 0, 9, 9])  # until the next reset: the table top starts at once
        assert env.base_env.pending.tolist() == [False, True, False]
        td = self.step(env, td)
        assert ids(td) == [0, 9, 3]
        assert plan.unclaimed == 4

    def test_starts_from_stored_states(self, plan):
        stored = TableTopEnv(1).demonstrate(torch.tensor([[2, 3, 6, 0, 0]]), render=False)[0][schema.SIM_STATES][-4:]
        env = self.make_env(plan, num_envs=4, start_states={2: stored})
        row = schema.PLAIN_INIT_STATES + 1
        plan.release(torch.tensor([[2, row, 6], [2, 3, 6]]), 2)
        td = env.reset()
        assert td[schema.INIT_STATE_ID].squeeze(-1).tolist() == [row, row, 3, 3]
        td["action"] = torch.zeros(4, 32, 7)
        states = env.step(td)["next", schema.SIM_STATES][:, 0]
        assert torch.equal(states[:2], stored[[1, 1]])
        assert not torch.equal(states[2], stored[1])

    def test_stops_after_the_plan_is_closed(self, plan):
        env = self.make_env(plan)
        plan.close()
        with pytest.raises(RuntimeError, match="closed"):
            env.reset()

    def test_a_closed_plan_removes_temporary_tables(self):
        plan = EpisodePlan()
        plan.release(GROUPS, 1)
        plan.close()
        assert not plan.directory.exists()
        with pytest.raises(RuntimeError, match="closed"):
            plan.release(GROUPS, 1)

    def test_bad_options(self, plan):
        with pytest.raises(ValueError, match="max_attempts"):
            EpisodePlan(max_attempts=0)
        with pytest.raises(ValueError, match=r"worker.*0\.\."):
            DealEpisodes(plan, worker=-1)
