r"""The SDE step inside the flow sampler, and exact log-probs of what it drew.

A chain runs ``x_0 ~ N(0, I)`` through K steps of a :class:`~wamrl_torchrl.modules.fastwam.schedule.Schedule` to the
action chunk ``x_K``. Most steps are Euler steps of the flow ODE; at the *stochastic* steps the Euler step is replaced
by one of the SDE with the same marginals (Flow-GRPO, arXiv 2505.05470):

.. math::
    s_k = a \sqrt{\sigma_k / (1 - \bar\sigma_k)}, \quad std_k = s_k \sqrt{h_k}, \quad
    \mu_k = x (1 - s_k^2 h_k / 2\sigma_k) - h_k v (1 + s_k^2 (1 - \sigma_k) / 2\sigma_k)

with :math:`h_k = \sigma_k - \sigma_{k+1}`, and :math:`\bar\sigma_0 = \sigma_1` where :math:`\sigma_0 = 1` would
divide by zero, so :math:`std_0 = a` exactly. Everything here is fp32; the model casts at its own boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor

from wamrl_torchrl.modules.fastwam.schedule import Schedule, build_schedule
from wamrl_torchrl.modules.noise import mix_seeds, seeded_normal, seeded_uniform

#: How many steps of a chain are stochastic: one drawn at random, that many drawn at random, all, or none (the ODE).
StochasticSteps = str | int


class FlowModel(Protocol):
    """What the sampler needs of a model."""

    @property
    def chunk_shape(self) -> tuple[int, int]:
        """Shape (actions, action dim) of a chunk."""

    def condition(self, state: TensorDictBase) -> Any:
        """Whatever the velocity needs of the states, constant over the steps of a chain."""

    def action_velocity(self, actions: Tensor, sigma: Tensor, condition: Any) -> Tensor:
        """Velocity [B,T,A] at noisy actions [B,T,A] and sigma [B]."""


class SDECoefficients(NamedTuple):
    """The Gaussian transition of every step, ``N(mean_x * x + mean_v * v, std)``; fp32 [K] each."""

    mean_x: Tensor
    mean_v: Tensor
    std: Tensor

    @property
    def gain(self) -> Tensor:
        """c_k = |d mean / d v| / std: how far a unit change of velocity moves the mean, in standard deviations."""
        return self.mean_v.abs() / self.std

    def mean(self, x: Tensor, velocity: Tensor, step: Tensor) -> Tensor:
        """Means [B,T,A] of the transitions at ``step`` int64 [B]."""
        return self.mean_x[step, None, None] * x + self.mean_v[step, None, None] * velocity


def sde_coefficients(schedule: Schedule, a: float, *, std_floor: float = 0.0) -> SDECoefficients:
    """Coefficients of the SDE step for noise level ``a``.

    Keyword Args:
        std_floor: raises s_k where the standard deviation would be smaller, in mean and deviation alike, so that the
            density stays exact.

    Raises:
        ValueError: ``a`` not positive or ``std_floor`` negative.
    """
    if not a > 0:
        raise ValueError(f"noise level a must be positive, got {a}")
    if std_floor < 0:
        raise ValueError(f"std_floor must not be negative, got {std_floor}")
    sigma = schedule.sigmas[:-1].double()
    following = schedule.sigmas[1:].double()
    h = sigma - following
    edge = torch.where(sigma < 1, sigma, following)
    s = (a * (sigma / (1 - edge)).sqrt()).clamp(min=std_floor / h.sqrt())
    drift = s.square() / (2 * sigma)
    return SDECoefficients((1 - drift * h).float(), (-h * (1 + drift * (1 - sigma))).float(), (s * h.sqrt()).float())


def gaussian_log_prob(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Log-density [B,T] of the rows of ``x`` [B,T,A] under N(mean, std [B]), summed over A."""
    std = std[:, None, None]
    return torch.distributions.Normal(mean, std, validate_args=False).log_prob(x).sum(-1)


def num_stochastic_steps(stochastic_steps: StochasticSteps, num_steps: int) -> int:
    """Number S of stochastic steps in a chain of ``num_steps``.

    Raises:
        ValueError: an unknown name, or a count outside 0..``num_steps``.
    """
    named = {"one_random": 1, "all": num_steps, "none": 0}
    if isinstance(stochastic_steps, str):
        if stochastic_steps not in named:
            raise ValueError(f"stochastic_steps must be one of {sorted(named)} or a count, got {stochastic_steps!r}")
        return named[stochastic_steps]
    if not 0 <= stochastic_steps <= num_steps:
        raise ValueError(f"stochastic_steps (K_sde) must lie in 0..K={num_steps}, got {stochastic_steps}")
    return stochastic_steps


class ChainNoise(NamedTuple):
    """All randomness of a batch of chains, drawn before the first step so that no batching can change it."""

    start: Tensor  # fp32 [B,T,A], x_0
    steps: Tensor  # fp32 [B,K,T,A], noise of the step if it is stochastic
    choice: Tensor  # fp32 [B,K], uniform numbers that choose the stochastic steps


def draw_noise(
    batch: int, chunk_shape: tuple[int, int], num_steps: int, generator: torch.Generator | None = None
) -> ChainNoise:
    """Draw the noise of ``batch`` chains from a generator (on the generator's device)."""
    device = "cpu" if generator is None else generator.device
    start = torch.randn((batch, *chunk_shape), generator=generator, device=device)
    steps = torch.randn((batch, num_steps, *chunk_shape), generator=generator, device=device)
    return ChainNoise(start, steps, torch.rand((batch, num_steps), generator=generator, device=device))


def seeded_noise(seeds: Tensor, chunk_shape: tuple[int, int], num_steps: int) -> ChainNoise:
    """The noise of chains named by int64 ``seeds`` [B]; a row depends on its own seed only."""
    return ChainNoise(
        seeded_normal(mix_seeds(seeds, 0), chunk_shape),
        seeded_normal(mix_seeds(seeds, 1), (num_steps, *chunk_shape)),
        seeded_uniform(mix_seeds(seeds, 2), (num_steps,)).float(),
    )


def choose_steps(choice: Tensor, count: int, weights: Tensor) -> Tensor:
    """Draw ``count`` distinct steps per row without replacement, increasing; int64 [B,count].

    Args:
        choice: uniform numbers [B,K].
        count: steps to draw, S.
        weights: non-negative weights [K]; a step of weight 0 is never drawn.

    Raises:
        ValueError: fewer than ``count`` steps have a positive weight.
    """
    if int((weights > 0).sum()) < count:
        raise ValueError(f"{count} stochastic steps asked, but only {int((weights > 0).sum())} have a positive weight")
    # Exponential races: the smallest arrival times of rate w_k are a weighted draw without replacement.
    arrival = -torch.log(choice.clamp(min=1e-30)) / weights
    return arrival.topk(count, dim=-1, largest=False).indices.sort(-1).values


def step_weights(
    num_steps: int,
    *,
    weights: Sequence[float] | None = None,
    ignore_last: bool = False,
    window: tuple[int, int] | None = None,
) -> Tensor:
    """Weights fp32 [K] with which steps are chosen to be stochastic.

    Keyword Args:
        weights: one per step; equal if None.
        ignore_last: never choose the last step. It has the smallest deviation and the largest log-ratio gain, but also
            most of the exploration.
        window: (first, count) of the only steps to choose from, for a window that slides over training.

    Raises:
        ValueError: wrong length, a negative weight, or a window outside the chain.
    """
    out = torch.ones(num_steps) if weights is None else torch.tensor(list(weights), dtype=torch.float32)
    if len(out) != num_steps or bool((out < 0).any()):
        raise ValueError(f"step weights must be {num_steps} non-negative numbers, got {out.tolist()}")
    if window is not None:
        first, count = window
        if not (first >= 0 and count >= 1 and first + count <= num_steps):
            raise ValueError(f"window (first, count) must lie inside the {num_steps} steps, got {window}")
        inside = torch.zeros(num_steps)
        inside[first : first + count] = 1
        out = out * inside
    if ignore_last:
        out[-1] = 0
    return out


class ChainSample(NamedTuple):
    """Sampled chains and the log-probs of their stochastic transitions."""

    chain: Tensor  # fp32 [B,K+1,T,A]; chain[:, -1] is the action chunk
    k_star: Tensor  # int64 [B,S], increasing
    log_prob_rows: Tensor  # fp32 [B,S,T], per action of the chunk


@torch.no_grad()
def sample_chain(
    model: FlowModel,
    state: TensorDictBase,
    K: int,
    a: float,
    generator: torch.Generator | None = None,
    *,
    stochastic_steps: StochasticSteps = "one_random",
    shift: float = 1.0,
    std_floor: float = 0.0,
    weights: Tensor | None = None,
    noise: ChainNoise | None = None,
    condition: Any = None,
) -> ChainSample:
    """Sample action chunks and keep their whole chains.

    Args:
        model: the flow model.
        state: states [B].
        K: sampling steps.
        a: noise level of the SDE; about 0.3 to 0.7. Not used when no step is stochastic.
        generator: source of the noise, unless ``noise`` is given.

    Keyword Args:
        stochastic_steps: see :data:`StochasticSteps`.
        shift: action shift of the schedule; it belongs to the weights.
        std_floor: see :func:`sde_coefficients`.
        weights: see :func:`step_weights`.
        noise: noise to use instead of drawing it.
        condition: what ``model.condition(state)`` would give, if it is there already.

    Returns:
        chains, stochastic steps and log-probs.

    Raises:
        ValueError: an option out of range, or noise of another shape.
    """
    batch = state.batch_size[0]
    if noise is None:
        noise = draw_noise(batch, model.chunk_shape, K, generator)
    if noise.steps.shape != (batch, K, *model.chunk_shape):
        want = (batch, K, *model.chunk_shape)
        raise ValueError(f"noise must be of shape {want} (batch, K, chunk), found {tuple(noise.steps.shape)}")
    count = num_stochastic_steps(stochastic_steps, K)
    schedule = build_schedule(K, shift, device=noise.start.device)
    weights = torch.ones(K) if weights is None else weights
    k_star = choose_steps(noise.choice, count, weights.to(noise.choice.device))
    coefficients = sde_coefficients(schedule, a, std_floor=std_floor) if count else None

    if condition is None:
        condition = model.condition(state)
    x = noise.start
    chain = [x]
    log_prob_rows = x.new_zeros(batch, count, x.shape[1])
    for k, (sigma, delta) in enumerate(zip(schedule.sigmas[:-1], schedule.deltas, strict=True)):
        velocity = model.action_velocity(x, sigma.expand(batch), condition)
        following = x + delta * velocity
        if coefficients is not None:
            step = k_star.new_full((batch,), k)
            mean, std = coefficients.mean(x, velocity, step), coefficients.std[step]
            chosen = k_star == k  # [B,S], at most one per row
            noisy = mean + std[:, None, None] * noise.steps[:, k]
            following = torch.where(chosen.any(-1)[:, None, None], noisy, following)
            rows = gaussian_log_prob(following, mean, std)
            log_prob_rows = torch.where(chosen[:, :, None], rows[:, None], log_prob_rows)
        x = following
        chain.append(x)
    return ChainSample(torch.stack(chain, 1), k_star, log_prob_rows)


class Transitions(NamedTuple):
    """Gaussian transitions of the stochastic steps under the current weights."""

    mean: Tensor  # [B,S,T,A], with gradient
    std: Tensor  # [B,S]
    velocity: Tensor  # [B,S,T,A], with gradient
    target: Tensor  # [B,S,T,A], what was drawn
    gain: Tensor  # [B,S], c_k

    def log_prob_rows(self) -> Tensor:
        """Log-densities fp32 [B,S,T] of what was drawn, one per action of the chunk."""
        flat = gaussian_log_prob(self.target.flatten(0, 1), self.mean.flatten(0, 1), self.std.flatten())
        return flat.unflatten(0, self.std.shape)


def chain_transitions(
    model: FlowModel,
    states: TensorDictBase,
    chains: Tensor,
    k_star: Tensor,
    a: float,
    *,
    shift: float = 1.0,
    std_floor: float = 0.0,
) -> Transitions:
    """Re-evaluate the stochastic transitions of stored chains; see :func:`logprob_chain`."""
    if chains.ndim != 4 or tuple(chains.shape[2:]) != tuple(model.chunk_shape):
        raise ValueError(f"chains must be [B,K+1,{model.chunk_shape}], found {tuple(chains.shape)}")
    num_steps = chains.shape[1] - 1
    if k_star.shape[1] > num_steps:
        raise ValueError(f"k_star names {k_star.shape[1]} steps (K_sde), but the chain has only K={num_steps}")
    # On a GPU looking at the values would wait for the device.
    if k_star.device.type == "cpu" and bool(((k_star < 0) | (k_star >= num_steps)).any()):
        raise ValueError(f"k_star must lie in 0..{num_steps - 1}; -1 marks a deterministic policy, without log-prob")
    schedule = build_schedule(num_steps, shift, device=chains.device)
    coefficients = sde_coefficients(schedule, a, std_floor=std_floor)
    condition = model.condition(states)
    rows = torch.arange(len(chains), device=chains.device)
    means, velocities = [], []
    # One evaluation per stochastic step: folding them into the batch would change the kernels' rounding, and the
    # log-prob of unchanged weights must equal the stored one bit for bit.
    for step in k_star.unbind(1):
        x = chains[rows, step]
        velocity = model.action_velocity(x, schedule.sigmas[step], condition)
        velocities.append(velocity)
        means.append(coefficients.mean(x, velocity, step))
    return Transitions(
        torch.stack(means, 1),
        coefficients.std[k_star],
        torch.stack(velocities, 1),
        chains[rows[:, None], k_star + 1],
        coefficients.gain[k_star],
    )


def logprob_chain(
    model: FlowModel,
    states: TensorDictBase,
    chains: Tensor,
    k_star: Tensor,
    a: float,
    *,
    shift: float = 1.0,
    std_floor: float = 0.0,
) -> Tensor:
    """Log-probs of the stochastic transitions of stored chains under the current weights, with gradient.

    Args:
        model: the flow model.
        states: states [B] the chains were sampled in.
        chains: fp32 [B,K+1,T,A].
        k_star: int64 [B,S], the stochastic steps.
        a: noise level they were sampled with.

    Keyword Args:
        shift: action shift they were sampled with.
        std_floor: floor they were sampled with.

    Returns:
        fp32 [B,S,T]: one per action of the chunk. Sum over the actions that count; the sum over all of them is the
        log-density of the transition.

    Raises:
        ValueError: chains of another chunk shape, or more stochastic steps than steps.
    """
    moves = chain_transitions(model, states, chains, k_star, a, shift=shift, std_floor=std_floor)
    return moves.log_prob_rows()
