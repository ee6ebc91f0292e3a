"""Evaluation on held-out initial conditions by the deterministic policy: ``wamrl-eval``."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import torch
from rich.console import Console
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.collectors import Collector
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType

from wamrl_torchrl import schema
from wamrl_torchrl.build import EnvFactory, choose_device, fit_policy, task_ids
from wamrl_torchrl.cli import command
from wamrl_torchrl.collectors.collect import EPISODES, collect_episodes, join_episodes, tidy_record
from wamrl_torchrl.config import RunConfig
from wamrl_torchrl.data.analysis import Rate
from wamrl_torchrl.envs.episodes import EpisodePlan
from wamrl_torchrl.modules.checkpoint import load_policy
from wamrl_torchrl.modules.policy import FlowPolicy
from wamrl_torchrl.report import metric_table, progress_bar


def eval_conditions(config: RunConfig) -> Tensor:
    """Initial conditions int64 [M,3]: tasks x held-out init states x env seeds, tasks in turn when cut short."""
    inits, repeats = torch.arange(*config.env.eval_init_states), torch.arange(config.evaluation.repeats)
    tasks = torch.tensor(task_ids(config.env))
    conditions = torch.cartesian_prod(repeats, inits, tasks)[:, [2, 1, 0]]
    conditions = conditions[: config.evaluation.episodes]
    # One task after another: a change of task makes a simulator rebuild its model.
    return conditions[conditions[:, 0].argsort(stable=True)]


def evaluate(
    env: EnvBase, policy: FlowPolicy, plan: EpisodePlan, conditions: Tensor, console: Console
) -> TensorDictBase:
    """Run every condition once and return the records of all episodes, flat and in order.

    Args:
        env: environment that is dealt episodes from ``plan`` and has none running.
        policy: acts by the ODE from noise that depends on the condition alone, so an evaluation can be repeated.
        plan: the plan.
        conditions: int64 [M,3], see :func:`eval_conditions`.
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
    episodes: list[TensorDictBase] = []
    try:
        with progress_bar(console, "evaluate", len(conditions)) as advance:
            for episode in collect_episodes(iter(collector), plan, len(conditions)):
                episodes.append(episode)
                advance(1, str(success_rate(episodes)))
    finally:
        collector.shutdown(close_env=False)
    return join_episodes(episodes)


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


def _main(config: RunConfig, console: Console) -> None:
    if config.model.policy is None:
        raise ValueError("model.policy must name the directory of a saved policy")
    policy = load_policy(config.model.policy, device=choose_device(config.device), vae=config.model.vae)
    policy = fit_policy(policy, config)
    with contextlib.ExitStack() as stack:
        plan = EpisodePlan()
        stack.callback(plan.close)
        env = EnvFactory(config.env, policy.stats, plan)()
        stack.callback(env.close)
        rates = task_rates(evaluate(env, policy, plan, eval_conditions(config), console))
    table = {f"task {task}": str(rate) for task, rate in rates.items()} | {"all": str(total_rate(rates))}
    console.print(metric_table("held-out success (k/n, 95 % Wilson interval)", table))
    result = Path(config.logger.directory) / "evaluation.json"
    result.parent.mkdir(parents=True, exist_ok=True)
    result.write_text(json.dumps({str(task): list(rate) for task, rate in rates.items()}, indent=2))
    console.print(f"written to {result}")


main = command("wamrl-eval", _main)

if __name__ == "__main__":
    main()
