"""Pre-training on demonstrations by FastWAM's flow-matching losses: ``wamrl-pretrain``."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import CudaGraphModule
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchrl.checkpoint import Checkpoint, CheckpointRotation, GlobalRNGState
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
from wamrl_torchrl.precision import tf32_products
from wamrl_torchrl.report import metric_table, progress_bar
from wamrl_torchrl.validation import Validation, hold_out


def learning_rate_factor(step: int, config: PretrainConfig) -> float:
    """Linear warm-up, then a cosine to 2 % of the peak: a policy whose rate has not decayed acts much worse."""
    warm = min(1.0, (step + 1) / max(1, config.warmup))
    return warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / config.steps))))


def use_graphs(config: PretrainConfig, device: torch.device) -> bool:
    """Whether the update is captured as CUDA graphs.

    Raises:
        ValueError: that is asked for and ``device`` is no GPU.
    """
    if config.execution == "graphs" and device.type != "cuda":
        raise ValueError(f"pretrain.execution=graphs needs a GPU, device is {device}: use auto or eager")
    # How many examples see their video differs from step to step, so their shapes do.
    return config.execution != "eager" and device.type == "cuda" and not config.action_idm_prob


class Pretraining:
    """The parts of a pre-training and one step of it; what it is left with is ``average``, a moving average.

    The joint loss is split: the action loss needs the first frame's tokens only, the video loss the video expert
    alone, so each has its own batch size, and the video loss enters every ``video_every`` steps.

    On a GPU the update, losses to optimiser, is captured as a CUDA graph (``pretrain.execution``): one with the video
    loss and one without. Windows are then cut on the GPU, if the demonstrations take no more than a quarter of its
    memory. Which windows are drawn depends on neither.

    Args:
        config: the configuration.
        demos: demonstrations to train on.
        stats: normalisation of the policy.

    Raises:
        ValueError: ``pretrain.execution=graphs`` without a GPU.
    """

    def __init__(self, config: RunConfig, demos: EpisodeStore, stats: DatasetStats) -> None:
        options = self.options = config.pretrain
        torch.manual_seed(config.seed)
        self.policy = make_policy(config, make_model(config), stats).to(choose_device(config.device))
        self.graphs = use_graphs(options, self.policy.device)
        self._captured: dict[str, CudaGraphModule] | None = None
        self.video_loss = VideoSFTLoss(self.policy.model)
        self.action_loss = ActionSFTLoss(
            self.policy.model,
            stats,
            action_idm_prob=options.action_idm_prob,
            video_cond_noise_prob=options.video_cond_noise_prob,
        )
        self.parameters = list(self.policy.model.parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=options.lr,
            betas=(0.9, 0.95),
            weight_decay=options.weight_decay,
            fused=True,
            capturable=self.graphs,
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: learning_rate_factor(n, options))
        self._averaged = AveragedModel(self.policy, multi_avg_fn=get_ema_multi_avg_fn(options.ema))
        if self.policy.device.type == "cuda" and 4 * demos.nbytes <= torch.cuda.mem_get_info(self.policy.device)[0]:
            demos.sample_on(self.policy.device)
        self._actions = iterate_windows(demos, options.batch_size, self.policy, video=options.action_idm_prob > 0)
        self._videos = iterate_windows(demos, options.video_batch_size, self.policy)
        self.seen = Smoothed()
        self.steps = 0
        self.recipe = {
            **{f"pretrain.{name}": value for name, value in asdict(options).items()},
            "model.preset": config.model.preset,
            "seed": config.seed,
            "demonstrations": len(demos),
        }

    @property
    def average(self) -> FlowPolicy:
        """The policy with the moving average of the weights."""
        return cast("FlowPolicy", self._averaged.module)

    def step(self) -> None:
        """Take a step."""
        batch = TensorDict({"action": next(self._actions)}, device=self.policy.device)
        if self.steps % self.options.video_every == 0:
            batch.set("video", next(self._videos))
        self.seen.add(self._update(batch))
        self.scheduler.step()
        self._averaged.update_parameters(self.policy)
        self.steps += 1

    def _update(self, batch: TensorDict) -> TensorDictBase:
        """Losses of the windows in ``batch``, after a step of the optimiser on their sum."""
        if not self.graphs:
            return self._optimize(batch)
        if self._captured is None:
            # Only now, as what a checkpoint brings must not replace what the graphs hold on to.
            for group in self.optimizer.param_groups:
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=self.policy.device)
            self._captured = {kind: CudaGraphModule(self._optimize, in_keys=[]) for kind in ("action", "both")}
        return self._captured["both" if "video" in batch else "action"](batch)

    def _optimize(self, batch: TensorDictBase) -> TensorDictBase:
        loss = action = self.action_loss(batch.get("action"))["loss_action"]
        losses = TensorDict({"action": action.detach()}, device=action.device)
        if "video" in batch:
            video = self.video_loss(batch.get("video"))["loss_video"]
            losses.set("video", video.detach())
            loss = loss + video
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        clip_grad_norm_(self.parameters, self.options.grad_clip)
        self.optimizer.step()
        return losses

    def checkpoint(self) -> Checkpoint:
        """All that a pre-training needs to go on bit for bit."""
        return Checkpoint(
            progress=self,
            policy=self.policy,
            average=self._averaged,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            rng=GlobalRNGState(),
        )

    def state_dict(self) -> dict[str, Any]:
        """Progress, and the options it was made with."""
        return {"steps": self.steps, "seen": self.seen.read(), "recipe": json.dumps(self.recipe)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`.

        Raises:
            ValueError: it was begun with other options or demonstrations.
        """
        found = json.loads(state["recipe"])
        different = [f"{name}={found.get(name)}" for name, value in self.recipe.items() if found.get(name) != value]
        if different:
            raise ValueError(
                f"the pre-training was begun with {', '.join(different)}: keep that, remove its directory "
                "(<logger.directory>/pretraining), or choose another logger.directory"
            )
        self.steps = state["steps"]
        self.seen.set(state["seen"], self.policy.device)


def pretrain(config: RunConfig, demos: EpisodeStore, console: Console) -> FlowPolicy:
    """Train a fresh model on demonstrations and return its moving average as a policy.

    Losses on held-out demonstrations go to ``<directory>/pretraining``, as CSV, and what imagination is worth in the
    end to the console. A checkpoint is written there at every look, and a pre-training that finds one goes on from it.
    """
    options, directory = config.pretrain, Path(config.logger.directory) / "pretraining"
    demos, held_out = hold_out(demos, options.validation)
    every = demos if held_out is None else [*demos, *held_out]
    training = Pretraining(config, demos, DatasetStats.from_episodes(every))
    validation = None if held_out is None else Validation(held_out, seed=config.seed)
    rotation, checkpoint = CheckpointRotation(directory / "checkpoints", keep_last=1), training.checkpoint()
    latest = rotation.latest()
    if latest is not None:
        checkpoint.load(latest)
        console.print(f"Pre-training goes on after step {training.steps}.")
    look_every = math.ceil(options.steps / options.validations)
    logger = CSVLogger(directory.name, log_dir=str(directory.parent))

    note = ""
    with progress_bar(console, "pre-training", options.steps) as advance, tf32_products(options.tf32):
        advance(training.steps, note)
        while training.steps < options.steps:
            training.step()
            if training.steps % 20 == 0:  # not every step: reading waits for the device
                note = training.seen.note()
            if training.steps % look_every == 0 or training.steps == options.steps:
                note = look(training, validation, logger)
                rotation.save(checkpoint, step=training.steps)
            advance(1, note)
    policy = training.average
    if validation is not None:
        algo = config.algo
        errors = validation.imagination(policy, num_steps=algo.imagination_steps, shift=algo.imagination_shift)
        decibels = {name: f"{10 * math.log10(1 / max(value, 1e-10)):.1f} dB" for name, value in errors.items()}
        console.print(metric_table("frames at +4 and +8 of held-out demonstrations, PSNR", decibels))
        for name, value in errors.items():
            logger.log_scalar(f"frames/{name}_mse", value, step=options.steps)
    return policy


def look(training: Pretraining, validation: Validation | None, logger: CSVLogger) -> str:
    """Log the losses; returns them to be shown."""
    metrics = {f"train/{name}": value for name, value in training.seen.read().items()}
    note = training.seen.note()
    if validation is not None:
        losses = validation.losses(training.average)
        metrics |= {f"validation/{name}": value for name, value in losses.items()}
        note += ", held out " + ", ".join(f"{name} {value:.3f}" for name, value in losses.items())
    for name, value in metrics.items():
        logger.log_scalar(name, value, step=training.steps)
    return note


class Smoothed:
    """Running means of losses, kept on their device until they are read."""

    def __init__(self, *, share: float = 0.05) -> None:
        self._share = share
        self._values: dict[str, Tensor] = {}

    def add(self, losses: TensorDictBase) -> None:
        """Take in the losses of a step, detached."""
        for name, value in losses.items():
            self._values[name] = self._values.get(name, value).lerp(value, self._share)

    def read(self) -> dict[str, float]:
        """The means."""
        return {name: float(value) for name, value in self._values.items()}

    def set(self, means: dict[str, float], device: torch.device) -> None:
        """Go on from :meth:`read`."""
        self._values = {name: torch.tensor(value, device=device) for name, value in means.items()}

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
