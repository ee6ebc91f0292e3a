"""The updates of an iteration, each with its own parameters, optimiser and clipping."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchrl.data import ReplayBuffer
from torchrl.objectives.utils import distance_loss

from wamrl_torchrl import schema
from wamrl_torchrl.config import AlgoConfig, CriticConfig
from wamrl_torchrl.data.episodes import EpisodeStore
from wamrl_torchrl.modules.fastwam.model import FastWAM
from wamrl_torchrl.modules.policy import FlowPolicy
from wamrl_torchrl.modules.reference import ReferenceActor
from wamrl_torchrl.modules.trainable import actor_parameters, video_parameters
from wamrl_torchrl.modules.value import STATE_VALUE, VALUE_FEATURES, ValueHead
from wamrl_torchrl.objectives import FeatureKLLoss, FlowNFTLoss, FlowPPOLoss, VideoSFTLoss, WeightedFlowLoss
from wamrl_torchrl.objectives.common import ActorLoss
from wamrl_torchrl.objectives.transforms.actor_critic import VALUE_TARGET
from wamrl_torchrl.policy_change import PolicyChange
from wamrl_torchrl.self_imitation import SuccessReplay


class RunningMean:
    """Means of scalars and of vectors' entries over an update; values stay on the device until they are read."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = defaultdict(list)

    def add(self, values: TensorDictBase) -> None:
        """Add one step's scalars."""
        for name, value in values.items():
            self._values[name].append(value.detach())

    def read(self, prefix: str) -> dict[str, float]:
        """Means by ``prefix/name``, or ``prefix/name_k`` for entry k of a vector; entries that are NaN do not count."""
        means = {}
        for name, values in self._values.items():
            if values[0].ndim == 0:
                means[f"{prefix}/{name}"] = float(torch.stack(values).mean())
                continue
            entries = torch.stack(values).nanmean(0).tolist()
            means |= {f"{prefix}/{name}_{k}": value for k, value in enumerate(entries) if not math.isnan(value)}
        return means


def make_actor_loss(policy: FlowPolicy, config: AlgoConfig, parameters: list[nn.Parameter]) -> ActorLoss:
    """The loss that ``algo.actor_loss`` names; an anchor holds to the values that ``parameters`` have now."""
    if config.actor_loss == "nft":
        return FlowNFTLoss(policy, beta=config.nft_beta)
    if config.actor_loss in ("weighted_flow", "self_imitation"):
        return WeightedFlowLoss(policy, weighting=config.weighting, temperature=config.temperature)  # type: ignore[arg-type]
    low, high = config.clip_epsilon
    return FlowPPOLoss(
        policy,
        clip_epsilon=(low, high),
        dual_clip=config.dual_clip,
        normalize_steps=config.normalize_steps,
        rows=config.rows,  # type: ignore[arg-type]
        row_reduction=config.row_reduction,  # type: ignore[arg-type]
        step_loss_weights=config.step_loss_weights,
        anchor=config.anchor,  # type: ignore[arg-type]
        anchor_weight=config.anchor_weight,
        reference=None if config.anchor == "none" else ReferenceActor(parameters),
    )


class ActorUpdate:
    """Epochs of an actor loss over the records of an iteration; trains the action expert.

    Args:
        policy: the policy.
        config: options.
    """

    def __init__(self, policy: FlowPolicy, config: AlgoConfig) -> None:
        self.config = config
        self.policy = policy
        self.learning_rate = config.actor_lr
        self.parameters = actor_parameters(policy.model)
        self.loss = make_actor_loss(policy, config, self.parameters).to(policy.device)
        self.imitation = WeightedFlowLoss(policy).to(policy.device)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=config.actor_lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.average: AveragedModel | None = None
        self._trained = nn.ParameterList(self.parameters)
        if config.actor_average:
            self.average = AveragedModel(self._trained, multi_avg_fn=get_ema_multi_avg_fn(config.actor_average))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """While it lasts the policy has the moving average of the actor's weights, if there is one."""
        if self.average is None:
            yield
            return
        present = [parameter.detach().clone() for parameter in self.parameters]
        self._set(self.average.module.parameters())
        try:
            yield
        finally:
            self._set(present)

    @torch.no_grad()
    def _set(self, values: Iterable[Tensor]) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.copy_(value)

    @property
    def imitates(self) -> bool:
        """Whether successful episodes are kept and imitated."""
        return self.config.actor_loss == "self_imitation" or self.config.self_imitation.weight > 0

    def anneal(self, progress: float) -> None:
        """Set the rate for an iteration at ``progress`` 0..1 of the run; nothing unless ``actor_lr_final`` is given."""
        first, last = self.config.actor_lr, self.config.actor_lr_final
        if last is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = first + min(1.0, progress) * (last - first)

    def __call__(
        self,
        buffer: ReplayBuffer,
        replay: SuccessReplay | None = None,
        *,
        beside: Callable[[], None] | None = None,
    ) -> dict[str, float]:
        """Run the epochs; ends early once the KL passes ``target_kl``. Returns means for the log.

        Args:
            buffer: the iteration's records with advantages; with ``self_imitation`` only the policy's change is
                measured on them.
            replay: what is imitated, if the options ask for it.

        Keyword Args:
            beside: called after every step, as joint training steps the video expert.
        """
        config, means, steps = self.config, RunningMean(), 0
        change = PolicyChange(self.policy, buffer.storage[: len(buffer)])
        for _ in range(config.epochs):
            epoch_kl = []
            for batch in self._batches(buffer, replay):
                out = self._losses(batch, replay)
                self.optimizer.zero_grad(set_to_none=True)
                sum(value for name, value in out.items() if name.startswith("loss_")).backward()
                norm = clip_grad_norm_(self.parameters, config.grad_clip)
                self.optimizer.step()
                if self.average is not None:
                    self.average.update_parameters(self._trained)
                means.add(out.set("grad_norm", norm))
                epoch_kl += [out["kl_approx"]] if "kl_approx" in self.loss.out_keys else []
                steps += 1
                if beside is not None:
                    beside()
            if config.target_kl is not None:
                kl = float(torch.stack(epoch_kl).mean()) if epoch_kl else change.read()["kl"]
                if kl > config.target_kl:
                    break
        moved = change.read()
        self._adapt_rate(moved["kl"])
        metrics = {f"actor/{name}": value for name, value in moved.items()}
        rate = self.optimizer.param_groups[0]["lr"]
        return {**means.read("actor"), **metrics, "actor/steps": float(steps), "actor/lr": rate}

    def _batches(self, buffer: ReplayBuffer, replay: SuccessReplay | None) -> Iterator[TensorDictBase]:
        """An epoch: all records of the iteration once, or as many as are kept of those to imitate."""
        if self.config.actor_loss == "self_imitation":
            assert replay is not None
            imitation, kept = self.config.self_imitation, len(replay)
            for _ in range(imitation.steps or math.ceil(kept / imitation.batch_size) if kept else 0):
                yield replay.sample().to(self.policy.device)
            return
        for batch in buffer:
            batch = batch.to(self.policy.device)
            yield fill_batch(batch, self.config.minibatch_size) if is_half(self.policy) else batch

    def _losses(self, batch: TensorDictBase, replay: SuccessReplay | None) -> TensorDictBase:
        """Terms ``loss_*`` of a step, to be summed, and diagnostics."""
        out, weight = self.loss(batch), self.config.self_imitation.weight
        if weight and replay is not None and len(replay) and self.config.actor_loss != "self_imitation":
            imitated = self.imitation(replay.sample().to(self.policy.device))
            out.set("loss_imitation", weight * imitated["loss_objective"])
        return out

    def _adapt_rate(self, kl: float) -> None:
        """Halve or double the rate if the update moved the policy twice or half as far as ``kl_target``."""
        target, (low, high) = self.config.kl_target, self.config.lr_range
        if target is None:
            return
        factor = 0.5 if kl > 2 * target else 2.0 if kl < target / 2 else 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = min(max(group["lr"] * factor, low), high)


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
            means.add(self.step(online, demos))
        return means.read("video")

    def step(self, online: EpisodeStore, demos: EpisodeStore | None) -> TensorDictBase:
        """Take one step. Returns its losses and diagnostics."""
        batch = self._windows(online, demos)
        out = self.sft(batch).update(self.feature_kl(batch))
        loss = out["loss_video"] + self.config.feature_kl * out["loss_feature_kl"]
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = clip_grad_norm_(self.parameters, self.config.grad_clip)
        self.optimizer.step()
        return out.set("grad_norm", norm)


class ValueUpdate:
    """Regression of the value head on the value targets of an iteration.

    Args:
        head: the value head.
        config: options.
    """

    def __init__(self, head: ValueHead, config: CriticConfig) -> None:
        self.head = head
        self.config = config
        self.optimizer = torch.optim.AdamW(head.parameters(), lr=config.lr, weight_decay=0.0)

    def __call__(self, records: TensorDictBase) -> dict[str, float]:
        """Run the epochs over records [M] with features, values and targets.

        Returns:
            the mean loss, and the share of the targets' variance that the values explained before the first step.
        """
        means, device = RunningMean(), self.head.head[0].weight.device
        data = records.select(VALUE_FEATURES, STATE_VALUE, VALUE_TARGET).to(device)
        value, target = data.get(STATE_VALUE), data.get(VALUE_TARGET)
        explained = 1 - (target - value).var(correction=0) / target.var(correction=0).clamp(min=1e-8)
        for _ in range(self.config.epochs):
            for batch in data[torch.randperm(len(data))].split(self.config.batch_size):
                predicted = self.head(batch.select(VALUE_FEATURES)).get(STATE_VALUE)
                loss = distance_loss(predicted, batch.get(VALUE_TARGET), "l2").mean()
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                self.optimizer.step()
                means.add(TensorDict({"loss": loss}))
        return {**means.read("critic"), "critic/explained_variance": float(explained)}


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


def shuffle_advantages(records: TensorDictBase, *, by_episode: bool = True) -> None:
    """Exchange advantages at random, in place: a control from which nothing can be learned.

    Keyword Args:
        by_episode: those of whole episodes, whose decisions share one; otherwise those of decisions.
    """
    if not by_episode:
        records.set_(schema.ADVANTAGE, records.get(schema.ADVANTAGE)[torch.randperm(len(records))])
        return
    episode, row_episode = records.get(schema.EPISODE_ID).squeeze(-1).unique(return_inverse=True)
    advantage = records.get(schema.ADVANTAGE)
    of_episode = advantage.new_zeros(len(episode), 1).index_copy_(0, row_episode, advantage)
    records.set_(schema.ADVANTAGE, of_episode[torch.randperm(len(episode))][row_episode])


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
