"""WAM-RL: flow-PPO on the action expert, video SFT on the video expert, in one loop: ``wamrl-train``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from omegaconf import OmegaConf
from rich.console import Console
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl._utils import timeit

from wamrl_torchrl import schema
from wamrl_torchrl.build import choose_device, frame_offsets, task_ids
from wamrl_torchrl.cli import command
from wamrl_torchrl.collectors.collect import collect_episodes, join_episodes, push_weights
from wamrl_torchrl.config import RunConfig, check_held_out
from wamrl_torchrl.data.analysis import Rate
from wamrl_torchrl.data.episodes import episodes_from_rollout
from wamrl_torchrl.diagnostics import group_metrics, imagination_metrics
from wamrl_torchrl.envs.libero import LiberoEnv
from wamrl_torchrl.evaluate import episode_frames, evaluate, success_rate, task_rates, total_rate
from wamrl_torchrl.files import replace_file
from wamrl_torchrl.learner import RunningMean, is_half, parity, recompute_log_probs, shuffle_advantages
from wamrl_torchrl.modules.checkpoint import load_policy, save_policy
from wamrl_torchrl.outcomes import episode_outcomes
from wamrl_torchrl.protocol import eval_conditions, protocol_env
from wamrl_torchrl.report import metric_table, plot_curves, progress_bar, write_video
from wamrl_torchrl.run import Run, draw_groups, prepare_start


def train(config: RunConfig, console: Console) -> dict[str, Rate]:
    """Run the configured number of iterations and return the held-out success rates ``start`` and ``end``."""
    weights, tasks = config.algo.task_weight_list, task_ids(config.env)
    if weights is not None and len(weights) != len(tasks):
        raise ValueError(f"algo.task_weight_list must hold one number for each of the tasks {tasks}, got {weights}")
    overlap = check_held_out(config)
    if overlap:
        console.print(
            f"[yellow]Init states {overlap} are trained on and evaluated on (env.allow_overlap): what is called "
            "held-out success below is none.[/yellow]"
        )
    config = replace(config, env=protocol_env(config))  # one horizon for rollouts and evaluation
    directory = Path(config.logger.directory)
    with timeit("start"):
        start = prepare_start(config, console)
    OmegaConf.save(OmegaConf.structured(config), directory / "config.yaml")
    policy = load_policy(start.policy, device=choose_device(config.device), vae=config.model.vae)
    with Run(config, policy, start.demos, console) as run:
        if run.iteration == 0 and config.evaluation.start:
            run.held_out["start"] = held_out_success(run)
        while run.iteration < config.algo.iterations:
            run.iteration += 1
            metrics = run_iteration(run)
            if config.evaluation.every and run.iteration % config.evaluation.every == 0:
                metrics["held_out/success"] = held_out_success(run).value
            run.log(metrics)
            run.save()
        # Not saved: a run that is resumed for more iterations must go on as if it had never stopped here.
        run.held_out["end"] = held_out_success(run, video=config.logger.video)
        finish(run)
        return run.held_out


def run_iteration(run: Run) -> dict[str, float]:
    """One iteration: collect, score, update the actor and the video expert, and hand out the new weights."""
    algo, policy = run.config.algo, run.policy
    with timeit("collect"):
        rollout = collect(run)
    metrics = rollout_metrics(rollout) | check_parity(run, rollout)
    if algo.reward_weights[1]:
        with timeit("reconstruction"):
            rollout = run.reconstruction.inv(rollout)
        metrics |= reconstruction_metrics(rollout) | imagination_metrics(rollout)
    if algo.mode != "actor_only":
        for episode in video_episodes(run, rollout):
            run.successes.add(episode)

    if algo.mode != "video_only":
        with timeit("actor"):
            metrics |= update_actor(run, rollout)
    if run.config.logger.rollouts:
        rollout.memmap(run.directory / "rollouts" / f"{run.iteration:04d}")
    if video_is_due(run):
        if "video/loss_video" not in metrics:  # else done beside the actor
            with timeit("video"):
                metrics |= run.video_update(run.successes, run.demos)
            run.expect_changed("adapters")
        run.reconstruction.follow()
    if algo.mode != "actor_only":
        metrics["video/episodes"] = float(len(run.successes))

    with timeit("push"):
        push_weights(run.collector, policy)
    return metrics


def update_actor(run: Run, rollout: TensorDictBase) -> dict[str, float]:
    """Write the rollout to a buffer, which adds advantages, and train the actor (and the critic) on it."""
    algo, policy = run.config.algo, run.policy
    buffer = run.make_buffer(len(rollout))
    # What the actor does not read, most of the bytes, is not copied.
    records = rollout.exclude(*(("next", key) for key in (schema.FUTURE_FRAMES, schema.SIM_STATES)))
    run.actor_update.loss.prepare(records, batch_size=algo.minibatch_size)
    buffer.extend(records)  # adds returns and advantages, drops groups that agree in success
    assert run.advantage.report is not None
    metrics = group_metrics(run.advantage.report, algo.group_size)
    if run.actor_update.imitates:
        run.replay.add(rollout, shuffled=algo.shuffle_advantages)
    run.actor_update.anneal((run.iteration - 1) / max(1, algo.iterations - 1))
    if not len(buffer):
        return metrics
    kept = buffer.storage[: len(buffer)]
    if is_half(policy):
        recompute_log_probs(policy, kept, batch_size=algo.minibatch_size)
    if run.value_update is not None:
        metrics |= run.value_update(kept)
    if algo.shuffle_advantages:
        shuffle_advantages(kept, by_episode=algo.advantage == "group")
    if algo.mode != "joint" or not video_is_due(run):
        metrics |= run.actor_update(buffer, run.replay)
        run.expect_changed("action_expert")
        return metrics
    video = RunningMean()
    metrics |= run.actor_update(
        buffer, run.replay, beside=lambda: video.add(run.video_update.step(run.successes, run.demos))
    )
    run.expect_changed("action_expert", "adapters")
    return metrics | video.read("video")


def video_is_due(run: Run) -> bool:
    """Whether the video expert is trained in this iteration."""
    algo = run.config.algo
    due = algo.mode != "actor_only" and run.iteration % algo.video_every == 0
    return due and len(run.successes) >= algo.video_min_episodes


def collect(run: Run) -> TensorDictBase:
    """Release the groups of an iteration and collect exactly their episodes, under one set of weights."""
    algo = run.config.algo
    released = run.plan.release(draw_groups(run, task_weights(run)), algo.group_size)
    episodes: list[TensorDictBase] = []
    with progress_bar(run.console, f"iteration {run.iteration}/{algo.iterations}", len(released)) as advance:
        for episode in collect_episodes(run.episodes, run.plan, len(released)):
            episodes.append(episode)
            advance(1, f"success {success_rate(episodes)}")
    rollout = join_episodes(episodes)
    schema.validate_macro_step(rollout)
    return rollout


def task_weights(run: Run) -> Tensor:
    """Weight of each of the run's tasks, float32 [tasks]."""
    algo = run.config.algo
    if algo.task_weights == "uniform":
        return torch.ones(len(run.tasks))
    if algo.task_weight_list is not None:
        return torch.tensor(algo.task_weight_list)
    return run.advantage.task_weights(
        run.tasks,
        kind=algo.task_weights,  # type: ignore[arg-type]
        floor=algo.task_weight_floor,
        gamma=algo.task_weight_gamma,
    )


def video_episodes(run: Run, rollout: TensorDictBase) -> list[TensorDict]:
    """Successful episodes for the video expert: with live frames, or rendered now that the environment is idle."""
    if run.config.algo.video_frames == "live":
        return episodes_from_rollout(rollout, frame_offsets=frame_offsets(run.config.env))
    with timeit("render"):
        return episodes_from_rollout(rollout, render=partial(render_frames, run))


def render_frames(run: Run, episodes: Sequence[TensorDictBase]) -> list[Tensor]:
    """Frames of stored LIBERO states, drawn by the environment of the evaluation; see ``LiberoEnv.render``."""
    env = run.eval_env.base_env
    assert isinstance(env, LiberoEnv)
    frames: dict[int, Tensor] = {}
    total = sum(len(episode.get(schema.SIM_STATES)) for episode in episodes)
    with progress_bar(run.console, "render", total) as advance:
        for index, rendered in env.iter_renders(episodes):
            frames[index] = rendered
            advance(len(rendered), f"{len(frames)}/{len(episodes)} episodes")
    return [frames[index] for index in range(len(episodes))]


def check_parity(run: Run, rollout: TensorDictBase) -> dict[str, float]:
    """Compare rollout and learner log-probs; a gap beyond rounding means that they do not run the same policy."""
    algo, found = run.config.algo, parity(run.policy, rollout)
    name, value, limit = ("gap", found.gap, algo.parity_gap)
    if is_half(run.policy):
        name, value, limit = ("kl", found.kl, algo.parity_kl)
    if not value <= limit:  # NaN is no agreement
        raise RuntimeError(
            f"log-probs of rollout and learner differ ({name} {value:.3g}, more than algo.parity_{name}={limit:g}): "
            "stale weights, another schedule, or train/eval mode"
        )
    return {"rollout/parity_gap": found.gap, "rollout/parity_kl": found.kl}


def rollout_metrics(rollout: TensorDictBase) -> dict[str, float]:
    """Success and size of a rollout."""
    total = total_rate(task_rates(rollout))
    executed = rollout.get(("next", schema.EXECUTED_MASK)).sum()
    return {
        "rollout/success": total.value,
        "rollout/episodes": float(total.n),
        "rollout/decisions": float(len(rollout)),
        "rollout/env_steps": float(executed),
    }


def reconstruction_metrics(rollout: TensorDictBase) -> dict[str, float]:
    """Mean squared error of imagination, over all decisions and by the outcome of their episode."""
    error = -rollout.get(schema.REWARD_REC_RAW).squeeze(-1)
    mask = rollout.get(schema.REWARD_REC_MASK).squeeze(-1)
    ids = rollout.get(schema.EPISODE_ID).squeeze(-1)
    won = torch.isin(ids, ids[rollout.get(("next", schema.SUCCESS)).squeeze(-1)])
    if not bool(mask.any()):
        return {}
    metrics = {
        "reconstruction/mse": float(error[mask].mean()),
        "reconstruction/mse_std": float(error[mask].std(correction=0)),
    }
    for name, outcome in (("success", won), ("failure", ~won)):
        if bool((outcome & mask).any()):
            metrics[f"reconstruction/mse_{name}"] = float(error[outcome & mask].mean())
    return metrics


def held_out_success(run: Run, *, video: bool = False) -> Rate:
    """Success of the deterministic policy on held-out initial conditions; episodes in ``held_out/<iteration>.json``."""
    with timeit("evaluate"), run.actor_update.averaged():
        records = evaluate(run.eval_env, run.policy, run.eval_plan, eval_conditions(run.config), run.console)
    if video:
        write_video(rollout_frames(run, records), run.directory / "rollout.mp4")
    outcomes = [outcome._asdict() for outcome in episode_outcomes(records)]
    path = run.directory / "held_out" / f"{run.iteration:04d}.json"
    path.parent.mkdir(exist_ok=True)
    replace_file(path, lambda new: new.write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8"))
    return total_rate(task_rates(records))


def rollout_frames(run: Run, records: TensorDictBase) -> Tensor:
    """Frames uint8 [T,3,H,W] of the first success, or of the first episode if there is none."""
    last = records[records.get(("next", "done")).squeeze(-1)]
    best = last.get(("next", schema.SUCCESS)).squeeze(-1).long().argmax()
    episode = records[(records.get(schema.EPISODE_ID) == last.get(schema.EPISODE_ID)[best]).squeeze(-1)]
    return episode_frames(episode, run.config.env)


def finish(run: Run) -> None:
    """Write curves, policy and summary, and show them."""
    run.clock()
    with run.actor_update.averaged():
        policy = save_policy(run.policy, run.directory / "policy")
    plot_curves(run.scalars, run.directory / "curves.png")
    summary = {name: [*rate, *rate.interval()] for name, rate in run.held_out.items()}
    (run.directory / "summary.json").write_text(json.dumps({"held_out": summary, "seconds": run.seconds}, indent=2))
    table = {f"held-out success, {name}": str(rate) for name, rate in run.held_out.items()}
    table |= {f"time, {phase}": f"{seconds:.0f} s" for phase, seconds in run.seconds.items() if seconds >= 0.5}
    run.console.print(metric_table("summary (k/n, 95 % Wilson interval)", table))
    run.console.print(f"policy {policy}\ncurves {run.directory / 'curves.png'}")
    if (run.directory / "rollout.mp4").exists():
        run.console.print(f"video {run.directory / 'rollout.mp4'}")


def _main(config: RunConfig, console: Console) -> None:
    train(config, console)


main = command("wamrl-train", _main)

if __name__ == "__main__":
    main()
