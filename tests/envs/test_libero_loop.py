"""The parts of the loop on the real simulator: demonstrations, records, scores, episodes for video SFT."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

from wamrl_torchrl import schema
from wamrl_torchrl.build import EnvFactory, frame_offsets, make_env, make_model, make_policy
from wamrl_torchrl.collectors.collect import collect_episodes, join_episodes, make_collector
from wamrl_torchrl.config import EnvConfig, RunConfig
from wamrl_torchrl.data.episodes import episodes_from_rollout
from wamrl_torchrl.data.starts import StartStates
from wamrl_torchrl.data.stats import DatasetStats
from wamrl_torchrl.demos import make_demonstrations
from wamrl_torchrl.envs.episodes import EpisodePlan
from wamrl_torchrl.learner import parity
from wamrl_torchrl.objectives.transforms import GroupAdvantage, ReconstructionReward

pytestmark = pytest.mark.libero


def test_a_group_from_demonstration_to_advantage():
    config = RunConfig()
    config.env = EnvConfig(task_ids=[0], num_envs=2, max_episode_steps=120, settle_steps=2)
    config.sde.num_steps = 2
    config.demos.episodes_per_task = 1
    base = make_env(config.env)
    plan = EpisodePlan()
    try:
        demos = make_demonstrations(base, config, Console(quiet=True))
        assert len(demos) == 1
        starts = StartStates(demos, steps_before_end=[8])
        base.close()

        config.env.max_episode_steps = 16
        torch.manual_seed(0)
        policy = make_policy(config, make_model(config), DatasetStats.from_episodes(demos))
        base = make_env(config.env, start_states=starts.states)
        env = EnvFactory(config.env, policy.stats, plan).wrap(base)
        collector = make_collector(lambda *_: env, policy=policy)
        init, seed = starts.draw(0, torch.Generator())
        released = plan.release(torch.tensor([[0, init, seed], [0, 1, 7]]), 2)
        collected = iter(collector)
        rollout = join_episodes(list(collect_episodes(collected, plan, len(released))))
        offsets = frame_offsets(config.env)
        episodes = episodes_from_rollout(rollout, frame_offsets=offsets, only_success=False)
        rendered = episodes_from_rollout(rollout, only_success=False, render=base.render)
        # Rendering has parked the environment that the collector holds; the next iteration goes on all the same.
        released = plan.release(torch.tensor([[0, 2, 7]]), 2)
        further = join_episodes(list(collect_episodes(collected, plan, len(released))))
        collector.shutdown()
    finally:
        plan.close()
        if not base.is_closed:
            base.close()

    schema.validate_macro_step(rollout)
    assert parity(policy, rollout).gap < 1e-3
    first = rollout[(rollout[schema.CHUNK_INDEX] == 0).squeeze(-1)]
    for group in (0, 1):  # the same picture at the start of every episode of a group
        images = first["observation", "image"][(first[schema.GROUP_ID] == group).squeeze(-1)]
        assert len(images) == 2
        assert torch.equal(images[0], images[1])
    assert rollout["next", schema.FUTURE_FRAMES][rollout["next", schema.FUTURE_MASK]].float().std() > 10

    rollout = ReconstructionReward(policy.model, num_steps=1, frame_offsets=offsets).inv(rollout)
    scored = rollout[schema.REWARD_REC_MASK]  # not those chunks that succeed before the first frame
    assert scored.any()
    assert float(rollout["next", "reward_rec_raw"][scored].max()) < 0
    kept = GroupAdvantage(2, drop_degenerate=False).inv(rollout)
    assert len(kept) == len(rollout)
    assert float(kept[schema.ADVANTAGE].abs().max()) > 0
    assert [len(episode["frames"]) for episode in episodes] == [
        len(episode["actions"]) // schema.VIDEO_STRIDE + 1 for episode in episodes
    ]
    for live, drawn in zip(episodes, rendered, strict=True):
        assert (live == drawn).all()
    assert further[schema.INIT_STATE_ID].unique().tolist() == [2]
    assert len(further[schema.EPISODE_ID].unique()) == 2
