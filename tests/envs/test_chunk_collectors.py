"""ChunkEnv under collectors and vectorised environments, and the record that comes out."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors import Collector, MultiAsyncCollector
from torchrl.envs import StepCounter, TransformedEnv
from torchrl.envs.utils import RandomPolicy

from tests.envs._chunk import make_env, random_policy
from wamrl_torchrl import schema
from wamrl_torchrl.envs.tabletop import TableTopEnv
from wamrl_torchrl.envs.tabletop_render import render

SMALL = (32, 64)
#: What an environment and a policy without a chain can fill of a record.
ENV_PART = (schema.IMAGE, *schema.EPISODE_KEYS, schema.CHUNK_INDEX, schema.ACTION)
ENV_PART = (*ENV_PART, *(("next", key) for key in (*schema.OUTCOME_KEYS, "reward", schema.REWARD_TASK, "done")))
OBSERVED = (schema.IMAGE, schema.STATE, *schema.EPISODE_KEYS, schema.CHUNK_INDEX)


def check_trajectories(data: TensorDict, *, horizon: int, replan: int) -> int:
    """Check whole trajectories that lie one after another in ``data`` [T]; their number."""
    ends = data["next", "done"].flatten().nonzero().flatten().tolist()
    assert ends[-1] == len(data) - 1
    start = 0
    for end in ends:
        part = data[start : end + 1]
        for key in schema.EPISODE_KEYS:
            assert (part[key] == part[key][0]).all(), key
            assert torch.equal(part["next", key], part[key])
        assert part[schema.CHUNK_INDEX].flatten().tolist() == list(range(len(part)))
        executed = part["next", schema.EXECUTED_MASK].sum(-1)
        assert (executed[:-1] == replan).all()
        success = part["next", schema.SUCCESS][-1].item()
        assert part["next", "reward"].sum().item() == float(success)
        assert success or executed.sum().item() == horizon
        # Each picture shows its own state: the terminal one too, which the next episode must not overwrite.
        states = part["next", schema.SIM_STATES]
        last = states[torch.arange(len(part)), executed]
        assert torch.equal(render(last, SMALL), part["next", "observation", "image"])
        assert torch.equal(render(states[:, 0], SMALL), part["observation", "image"])
        assert torch.equal(last[:-1], states[1:, 0])
        start = end + 1
    return len(ends)


def near_the_end() -> TableTopEnv:
    """Episodes of which random chunks solve some, at different times."""
    demos = make_env(1).demonstrate(torch.tensor([[task, 3, 0, 0, task] for task in range(6)]), render=False)
    stored = {demo["task_id"].item(): demo["sim_states"][-6:-1] for demo in demos}
    ids = [*range(50, 55)]
    return make_env(4, start_states=stored, init_state_ids=ids, max_episode_steps=20)


class TestCollectors:
    @pytest.mark.parametrize("transformed", [False, True])
    def test_whole_trajectories_with_their_own_terminal_observations(self, transformed):
        env = near_the_end()
        env.set_seed(1)
        torch.manual_seed(0)
        create = TransformedEnv(env, StepCounter()) if transformed else env
        collector = Collector(
            create,
            RandomPolicy(env.action_spec),
            frames_per_batch=16,
            total_frames=-1,
            trajs_per_batch=8,
            traj_format="cat",
            auto_register_policy_transforms=False,
        )
        seen, lengths = [], set()
        try:
            for _, data in zip(range(4), collector, strict=False):
                assert check_trajectories(data, horizon=20, replan=8) == 8
                schema.validate_macro_step(data, required=ENV_PART)
                ends = data["next", "done"].flatten()
                seen += data[schema.EPISODE_ID][ends].flatten().tolist()
                lengths |= set((data[schema.CHUNK_INDEX][ends] + 1).flatten().tolist())
        finally:
            collector.shutdown()
        assert len(set(seen)) == len(seen)
        assert lengths == {1, 2, 3}

    def test_automatic_reset_keeps_the_terminal_observation_apart(self):
        env = make_env(3, max_episode_steps=8)
        data = env.rollout(4, break_when_any_done=False)
        assert data["next", "done"].all()
        assert not torch.equal(data["next", "observation", "image"][:, 0], data["observation", "image"][:, 1])
        assert (data["next", schema.CHUNK_INDEX] == 1).all()
        assert (data[schema.CHUNK_INDEX] == 0).all()
        assert len(data[schema.EPISODE_ID].unique()) == 12

    @pytest.mark.slow
    def test_whole_trajectories_from_two_processes(self):
        collector = MultiAsyncCollector(
            [near_the_end, near_the_end],
            random_policy(),
            frames_per_batch=16,
            total_frames=-1,
            trajs_per_batch=8,
            traj_format="cat",
            auto_register_policy_transforms=False,
        )
        try:
            collector.set_seed(3)
            for _, data in zip(range(4), collector, strict=False):
                assert check_trajectories(data, horizon=20, replan=8) >= 1
                schema.validate_macro_step(data, required=ENV_PART)
        finally:
            collector.shutdown()


class TestRecord:
    @pytest.fixture
    def record(self) -> TensorDict:
        torch.manual_seed(0)
        return make_env(3).rollout(3, RandomPolicy(make_env(3).action_spec), break_when_any_done=False)

    def test_the_environments_part_is_valid(self, record):
        schema.validate_macro_step(record, required=ENV_PART)

    @pytest.mark.parametrize("key", ENV_PART)
    def test_a_missing_key_is_named(self, record, key):
        with pytest.raises(KeyError, match=str(key[-1] if isinstance(key, tuple) else key)):
            schema.validate_macro_step(record.exclude(key), required=ENV_PART)

    @pytest.mark.parametrize(
        ("key", "spoil"),
        [
            (schema.IMAGE, lambda x: x.float()),
            (schema.IMAGE, lambda x: x[..., :-2]),
            (schema.STATE, lambda x: x.double()),
            (schema.STATE, lambda x: torch.full_like(x, float("nan"))),
            (schema.TASK_ID, lambda x: x.squeeze(-1)),
            (schema.ENV_SEED, lambda x: x.int()),
            (schema.ACTION, lambda x: x[..., :8, :]),
            (schema.ACTION, lambda x: x / 0),
            (("next", schema.FUTURE_FRAMES), lambda x: x[..., :1, :, :, :]),
            (("next", schema.EXECUTED_MASK), lambda x: x.flip(-1)),
            (("next", schema.SIM_STATES), lambda x: x.float()),
            (("next", schema.SUCCESS), lambda x: x.long()),
            (("next", "reward"), lambda x: x.expand(*x.shape[:-1], 2)),
        ],
    )
    def test_a_spoilt_key_is_named(self, record, key, spoil):
        record = record.clone()
        record.set(key, spoil(record[key]))
        with pytest.raises(ValueError, match=str(key[-1] if isinstance(key, tuple) else key)):
            schema.validate_macro_step(record, required=ENV_PART)
