"""Pre-training on demonstrations by FastWAM's flow-matching losses: ``wamrl-pretrain``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchrl.record.loggers import CSVLogger

from wamrl_torchrl.build import choose_device, make_model, make_policy
from wamrl_torchrl.cli import command
from wamrl_torchrl.config import PretrainConfig, RunConfig
from wamrl_torchrl.data.episodes import EpisodeStore
from wamrl_torchrl.data.stats import DatasetStats
from wamrl_torchrl.learner import iterate_windows
from wamrl_torchrl.modules.checkpoint import save_policy
from wamrl_torchrl.modules.policy import FlowPolicy
from wamrl_torchrl.objectives import ActionSFTLoss, VideoSFTLoss
from wamrl_torchrl.report import metric_table, progress_bar
from wamrl_torchrl.validation import Validation, hold_out


def learning_rate_factor(step: int, config: PretrainConfig) -> float:
    """Linear warm-up, then a cosine to 2 % of the peak: a policy whose rate has not decayed acts much worse."""
    warm = min(1.0, (step + 1) / max(1, config.warmup))
    return warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / config.steps))))


def pretrain(config: RunConfig, demos: EpisodeStore, console: Console) -> FlowPolicy:
    """Train a fresh model on demonstrations and return its moving average as a policy.

    The joint loss is split: the action loss needs the first frame's tokens only, the video loss the video expert
    alone, so each has its own batch size, and the video loss enters every ``video_every`` steps. Losses on held-out
    demonstrations go to ``<directory>/pretraining``, as CSV, and what imagination is worth in the end to the console.
    """
    options, device = config.pretrain, choose_device(config.device)
    torch.manual_seed(config.seed)
    policy = make_policy(config, make_model(config), DatasetStats.from_episodes(demos)).to(device)
    demos, held_out = hold_out(demos, options.validation)
    validation = None if held_out is None else Validation(held_out, seed=config.seed)
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
    look_every = math.ceil(options.steps / options.validations)
    logger = CSVLogger("pretraining", log_dir=config.logger.directory)

    seen, note = Smoothed(), ""
    with progress_bar(console, "pre-training", options.steps) as advance:
        for step in range(1, options.steps + 1):
            loss = seen.take("action", action_loss(next(action_windows))["loss_action"])
            if (step - 1) % options.video_every == 0:
                loss = loss + seen.take("video", video_loss(next(video_windows))["loss_video"])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            clip_grad_norm_(parameters, options.grad_clip)
            optimizer.step()
            scheduler.step()
            average.update_parameters(policy)
            if step % 20 == 0:  # not every step: reading waits for the device
                note = seen.note()
            if step % look_every == 0 or step == options.steps:
                metrics = {f"train/{name}": value for name, value in seen.read().items()}
                if validation is not None:
                    losses = validation.losses(cast("FlowPolicy", average.module))
                    metrics |= {f"validation/{name}": value for name, value in losses.items()}
                    shown = ", ".join(f"{name} {value:.3f}" for name, value in losses.items())
                    note = f"{seen.note()}, held out {shown}"
                for name, value in metrics.items():
                    logger.log_scalar(name, value, step=step)
            advance(1, note)
    policy.load_state_dict(average.module.state_dict())
    if validation is not None:
        errors = validation.imagination(policy, num_steps=config.algo.imagination_steps)
        decibels = {name: f"{10 * math.log10(1 / max(value, 1e-10)):.1f} dB" for name, value in errors.items()}
        console.print(metric_table("frames at +4 and +8 of held-out demonstrations, PSNR", decibels))
        for name, value in errors.items():
            logger.log_scalar(f"frames/{name}_mse", value, step=options.steps)
    return policy


class Smoothed:
    """Running means of losses, kept on their device until they are read."""

    def __init__(self, *, share: float = 0.05) -> None:
        self._share = share
        self._values: dict[str, Tensor] = {}

    def take(self, name: str, loss: Tensor) -> Tensor:
        """Take in a loss and hand it on."""
        value = loss.detach()
        self._values[name] = self._values.get(name, value).lerp(value, self._share)
        return loss

    def read(self) -> dict[str, float]:
        """The means."""
        return {name: float(value) for name, value in self._values.items()}

    def note(self) -> str:
        """The means, to be shown."""
        return ", ".join(f"{name} {value:.3f}" for name, value in self.read().items())


def _main(config: RunConfig, console: Console) -> None:
    directory = Path(config.logger.directory)
    policy = pretrain(config, EpisodeStore.load(directory / "demos"), console)
    console.print(f"policy in {save_policy(policy, directory / 'start')}")


main = command("wamrl-pretrain", _main)

if __name__ == "__main__":
    main()
