"""Likelihood-free actor losses: flow matching on the chunks of a rollout, weighted by how well they went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import dispatch
from torch import Tensor

from wamrl_torchrl import schema
from wamrl_torchrl.modules.fastwam.model import FlowNoise, draw_flow_noise, masked_mean
from wamrl_torchrl.modules.fastwam.schedule import training_weight
from wamrl_torchrl.modules.policy import FlowPolicy
from wamrl_torchrl.objectives.common import ActorLoss

#: Where :meth:`FlowNFTLoss.prepare` keeps what the policy of the rollout says.
NFT_SIGMA, NFT_NOISE, NFT_VELOCITY = "nft_sigma", "nft_noise", "nft_velocity"


class _FlowMatchingLoss(ActorLoss):
    """What the two losses share: velocities at noised chunks, and errors of the actions that were executed."""

    @dataclass
    class _AcceptedKeys:
        """Keys of the input; set them with :meth:`set_keys`."""

        advantage: NestedKey = schema.ADVANTAGE
        executed_mask: NestedKey = ("next", schema.EXECUTED_MASK)

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys

    def __init__(self, actor_network: FlowPolicy, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.actor_network = actor_network
        self.generator = generator

    def _in_keys(self) -> list[NestedKey]:
        return [*self.actor_network.replay_keys, self.tensor_keys.advantage, self.tensor_keys.executed_mask]

    def _draw(self, chunk: Tensor) -> FlowNoise:
        return draw_flow_noise(chunk, self.actor_network.model.config.action_shift, self.generator)

    def _velocity(self, record: TensorDictBase, noisy: Tensor, sigma: Tensor) -> Tensor:
        return self.actor_network.action_velocity(noisy, sigma, self.actor_network.condition(record))

    def _error(self, record: TensorDictBase, velocity: Tensor, target: Tensor, sigma: Tensor) -> Tensor:
        """Mean squared velocity error [B] of the executed actions, with FastWAM's weight of the time."""
        error = (velocity - target).square().mean(-1)
        weight = training_weight(sigma, self.actor_network.model.config.action_shift)
        return masked_mean(error, ~record.get(self.tensor_keys.executed_mask)) * weight

    def _counted(self, record: TensorDictBase) -> Tensor:
        """Float [B]: 1 where anything was executed."""
        return record.get(self.tensor_keys.executed_mask).any(-1).float()


class WeightedFlowLoss(_FlowMatchingLoss):
    r"""Advantage-weighted flow matching: clone the chunks that went better than their group.

    .. math:: L = \frac{\sum_b w(A_b) \, \ell_b}{\sum_b w(A_b)}, \quad
              \ell_b = w_t(\sigma) \, mean (v_\theta(x_\sigma, \sigma) - (\epsilon - x_0))^2

    with x_0 the executed actions of the chunk, and a fresh time and noise in every call. Weights are ``max(A, 0)``, or
    ``exp(A / temperature)`` as in advantage-weighted regression (arXiv 1910.00177). No likelihood is needed, so chunks
    of the deterministic sampler and old chunks will do as well.

    Args:
        actor_network: the policy.

    Keyword Args:
        weighting: ``"positive"`` or ``"exponential"``.
        temperature: of the exponential weights.
        max_weight: bound of the exponential weights.
        generator: source of times and noise; the default generator if None.

    Writes ``loss_objective`` and, detached, ``flow_error`` (mean error of all chunks) and ``weight_mean``.

    Raises:
        ValueError: an unknown weighting, or a temperature or bound that is not positive.
    """

    out_keys = ("loss_objective", "flow_error", "weight_mean")

    def __init__(
        self,
        actor_network: FlowPolicy,
        *,
        weighting: Literal["positive", "exponential"] = "positive",
        temperature: float = 0.5,
        max_weight: float = 20.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(actor_network, generator=generator)
        if weighting not in ("positive", "exponential"):
            raise ValueError(f"weighting must be 'positive' or 'exponential', got {weighting!r}")
        if not (temperature > 0 and max_weight > 0):
            raise ValueError(f"temperature and max_weight must be positive, got {temperature} and {max_weight}")
        self.weighting, self.temperature, self.max_weight = weighting, temperature, max_weight

    def weights(self, advantage: Tensor) -> Tensor:
        """Weights of chunks, as ``advantage``."""
        if self.weighting == "positive":
            return advantage.clamp(min=0.0)
        return (advantage / self.temperature).exp().clamp(max=self.max_weight)

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Loss of a batch of macro-steps [B]."""
        chunk = tensordict.get(schema.CHAIN)[:, -1]
        flow = self._draw(chunk)
        noisy, target = flow.mix(chunk)
        error = self._error(tensordict, self._velocity(tensordict, noisy, flow.sigma), target, flow.sigma)
        weight = self.weights(self._advantage(tensordict).squeeze(-1)) * self._counted(tensordict)
        # A batch in which nothing went well has no loss, and a gradient of zero.
        loss = (weight * error).sum() / weight.sum().clamp(min=1e-6)
        return TensorDict(
            {"loss_objective": loss, "flow_error": error.detach().mean(), "weight_mean": weight.detach().mean()}
        )


class FlowNFTLoss(_FlowMatchingLoss):
    r"""DiffusionNFT (arXiv 2509.16117): towards the chunks that went well and away from the others.

    Two implicit policies lie around the policy of the rollout, on the line through the trained one,

    .. math:: v^+ = (1-\beta) v_{old} + \beta v_\theta, \quad v^- = (1+\beta) v_{old} - \beta v_\theta, \quad
              L = r \, \|v^+ - u\|^2 + (1 - r) \, \|v^- - u\|^2

    with u the flow-matching target and ``r = (1 + clip(A / advantage_scale, -1, 1)) / 2``. Call :meth:`prepare` on the
    records before the first step: the old velocities are computed once, at a time and noise drawn per record, so that
    no second copy of the weights is kept.

    Args:
        actor_network: the policy.

    Keyword Args:
        beta: distance of the implicit policies; 1 in the paper's best runs.
        advantage_scale: advantage at which a chunk counts as entirely good.
        generator: source of times and noise; the default generator if None.

    Writes ``loss_objective`` and, detached, ``flow_error`` (of the trained policy) and ``optimality`` (mean r).

    Raises:
        ValueError: ``beta`` or ``advantage_scale`` not positive.
        KeyError: records that were not prepared.
    """

    out_keys = ("loss_objective", "flow_error", "optimality")

    def __init__(
        self,
        actor_network: FlowPolicy,
        *,
        beta: float = 1.0,
        advantage_scale: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(actor_network, generator=generator)
        if not (beta > 0 and advantage_scale > 0):
            raise ValueError(f"beta and advantage_scale must be positive, got {beta} and {advantage_scale}")
        self.beta, self.advantage_scale = beta, advantage_scale

    def _in_keys(self) -> list[NestedKey]:
        return [*super()._in_keys(), NFT_SIGMA, NFT_NOISE, NFT_VELOCITY]

    @torch.no_grad()
    def prepare(self, records: TensorDictBase, *, batch_size: int) -> None:
        """Write time, noise and the present policy's velocity of every record, in place."""
        chunks = records.get(schema.CHAIN)[:, -1]
        flow = self._draw(chunks)
        noisy = flow.mix(chunks)[0]
        velocities = []
        device = self.actor_network.device
        parts = (records.select(*self.actor_network.replay_keys), noisy, flow.sigma)
        for part, x, sigma in zip(*(each.split(batch_size) for each in parts), strict=True):
            velocity = self._velocity(part.to(device), x.to(device), sigma.to(device))
            velocities.append(velocity.to(chunks.device))
        records.set(NFT_SIGMA, flow.sigma).set(NFT_NOISE, flow.noise).set(NFT_VELOCITY, torch.cat(velocities))

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Loss of a batch of prepared macro-steps [B]."""
        old = tensordict.get(NFT_VELOCITY, None)
        if old is None:
            raise KeyError(f"records lack {NFT_VELOCITY!r}: call FlowNFTLoss.prepare on them before the first step")
        flow = FlowNoise(tensordict.get(NFT_SIGMA), tensordict.get(NFT_NOISE))
        noisy, target = flow.mix(tensordict.get(schema.CHAIN)[:, -1])
        new, beta = self._velocity(tensordict, noisy, flow.sigma), self.beta
        good = self._error(tensordict, (1 - beta) * old + beta * new, target, flow.sigma)
        bad = self._error(tensordict, (1 + beta) * old - beta * new, target, flow.sigma)
        r = 0.5 + 0.5 * (self._advantage(tensordict).squeeze(-1) / self.advantage_scale).clamp(-1.0, 1.0)
        counted = self._counted(tensordict)
        loss = ((r * good + (1 - r) * bad) * counted).sum() / counted.sum().clamp(min=1)
        error = self._error(tensordict, new.detach(), target, flow.sigma)
        return TensorDict({"loss_objective": loss, "flow_error": error.mean(), "optimality": r.mean()})
