"""The two updates of an iteration, each with its own parameters, optimiser and clipping."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torchrl.data import ReplayBuffer

from wamrl_torchrl import schema
from wamrl_torchrl.config import AlgoConfig
from wamrl_torchrl.data.episodes import EpisodeStore
from wamrl_torchrl.modules.fastwam.model import FastWAM
from wamrl_torchrl.modules.policy import FlowPolicy
from wamrl_torchrl.modules.trainable import actor_parameters, video_parameters
from wamrl_torchrl.objectives import FeatureKLLoss, FlowPPOLoss, VideoSFTLoss


class RunningMean:
    """Means of scalars over an update; values stay on the device until they are read."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, values: TensorDictBase) -> None:
        """Add one step's scalars."""
        for name, value in values.items():
            self._values[name].append(value.detach())

    def read(self, prefix: str) -> dict[str, float]:
        """Means by ``prefix/name``."""
        return {f"{prefix}/{name}": float(torch.stack(values).mean()) for name, values in self._values.items()}


class ActorUpdate:
    """Flow-PPO epochs over the records of an iteration; trains the action expert.

    Args:
        policy: the policy.
        config: options.
    """

    def __init__(self, policy: FlowPolicy, config: AlgoConfig) -> None:
        low, high = config.clip_epsilon
        self.config = config
        self.policy = policy
        self.learning_rate = config.actor_lr
        self.loss = FlowPPOLoss(
            policy,
            clip_epsilon=(low, high),
            dual_clip=config.dual_clip,
            normalize_steps=config.normalize_steps,
        ).to(policy.device)
        self.parameters = actor_parameters(policy.model)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=config.actor_lr, betas=(0.9, 0.95), weight_decay=0.0)

    def __call__(self, buffer: ReplayBuffer) -> dict[str, float]:
        """Run the epochs; ends early once the mean KL of an epoch passes ``target_kl``. Returns means for the log."""
        means, steps = RunningMean(), 0
        for _ in range(self.config.epochs):
            epoch_kl = []
            for batch in buffer:
                batch = batch.to(self.policy.device)
                if is_half(self.policy):
                    batch = fill_batch(batch, self.config.minibatch_size)
                out = self.loss(batch)
                self.optimizer.zero_grad(set_to_none=True)
                out["loss_objective"].backward()
                norm = clip_grad_norm_(self.parameters, self.config.grad_clip)
                self.optimizer.step()
                means.add(out.set("grad_norm", norm))
                epoch_kl.append(out["kl_approx"])
                steps += 1
            if self.config.target_kl is not None and float(torch.stack(epoch_kl).mean()) > self.config.target_kl:
                break
        return {**means.read("actor"), "actor/steps": float(steps)}


class VideoUpdate:
    """Video SFT on successful episodes, held by the feature-KL; trains the adapters of the video expert.

    Args:
        policy: the policy, with LoRA on its video expert.
        config: options.
    """

    def __init__(self, policy: FlowPolicy, config: AlgoConfig) -> None:
        self.config = config
        self.policy = policy
        self.learning_rate = config.video_lr
        self.sft = VideoSFTLoss(policy.model)
        self.feature_kl = FeatureKLLoss(policy.model).to(policy.device)
        self.parameters = video_parameters(policy.model)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=config.video_lr, betas=(0.9, 0.95), weight_decay=0.0)

    def _windows(self, online: EpisodeStore, demos: EpisodeStore | None) -> TensorDict:
        """A batch of windows, a share of them from demonstrations, with normalised proprioception."""
        size = self.config.video_batch_size
        from_demos = 0 if demos is None else round(self.config.demo_fraction * size)
        stores = ((online, size - from_demos), (demos, from_demos))
        parts = [
            store.sample_windows(count, generator=torch.default_generator)
            for store, count in stores
            if store is not None and count
        ]
        return normalize_windows(torch.cat(parts).to(self.policy.device), self.policy)

    def __call__(self, online: EpisodeStore, demos: EpisodeStore | None) -> dict[str, float]:
        """Run the steps. Returns means for the log."""
        means = RunningMean()
        for _ in range(self.config.video_steps):
            batch = self._windows(online, demos)
            out = self.sft(batch).update(self.feature_kl(batch))
            loss = out["loss_video"] + self.config.feature_kl * out["loss_feature_kl"]
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = clip_grad_norm_(self.parameters, self.config.grad_clip)
            self.optimizer.step()
            means.add(out.set("grad_norm", norm))
        return means.read("video")


def normalize_windows(windows: TensorDict, policy: FlowPolicy) -> TensorDict:
    """Add the normalised proprioception to windows of an episode store."""
    return windows.set(schema.PROPRIO, policy.stats.normalize_state(windows.get(schema.STATE)))


class Parity(NamedTuple):
    """How far the log-probs of a rollout are from the learner's own."""

    gap: float  # largest difference
    kl: float  # mean of the k3 estimate of KL(rollout || learner)


@torch.no_grad()
def parity(policy: FlowPolicy, rollout: TensorDictBase, *, rows: int = 64) -> Parity:
    """Compare the log-probs of the rollout with the learner's own, on up to ``rows`` records.

    Raises:
        RuntimeError: records of another policy version; a rollout is used under the weights that made it.
    """
    versions = rollout.get(schema.POLICY_VERSION).unique().tolist()
    if versions != policy.version.tolist():
        raise RuntimeError(f"the rollout holds policy versions {versions}, the learner has {policy.version.tolist()}")
    part = rollout[:rows].select(*policy.replay_keys, schema.LOG_PROB).to(policy.device)
    own = policy.log_prob_rows(part)[..., : policy.executed_rows].sum(-1)
    difference = own - part.get(schema.LOG_PROB)
    return Parity(float(difference.abs().max()), float((difference.expm1() - difference).mean()))


def is_half(policy: FlowPolicy) -> bool:
    """Whether the weights are in half precision.

    The kernels then round differently for batches of another size, by a percent of a velocity: the log-prob of a record
    depends on the batch it is computed in, and ratios between batches of different sizes are noise.
    """
    return policy.model.dtype != torch.float32


@torch.no_grad()
def recompute_log_probs(policy: FlowPolicy, records: TensorDictBase, *, batch_size: int) -> None:
    """Replace the log-probs of records by the learner's own, in place and in batches of the size the update will use.

    Ratios then start at 1 exactly in half precision too, instead of at the rounding between two batch sizes.
    """
    own = []
    for part in records.select(*policy.replay_keys).split(batch_size):
        rows = torch.arange(batch_size) % len(part)
        own.append(policy.log_prob_rows(part[rows].to(policy.device))[: len(part)])
    log_prob_rows = torch.cat(own).to(records.get(schema.LOG_PROB_ROWS).device)
    records.set_(schema.LOG_PROB_ROWS, log_prob_rows)
    records.set_(schema.LOG_PROB, log_prob_rows[..., : policy.executed_rows].sum(-1))


def fill_batch(batch: TensorDictBase, size: int) -> TensorDictBase:
    """Repeat rows of a smaller batch up to ``size``; the repeated ones have no executed action and so no weight."""
    rows = torch.arange(size, device=batch.device)
    filled = batch[rows % len(batch)]
    key = ("next", schema.EXECUTED_MASK)
    return filled.set(key, filled.get(key) & (rows < len(batch))[:, None])


class ParameterWatch:
    """Tells which parts of a model an update changed, by a checksum per part."""

    def __init__(self, model: FastWAM) -> None:
        adapters = {id(parameter) for parameter in video_parameters(model)}
        actor = {id(parameter) for parameter in actor_parameters(model)}
        self._parts: dict[str, list[nn.Parameter]] = {"action_expert": [], "adapters": [], "frozen": []}
        for parameter in model.parameters():
            part = "adapters" if id(parameter) in adapters else "action_expert" if id(parameter) in actor else "frozen"
            self._parts[part].append(parameter)
        self._last = self._checksums()

    def _checksums(self) -> dict[str, tuple[float, float]]:
        return {name: _checksum(parameters) for name, parameters in self._parts.items()}

    def changed(self) -> set[str]:
        """Parts whose parameters changed since the last call."""
        now = self._checksums()
        changed = {name for name, value in now.items() if value != self._last[name]}
        self._last = now
        return changed


@torch.no_grad()
def _checksum(parameters: Iterable[Tensor]) -> tuple[float, float]:
    sums = [torch.stack((p.double().sum(), p.double().square().sum())) for p in parameters]
    if not sums:
        return 0.0, 0.0
    first, second = torch.stack(sums).sum(0).tolist()
    return first, second


def iterate_windows(
    store: EpisodeStore, batch_size: int, policy: FlowPolicy, *, video: bool = True
) -> Iterator[TensorDict]:
    """Endless batches of windows with normalised proprioception, with or without their video."""
    while True:
        batch = store.sample_windows(batch_size, generator=torch.default_generator, video=video)
        yield normalize_windows(batch.to(policy.device), policy)
