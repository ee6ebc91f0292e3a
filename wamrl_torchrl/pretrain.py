"""Pre-training on demonstrations by FastWAM's flow-matching losses: ``wamrl-pretrain``."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from rich.console import Console
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from wamrl_torchrl.build import choose_device, make_model, make_policy
from wamrl_torchrl.cli import command
from wamrl_torchrl.config import PretrainConfig, RunConfig
from wamrl_torchrl.data.episodes import EpisodeStore
from wamrl_torchrl.data.stats import DatasetStats
from wamrl_torchrl.learner import iterate_windows
from wamrl_torchrl.modules.checkpoint import save_policy
from wamrl_torchrl.modules.policy import FlowPolicy
from wamrl_torchrl.objectives import ActionSFTLoss, VideoSFTLoss
from wamrl_torchrl.report import progress_bar


def learning_rate_factor(step: int, config: PretrainConfig) -> float:
    """Linear warm-up, then a cosine to 2 % of the peak: a policy whose rate has not decayed acts much worse."""
    warm = min(1.0, (step + 1) / max(1, config.warmup))
    return warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / config.steps))))


def pretrain(config: RunConfig, demos: EpisodeStore, console: Console) -> FlowPolicy:
    """Train a fresh model on demonstrations and return its moving average as a policy.

    The joint loss is split: the action loss needs the first frame's tokens only, the video loss the video expert
    alone, so each has its own batch size, and the video loss enters every ``video_every`` steps.
    """
    options, device = config.pretrain, choose_device(config.device)
    torch.manual_seed(config.seed)
    policy = make_policy(config, make_model(config), DatasetStats.from_episodes(demos)).to(device)
    video_loss = VideoSFTLoss(policy.model)
    action_loss = ActionSFTLoss(
        policy.model,
        policy.stats,
        action_idm_prob=options.action_idm_prob,
        video_cond_noise_prob=options.video_cond_noise_prob,
    )
    parameters = list(policy.model.parameters())
    optimizer = torch.optim.AdamW(
        parameters, lr=options.lr, betas=(0.9, 0.95), weight_decay=options.weight_decay, fused=True
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, options))
    average = AveragedModel(policy, multi_avg_fn=get_ema_multi_avg_fn(options.ema))
    action_windows = iterate_windows(demos, options.batch_size, policy, video=options.action_idm_prob > 0)
    video_windows = iterate_windows(demos, options.video_batch_size, policy)

    seen_action, seen_video = 0.0, 0.0
    with progress_bar(console, "pre-training", options.steps) as advance:
        for step in range(options.steps):
            loss = losses = action_loss(next(action_windows))["loss_action"]
            seen_action += 0.05 * (float(losses.detach()) - seen_action) if step else float(losses.detach())
            if step % options.video_every == 0:
                loss_video = video_loss(next(video_windows))["loss_video"]
                seen_video += 0.05 * (float(loss_video.detach()) - seen_video) if step else float(loss_video.detach())
                loss = loss + loss_video
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            clip_grad_norm_(parameters, options.grad_clip)
            optimizer.step()
            scheduler.step()
            average.update_parameters(policy)
            advance(1, f"action {seen_action:.3f}, video {seen_video:.3f}")
    policy.load_state_dict(average.module.state_dict())
    return policy


def _main(config: RunConfig, console: Console) -> None:
    directory = Path(config.logger.directory)
    policy = pretrain(config, EpisodeStore.load(directory / "demos"), console)
    console.print(f"policy in {save_policy(policy, directory / 'start')}")


main = command("wamrl-pretrain", _main)

if __name__ == "__main__":
    main()
