"""Flow-PPO: the clipped surrogate on the exact log-probs of the SDE steps of a flow sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import dispatch
from torch import Tensor

from wamrl_torchrl import schema
from wamrl_torchrl.modules.fastwam.model import masked_mean
from wamrl_torchrl.modules.fastwam.schedule import build_schedule
from wamrl_torchrl.modules.flow_sde import Transitions, sde_coefficients
from wamrl_torchrl.modules.policy import FlowPolicy
from wamrl_torchrl.modules.reference import ReferenceActor
from wamrl_torchrl.objectives.common import ActorLoss

#: exp() of a larger log-ratio says nothing more and overflows.
MAX_LOG_RATIO = 20.0
#: Where :meth:`FlowPPOLoss.prepare` keeps the velocities of the reference actor.
REFERENCE_VELOCITY = "reference_velocity"


class FlowPPOLoss(ActorLoss):
    r"""Clipped policy loss for :class:`~wamrl_torchrl.modules.policy.FlowPolicy`.

    One ratio per stochastic step of a chain:

    .. math::
        \log r = \sum_{rows} \log p_\theta(x_{k+1} | x_k) - \log p_{old}(x_{k+1} | x_k), \quad
        L = -\min(r A, clip(r, 1 - \epsilon_{lo}, 1 + \epsilon_{hi}) A)

    With one stochastic step, ``rows="prefix"``, no step normalisation and no dual clip it equals
    :class:`torchrl.objectives.ClipPPOLoss`.

    Args:
        actor_network: the policy. It is used as it is, not functionalised, so hooks, DDP and compile keep working.

    Keyword Args:
        clip_epsilon: symmetric, or (lower, upper) clip range; (0.2, 0.28) after DAPO (arXiv 2503.14476).
        dual_clip: for negative advantages the loss is at most ``dual_clip * |A|`` (arXiv 1912.09729); None for no
            bound.
        rows: which actions of the chunk enter the ratio: those ``"executed"`` (by the mask of the record), the
            ``"prefix"`` that the environment would execute without an early end, or ``"all"`` 32.
        row_reduction: ``"sum"`` is the true density ratio, ``"mean"`` its per-dimension geometric mean, which wants a
            clip range about as many times smaller as there are dimensions. ``"token"`` clips a ratio per action: the
            product of the ratios of a chunk is then bounded action by action, as for the tokens of a text.
        normalize_steps: scale each log-ratio by ``c_ref / c_k`` with c_k the gain of its step and c_ref the median
            gain. The gain differs tenfold between steps, so that one clip range cannot fit them all otherwise
            (after GRPO-Guard, arXiv 2510.22319). Exact at the old weights.
        step_loss_weights: weights of the sampling steps in the loss, K numbers of which their mean is taken out; None
            for equal ones. With ``stochastic_steps="all"`` every step of a chain has a term of its own.
        anchor: what holds the actor near ``reference``: ``"velocity"``, the mean squared change of the velocity at the
            stochastic steps, or ``"analytic"``, the Kullback-Leibler divergence of these Gaussian steps per action
            dimension, which is ``c_k^2 / 2`` times as much. Call :meth:`prepare` on the records before the first step.
        anchor_weight: factor on it.
        reference: the actor to stay near.
        reduction: ``"mean"``, ``"sum"`` or ``"none"`` over batch and stochastic steps.

    The loss writes ``loss_objective`` and, detached, ``clip_fraction``, ``kl_approx``, ``max_ratio``, ``mean_ratio``,
    ``ESS`` (as TorchRL's PPO losses do), ``abs_log_ratio`` and, by sampling step, vectors [K] ``clip_fraction_step``
    and ``abs_log_ratio_step`` (NaN for a step that no chain of the batch drew); with an anchor also ``loss_anchor``,
    with gradient, which ``loss_objective`` does not contain. Records without any counted action carry no weight.

    Examples:
        >>> loss = FlowPPOLoss(policy, clip_epsilon=(0.2, 0.28))
        >>> loss(batch)["loss_objective"].backward()
    """

    @dataclass
    class _AcceptedKeys:
        """Keys of the input; set them with :meth:`set_keys`."""

        advantage: NestedKey = schema.ADVANTAGE
        log_prob_rows: NestedKey = schema.LOG_PROB_ROWS
        executed_mask: NestedKey = ("next", schema.EXECUTED_MASK)

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys
    out_keys = (
        "loss_objective", "clip_fraction", "kl_approx", "max_ratio", "mean_ratio", "ESS", "abs_log_ratio",
        "clip_fraction_step", "abs_log_ratio_step",
    )  # fmt: skip

    def __init__(
        self,
        actor_network: FlowPolicy,
        *,
        clip_epsilon: float | tuple[float, float] = (0.2, 0.28),
        dual_clip: float | None = 3.0,
        rows: Literal["executed", "prefix", "all"] = "executed",
        row_reduction: Literal["sum", "mean", "token"] = "sum",
        normalize_steps: bool = True,
        step_loss_weights: Sequence[float] | None = None,
        anchor: Literal["none", "velocity", "analytic"] = "none",
        anchor_weight: float = 0.01,
        reference: ReferenceActor | None = None,
        reduction: Literal["mean", "sum", "none"] = "mean",
    ) -> None:
        super().__init__()
        low, high = (clip_epsilon, clip_epsilon) if isinstance(clip_epsilon, float | int) else clip_epsilon
        if not (0 < low < 1 and high > 0):
            raise ValueError(f"clip_epsilon must be (lower in (0, 1), upper > 0), got {clip_epsilon}")
        if dual_clip is not None and dual_clip <= 1:
            raise ValueError(f"dual_clip must exceed 1, got {dual_clip}")
        for name, value, known in (
            ("rows", rows, ("executed", "prefix", "all")),
            ("row_reduction", row_reduction, ("sum", "mean", "token")),
            ("anchor", anchor, ("none", "velocity", "analytic")),
            ("reduction", reduction, ("mean", "sum", "none")),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {known}, got {value!r}")
        if (anchor == "none") is not (reference is None):
            raise ValueError(f"an anchor and the reference it holds to go together, got {anchor!r} and {reference}")
        if not anchor_weight >= 0:
            raise ValueError(f"anchor_weight must not be negative, got {anchor_weight}")
        self.anchor, self.anchor_weight, self.reference = anchor, anchor_weight, reference
        self.actor_network = actor_network
        self.clip_epsilon = (float(low), float(high))
        self.dual_clip = dual_clip
        self.rows = rows
        self.row_reduction = row_reduction
        self.normalize_steps = normalize_steps
        self.reduction = reduction
        sde = actor_network.sde
        schedule = build_schedule(sde.num_steps, actor_network.model.config.action_shift)
        gain = sde_coefficients(schedule, sde.noise_level, std_floor=sde.std_floor).gain
        self.register_buffer("step_scale", gain.median() / gain, persistent=False)
        weights = torch.ones(sde.num_steps) if step_loss_weights is None else torch.tensor(list(step_loss_weights))
        if len(weights) != sde.num_steps or not bool((weights >= 0).all()) or not float(weights.sum()) > 0:
            raise ValueError(
                f"step_loss_weights must be K={sde.num_steps} numbers that are not negative nor all 0, "
                f"got {step_loss_weights}"
            )
        self.register_buffer("step_loss_weights", weights.float() / weights.float().mean(), persistent=False)

    def _in_keys(self) -> list[NestedKey]:
        keys = self.tensor_keys
        extra = [keys.executed_mask] if self.rows == "executed" else []
        extra += [] if self.anchor == "none" else [REFERENCE_VELOCITY]
        return [*self.actor_network.replay_keys, keys.advantage, keys.log_prob_rows, *extra]

    @torch.no_grad()
    def prepare(self, records: TensorDictBase, *, batch_size: int) -> None:
        """Write the reference actor's velocities at the stochastic steps, in place; nothing without an anchor."""
        if self.reference is None:
            return
        network, where = self.actor_network, records.get(schema.CHAIN).device
        parts = records.select(*network.replay_keys).split(batch_size)
        with self.reference.applied():
            velocities = [network.transitions(part.to(network.device)).velocity.to(where) for part in parts]
        records.set(REFERENCE_VELOCITY, torch.cat(velocities))

    def _row_mask(self, tensordict: TensorDictBase, batch: int) -> Tensor:
        """Bool [B,T]: actions that enter the ratio."""
        network = self.actor_network
        position = torch.arange(network.model.config.chunk, device=network.device)
        if self.rows == "executed":
            return tensordict.get(self.tensor_keys.executed_mask)
        limit = network.executed_rows if self.rows == "prefix" else len(position)
        return (position < limit).expand(batch, -1)

    def log_ratio(self, tensordict: TensorDictBase, new_rows: Tensor, mask: Tensor) -> Tensor:
        """Log-ratio [B,S] per stochastic step, reduced over the rows of ``mask`` and normalised by step.

        With ``row_reduction="token"`` it is [B,S,T], 0 outside ``mask``.
        """
        old_rows = tensordict.get(self.tensor_keys.log_prob_rows)
        if old_rows.shape != new_rows.shape:
            raise ValueError(
                f"{self.tensor_keys.log_prob_rows!r} must be of shape {tuple(new_rows.shape)} (batch, stochastic "
                f"steps, chunk), found {tuple(old_rows.shape)}"
            )
        log_ratio = (new_rows - old_rows) * mask[:, None]
        if self.row_reduction != "token":
            log_ratio = log_ratio.sum(-1)
        if self.row_reduction == "mean":
            log_ratio = log_ratio / (mask.sum(-1, keepdim=True) * schema.ACTION_DIM).clamp(min=1)
        if self.normalize_steps:
            log_ratio = log_ratio * _expand(self.step_scale[tensordict.get(schema.K_STAR)], log_ratio)
        return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Loss of a batch of macro-steps [B]."""
        advantage = self._advantage(tensordict)
        moves = self.actor_network.transitions(tensordict)
        new_rows, k_star = moves.log_prob_rows(), tensordict.get(schema.K_STAR)
        mask = self._row_mask(tensordict, len(new_rows))
        log_ratio = self.log_ratio(tensordict, new_rows, mask)
        ratio, advantage = log_ratio.exp(), _expand(advantage, log_ratio)
        low, high = 1 - self.clip_epsilon[0], 1 + self.clip_epsilon[1]
        gain = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        if self.dual_clip is not None:
            gain = torch.where(advantage < 0, torch.maximum(gain, self.dual_clip * advantage), gain)
        counted = mask[:, None] if self.row_reduction == "token" else mask.any(-1, keepdim=True)
        counted = counted.expand_as(gain)
        loss = torch.where(counted, -gain, 0.0) * _expand(self.step_loss_weights[k_star], gain)
        if self.reduction == "mean":
            loss = loss.sum() / counted.sum().clamp(min=1)
        elif self.reduction == "sum":
            loss = loss.sum()
        out = {"loss_objective": loss, **self._diagnostics(log_ratio.detach(), ratio.detach(), counted, k_star)}
        if self.anchor != "none":
            out["loss_anchor"] = self.anchor_weight * self._anchor_loss(tensordict, moves, mask)
        return TensorDict(out)

    def _anchor_loss(self, tensordict: TensorDictBase, moves: Transitions, mask: Tensor) -> Tensor:
        reference = tensordict.get(REFERENCE_VELOCITY, None)
        if reference is None:
            raise KeyError(
                f"records lack {REFERENCE_VELOCITY!r}: call FlowPPOLoss.prepare on them before the first step"
            )
        change = masked_mean((moves.velocity - reference).square().mean(-1), ~mask[:, None])
        if self.anchor == "analytic":
            change = 0.5 * moves.gain.square() * change
        return change.mean()

    def _diagnostics(self, log_ratio: Tensor, ratio: Tensor, counted: Tensor, k_star: Tensor) -> dict[str, Tensor]:
        total = counted.sum().clamp(min=1)
        low, high = 1 - self.clip_epsilon[0], 1 + self.clip_epsilon[1]
        weight = torch.where(counted, ratio, 0.0)
        clipped = ((ratio < low) | (ratio > high)) & counted
        step = _expand(k_star, ratio).expand_as(ratio).flatten()
        zeros = ratio.new_zeros(len(self.step_scale))
        seen = zeros.index_add(0, step, counted.flatten().to(ratio.dtype))
        size = torch.where(counted, log_ratio.abs(), 0.0).flatten()
        return {
            "clip_fraction_step": zeros.index_add(0, step, clipped.flatten().to(ratio.dtype)) / seen,
            "abs_log_ratio_step": zeros.index_add(0, step, size) / seen,
            "clip_fraction": clipped.sum() / total,
            # Schulman's k3 estimator: unbiased and never negative.
            "kl_approx": torch.where(counted, ratio - 1 - log_ratio, 0.0).sum() / total,
            "max_ratio": weight.max(),
            "mean_ratio": weight.sum() / total,
            "ESS": weight.sum().square() / weight.square().sum().clamp(min=1e-12) / total,
            "abs_log_ratio": torch.where(counted, log_ratio.abs(), 0.0).sum() / total,
        }


def _expand(per_step: Tensor, like: Tensor) -> Tensor:
    """``per_step`` [B,S] (or [B,1]) with the trailing dimensions of ``like``."""
    return per_step.view(*per_step.shape, *[1] * (like.ndim - per_step.ndim))
