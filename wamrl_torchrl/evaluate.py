"""Evaluation by the deterministic policy under a fixed protocol: ``wamrl-eval``."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.utils import ExplorationType

from wamrl_torchrl import schema
from wamrl_torchrl.build import EnvFactory, choose_device, fit_policy, frame_offsets, task_instructions
from wamrl_torchrl.cli import command
from wamrl_torchrl.collectors.collect import EPISODES, collect_episodes, join_episodes, tidy_record
from wamrl_torchrl.config import EnvConfig, RunConfig
from wamrl_torchrl.data.analysis import Rate
from wamrl_torchrl.data.episodes import episodes_from_rollout
from wamrl_torchrl.envs.episodes import EpisodePlan
from wamrl_torchrl.files import replace_file
from wamrl_torchrl.modules.checkpoint import load_policy
from wamrl_torchrl.modules.policy import FlowPolicy
from wamrl_torchrl.outcomes import Condition, EpisodeOutcome, OutcomeJournal, Result, task_results
from wamrl_torchrl.protocol import describe, eval_conditions, protocol_env
from wamrl_torchrl.report import progress_bar, success_table, write_video

JOURNAL_FILE = "evaluation.jsonl"
RESULT_FILE = "evaluation.json"


def iter_evaluation(
    env: EnvBase, policy: FlowPolicy, plan: EpisodePlan, conditions: Tensor, console: Console
) -> Generator[TensorDictBase, None, None]:
    """Run every condition once and yield each episode, records [T], when it ends.

    Args:
        env: environment that is dealt episodes from ``plan`` and has none running.
        policy: acts by the ODE from noise that depends on the condition alone, so an evaluation can be repeated.
        plan: the plan.
        conditions: int64 [M,3], see :func:`wamrl_torchrl.protocol.eval_conditions`.
        console: shows progress.
    """
    plan.release(conditions, 1)
    collector = Collector(
        env,
        policy,
        frames_per_batch=env.batch_size.numel(),
        policy_device=policy.device,
        postproc=tidy_record,
        exploration_type=ExplorationType.DETERMINISTIC,
        **EPISODES,
    )
    won = 0
    try:
        with progress_bar(console, "evaluate", len(conditions)) as advance:
            for count, episode in enumerate(collect_episodes(iter(collector), plan, len(conditions)), 1):
                won += bool(episode[-1].get(("next", schema.SUCCESS)))
                yield episode
                advance(1, str(Rate(won, count)))
    finally:
        collector.shutdown(close_env=False)


def evaluate(
    env: EnvBase, policy: FlowPolicy, plan: EpisodePlan, conditions: Tensor, console: Console
) -> TensorDictBase:
    """Run every condition once, as :func:`iter_evaluation`, and return the records of all episodes in order, flat.

    Resets wait for each other meanwhile: which slot runs an episode, and so its row in a batch, depends on no timing.
    """
    chunk_env = env.base_env if isinstance(env, TransformedEnv) else env
    background, chunk_env.background_reset = chunk_env.background_reset, False
    try:
        return join_episodes(list(iter_evaluation(env, policy, plan, conditions, console)))
    finally:
        chunk_env.background_reset = background


def success_rate(episodes: list[TensorDictBase]) -> Rate:
    """Success rate of whole episodes."""
    return Rate(sum(bool(episode[-1].get(("next", schema.SUCCESS))) for episode in episodes), len(episodes))


def task_rates(records: TensorDictBase) -> dict[int, Rate]:
    """Success rate by task of flat records of whole episodes."""
    last = records[records.get(("next", "done")).squeeze(-1)]
    tasks, success = last.get(schema.TASK_ID).squeeze(-1), last.get(("next", schema.SUCCESS)).squeeze(-1)
    return {
        task: Rate(int(success[tasks == task].sum()), int((tasks == task).sum())) for task in tasks.unique().tolist()
    }


def total_rate(rates: dict[int, Rate]) -> Rate:
    """All tasks together."""
    return Rate(sum(rate.k for rate in rates.values()), sum(rate.n for rate in rates.values()))


def episode_frames(episode: TensorDictBase, env: EnvConfig) -> Tensor:
    """Frames uint8 [T,3,H,W] of an episode's records, of every 4th step; of its decisions if there are no others."""
    if env.replan_steps % schema.VIDEO_STRIDE or not env.future_frames:
        return episode.get(schema.IMAGE)
    return episodes_from_rollout(episode, frame_offsets=frame_offsets(env), only_success=False)[0].get("frames")


# ---- the command ----------------------------------------------------------------------------------------------------
def run_evaluation(config: RunConfig, policy: FlowPolicy, console: Console) -> dict[str, Any]:
    """Evaluate ``policy`` under the configured protocol into ``logger.directory``, and show and return the result.

    Every outcome is appended to ``evaluation.jsonl`` as its episode ends; an interrupted evaluation that is started
    again runs what is missing. At the end ``evaluation.json`` holds the settings, the versions of the software, the
    results by task and the outcome of every episode. It is the same, byte for byte, at every repetition on a machine;
    the number of slots matters only through the rounding of the policy's matrix products, whose order of summation may
    depend on the batch size.

    With ``evaluation.videos`` the first so many episodes of every task, in the order of the protocol, are filmed, if
    they are run now: ``videos/task003_init041_seed0_success.mp4``.

    Args:
        config: the configuration.
        policy: the policy, already given the run's sampling options (:func:`wamrl_torchrl.build.fit_policy`).
        console: shows progress and results.

    Raises:
        ValueError: the directory holds an evaluation with other settings, software or weights, or of another world.
        RuntimeError: another process is evaluating into the directory.
    """
    directory, instructions = Path(config.logger.directory), task_instructions(config.env)
    conditions: list[Condition] = [(task, init, seed) for task, init, seed in eval_conditions(config).tolist()]
    description = describe(config, policy)
    with OutcomeJournal(directory / JOURNAL_FILE, description) as journal:
        missing = [condition for condition in conditions if condition not in journal]
        if len(missing) < len(conditions):
            done = len(conditions) - len(missing)
            console.print(f"{done} of {len(conditions)} episodes are in {journal.path} already")
        if missing:
            filmed = {
                condition
                for _, of_task in groupby(conditions, key=lambda condition: condition[0])
                for condition in list(of_task)[: config.evaluation.videos]
            }
            _run_missing(config, policy, missing, filmed, journal, console)
        outcomes = [journal[condition] for condition in conditions]

    by_task, total = task_results(outcomes), Result.of(outcomes)
    result = {
        **description,
        "policy": config.model.policy,
        "tasks": [
            {"task_id": task, "instruction": instructions[task], **of_task.to_json()}
            for task, of_task in by_task.items()
        ],
        "total": total.to_json(),
        "episodes": [outcome._asdict() for outcome in outcomes],
    }
    path = directory / RESULT_FILE
    replace_file(path, lambda new: new.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8"))
    settings = description["settings"]
    title = f"{settings['world']}, {settings['protocol']} protocol: successes of episodes, 95 % Wilson interval"
    rows = [(str(task), instructions[task], *of_task) for task, of_task in by_task.items()]
    console.print(success_table(title, [*rows, ("all", "", *total)]))
    console.print(f"written to {path}")
    return result


def _run_missing(
    config: RunConfig,
    policy: FlowPolicy,
    missing: list[Condition],
    filmed: set[Condition],
    journal: OutcomeJournal,
    console: Console,
) -> None:
    env_config = protocol_env(config)
    slots = min(env_config.num_envs, len(missing))
    # Resets that are waited for: which slot runs which episode then repeats exactly, too.
    env_config = replace(env_config, num_envs=slots, background_reset=False)
    with contextlib.ExitStack() as stack:
        plan = EpisodePlan()
        stack.callback(plan.close)
        env = EnvFactory(env_config, policy.stats, plan, future_frames=not filmed.isdisjoint(missing))()
        stack.callback(env.close)
        run = iter_evaluation(env, policy, plan, torch.tensor(missing), console)
        # Closed before the environment, whatever happens here: that ends the collector.
        episodes = stack.enter_context(contextlib.closing(run))
        for episode in episodes:
            outcome = EpisodeOutcome.of(episode)
            if outcome.condition in filmed:
                _film(episode, outcome, env_config, journal.path.parent / "videos")
            journal.add(outcome)  # last: an episode whose video is not complete is run again


def _film(episode: TensorDictBase, outcome: EpisodeOutcome, env: EnvConfig, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    task, init, seed = outcome.condition
    name = f"task{task:03d}_init{init:03d}_seed{seed}_{'success' if outcome.success else 'failure'}.mp4"
    write_video(episode_frames(episode, env), directory / name)


def _main(config: RunConfig, console: Console) -> None:
    if config.model.policy is None:
        raise ValueError("model.policy must name the directory of a saved policy")
    policy = load_policy(config.model.policy, device=choose_device(config.device), vae=config.model.vae)
    run_evaluation(config, fit_policy(policy, config), console)


main = command("wamrl-eval", _main)

if __name__ == "__main__":
    main()
