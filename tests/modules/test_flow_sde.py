"""Identities of the SDE step, and exactness of its log-probs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from tests.conftest import make_model, make_states
from wamrl_torchrl.modules.fastwam.schedule import build_schedule
from wamrl_torchrl.modules.flow_sde import (
    chain_transitions,
    choose_steps,
    draw_noise,
    gaussian_log_prob,
    logprob_chain,
    num_stochastic_steps,
    sample_chain,
    sde_coefficients,
    seeded_noise,
    step_weights,
)

VARIANTS = ["one_random", 2, 3, "all"]


class GaussianFlow(torch.nn.Module):
    """Exact flow of data N(mean, d^2): v = E[noise - data | x], with a learnable mean."""

    chunk_shape = (32, 7)

    def __init__(self, mean: float = 0.0, d: float = 0.3) -> None:
        super().__init__()
        self.mean = torch.nn.Parameter(torch.full((32, 7), mean))
        self.d = d

    def condition(self, state):
        return None

    def action_velocity(self, actions: Tensor, sigma: Tensor, condition) -> Tensor:
        sigma = sigma[:, None, None]
        variance = (1 - sigma) ** 2 * self.d**2 + sigma**2
        centred = actions - (1 - sigma) * self.mean
        return (sigma - (1 - sigma) * self.d**2) / variance * centred - self.mean


def batch(size: int) -> TensorDict:
    return TensorDict(batch_size=[size])


class TestCoefficients:
    @pytest.mark.parametrize("shift", [1.0, 5.0])
    @pytest.mark.parametrize("a", [0.1, 0.3, 0.7])
    def test_three_forms_of_the_mean_agree(self, a, shift):
        sigmas = build_schedule(10, shift).sigmas.double()
        sigma, following = sigmas[:-1], sigmas[1:]
        h = sigma - following
        s = a * (sigma / (1 - torch.where(sigma < 1, sigma, following))).sqrt()
        x, v = torch.randn(2, 10, dtype=torch.float64)
        data, noise = x - sigma * v, x + (1 - sigma) * v
        drift = s**2 * h / (2 * sigma)
        first = data * (1 - following) + noise * (following - drift)
        second = (x - h * v) - noise * drift
        c = sde_coefficients(build_schedule(10, shift), a)
        third = c.mean_x * x + c.mean_v * v
        torch.testing.assert_close(first, second)
        torch.testing.assert_close(third, first, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(c.std.double(), s * h.sqrt(), rtol=1e-6, atol=0)

    @pytest.mark.parametrize("shift", [1.0, 5.0])
    def test_first_step_has_standard_deviation_a(self, shift):
        for a in (0.1, 0.5, 1.0):
            assert float(sde_coefficients(build_schedule(10, shift), a).std[0]) == pytest.approx(a, rel=1e-6)

    @pytest.mark.parametrize(
        ("shift", "std", "gain"),
        [
            (
                1.0,
                [0.300, 0.285, 0.190, 0.145, 0.116, 0.095, 0.077, 0.062, 0.047, 0.032],
                [0.33, 0.37, 0.55, 0.72, 0.90, 1.10, 1.35, 1.68, 2.20, 3.31],
            ),
            (
                5.0,
                [0.300, 0.324, 0.238, 0.202, 0.182, 0.170, 0.162, 0.156, 0.149, 0.134],
                [0.072, 0.084, 0.14, 0.20, 0.28, 0.39, 0.56, 0.85, 1.39, 2.79],
            ),
        ],
    )
    def test_known_numbers_at_ten_steps(self, shift, std, gain):
        c = sde_coefficients(build_schedule(10, shift), 0.3)
        torch.testing.assert_close(c.std, torch.tensor(std), rtol=0, atol=6e-4)
        torch.testing.assert_close(c.gain, torch.tensor(gain), rtol=0.02, atol=6e-3)

    def test_floor_raises_the_deviation_and_keeps_the_marginal_mean(self):
        schedule = build_schedule(10, 1.0)
        free, floored = sde_coefficients(schedule, 0.1), sde_coefficients(schedule, 0.1, std_floor=0.05)
        torch.testing.assert_close(floored.std, free.std.clamp(min=0.05))
        changed = free.std < 0.05
        assert changed.any()
        assert (floored.mean_x[changed] != free.mean_x[changed]).all()
        assert torch.equal(floored.mean_x[~changed], free.mean_x[~changed])

    @pytest.mark.parametrize(("a", "floor", "name"), [(0.0, 0.0, "noise level a"), (0.3, -1.0, "std_floor")])
    def test_bad_options(self, a, floor, name):
        with pytest.raises(ValueError, match=name):
            sde_coefficients(build_schedule(4, 1.0), a, std_floor=floor)

    def test_all_steps_stochastic_keep_the_marginals(self):
        """On Gaussian data the SDE at every step must end in the data's distribution, as the ODE does."""
        flow, size = GaussianFlow(mean=0.4, d=0.3), 400
        generator = torch.Generator().manual_seed(0)
        for steps in ("none", "all"):
            end = sample_chain(flow, batch(size), 100, 0.5, generator, stochastic_steps=steps).chain[:, -1]
            assert float(end.mean()) == pytest.approx(0.4, abs=0.01)
            assert float(end.std()) == pytest.approx(0.3, abs=0.02)


class TestStepChoice:
    @given(count=st.integers(0, 6), seed=st.integers(0, 100))
    @settings(max_examples=30, deadline=None)
    def test_distinct_increasing_and_inside(self, count, seed):
        choice = torch.rand(50, 6, generator=torch.Generator().manual_seed(seed))
        steps = choose_steps(choice, count, torch.ones(6))
        assert steps.shape == (50, count)
        assert (steps.diff(dim=-1) > 0).all()
        assert ((steps >= 0) & (steps < 6)).all()

    def test_frequencies_follow_the_weights(self):
        weights = torch.tensor([1.0, 2.0, 0.0, 5.0])
        n = 20_000
        steps = choose_steps(torch.rand(n, 4, generator=torch.Generator().manual_seed(0)), 1, weights)
        found = torch.bincount(steps.flatten(), minlength=4) / n
        expected = weights / weights.sum()
        assert found[2] == 0
        assert (found - expected).abs().max() < 4 * math.sqrt(0.25 / n)

    def test_window_and_ignore_last(self):
        assert step_weights(5, window=(1, 2)).tolist() == [0, 1, 1, 0, 0]
        assert step_weights(4, ignore_last=True, weights=[1, 2, 3, 4]).tolist() == [1, 2, 3, 0]

    @pytest.mark.parametrize(
        ("options", "name"),
        [({"weights": [1, 2]}, "weights"), ({"weights": [1, 1, 1, -1]}, "weights"), ({"window": (3, 2)}, "window")],
    )
    def test_bad_weights(self, options, name):
        with pytest.raises(ValueError, match=name):
            step_weights(4, **options)

    def test_counts(self):
        assert [num_stochastic_steps(s, 7) for s in ("one_random", "all", "none", 3)] == [1, 7, 0, 3]
        with pytest.raises(ValueError, match="K_sde"):
            num_stochastic_steps(8, 7)
        with pytest.raises(ValueError, match="two_random"):
            num_stochastic_steps("two_random", 7)
        with pytest.raises(ValueError, match="positive weight"):
            choose_steps(torch.rand(1, 3), 2, torch.tensor([1.0, 0, 0]))


class TestChain:
    @pytest.mark.parametrize("steps", VARIANTS)
    @pytest.mark.parametrize("shift", [1.0, 5.0])
    def test_stored_log_prob_is_recomputed_bit_for_bit(self, steps, shift):
        model, states = make_model(), make_states(5)
        options = {"shift": shift, "std_floor": 0.02}
        sample = sample_chain(
            model, states, 6, 0.3, torch.Generator().manual_seed(1), stochastic_steps=steps, **options
        )
        again = logprob_chain(model, states, sample.chain, sample.k_star, 0.3, **options)
        assert again.requires_grad
        assert torch.equal(again, sample.log_prob_rows)

    @pytest.mark.parametrize("steps", VARIANTS)
    def test_steps_that_are_not_stochastic_follow_the_ode(self, steps):
        flow, schedule = GaussianFlow(), build_schedule(6, 1.0)
        sample = sample_chain(flow, batch(4), 6, 0.3, torch.Generator().manual_seed(0), stochastic_steps=steps)
        for k in range(6):
            x = sample.chain[:, k]
            ode = x + schedule.deltas[k] * flow.action_velocity(x, schedule.sigmas[k].expand(4), None)
            is_ode = (sample.chain[:, k + 1] == ode).flatten(1).all(-1)
            assert torch.equal(is_ode, ~(sample.k_star == k).any(-1))

    def test_log_prob_is_the_gaussian_density(self):
        flow = GaussianFlow()
        sample = sample_chain(flow, batch(3), 5, 0.4, torch.Generator().manual_seed(0))
        c = sde_coefficients(build_schedule(5, 1.0), 0.4)
        for row, step in enumerate(sample.k_star[:, 0].tolist()):
            x, following = sample.chain[row, step], sample.chain[row, step + 1]
            v = flow.action_velocity(x[None], build_schedule(5, 1.0).sigmas[step][None], None)[0]
            mean, std = c.mean_x[step] * x + c.mean_v[step] * v, c.std[step]
            z = (following - mean) / std
            density = -0.5 * z**2 - std.log() - 0.5 * math.log(2 * math.pi)
            torch.testing.assert_close(sample.log_prob_rows[row, 0], density.sum(-1), rtol=1e-5, atol=1e-4)

    def test_closed_form_of_the_log_ratio(self):
        """log r = sum_d (-c z dv - c^2 dv^2 / 2) for a change dv of the velocity, z the noise that was drawn."""
        flow = GaussianFlow().double()
        sample = sample_chain(flow, batch(16), 8, 0.3, torch.Generator().manual_seed(0))
        chain, k_star = sample.chain.double(), sample.k_star
        before = chain_transitions(flow, batch(16), chain, k_star, 0.3)
        with torch.no_grad():
            flow.mean += 0.05 * torch.randn(32, 7, dtype=torch.float64)
        after = chain_transitions(flow, batch(16), chain, k_star, 0.3)
        log_ratio = log_density(after) - log_density(before)
        std, gain = before.std[..., None, None].double(), before.gain[..., None, None].double()
        # The mean falls as the velocity grows, so z enters with the sign of -c.
        z, dv = (before.target - before.mean) / std, after.velocity - before.velocity
        closed = (-gain * z * dv - 0.5 * gain**2 * dv**2).sum((-2, -1))
        torch.testing.assert_close(log_ratio, closed, rtol=1e-4, atol=1e-4)

    def test_gradient_by_finite_differences(self):
        flow = GaussianFlow(mean=0.1).double()
        sample = sample_chain(flow, batch(4), 5, 0.5, torch.Generator().manual_seed(0), stochastic_steps=2)
        chain, k_star = sample.chain.double(), sample.k_star

        def total() -> Tensor:
            return logprob_chain(flow, batch(4), chain, k_star, 0.5).double().sum()

        total().backward()
        direction = torch.randn(32, 7, dtype=torch.float64)
        slope = float((flow.mean.grad * direction).sum())
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                flow.mean += sign * 1e-4 * direction
                values.append(float(total()))
                flow.mean -= sign * 1e-4 * direction
        assert (values[0] - values[1]) / 2e-4 == pytest.approx(slope, rel=1e-3)

    def test_gradient_reaches_every_weight_of_the_action_expert(self):
        model, states = make_model(), make_states(2)
        sample = sample_chain(model, states, 4, 0.5, torch.Generator().manual_seed(0))
        logprob_chain(model, states, sample.chain, sample.k_star, 0.5).sum().backward()
        assert all(float(p.grad.abs().sum()) > 0 for n, p in model.mot.action.named_parameters() if "k.bias" not in n)

    def test_permuting_the_batch_permutes_the_chains(self):
        model, states = make_model(), make_states(6)
        seeds, order = torch.arange(6) * 17, torch.tensor([3, 0, 5, 1, 4, 2])
        noise = seeded_noise(seeds, (32, 7), 4)
        straight = sample_chain(model, states, 4, 0.5, noise=noise)
        permuted = sample_chain(model, states[order], 4, 0.5, noise=seeded_noise(seeds[order], (32, 7), 4))
        assert torch.equal(permuted.k_star, straight.k_star[order])
        torch.testing.assert_close(permuted.chain, straight.chain[order], rtol=0, atol=2e-6)

    def test_same_generator_same_chain(self):
        flow = GaussianFlow()
        first, second = (sample_chain(flow, batch(3), 5, 0.5, torch.Generator().manual_seed(9)) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    def test_bad_input(self):
        flow = GaussianFlow()
        noise = draw_noise(2, (32, 7), 4)
        with pytest.raises(ValueError, match=r"noise.*\(3, 4, 32, 7\)"):
            sample_chain(flow, batch(3), 4, 0.5, noise=noise)
        with pytest.raises(ValueError, match="chains"):
            logprob_chain(flow, batch(2), torch.zeros(2, 5, 16, 7), torch.zeros(2, 1, dtype=torch.int64), 0.5)
        with pytest.raises(ValueError, match=r"K_sde.*K=4"):
            logprob_chain(flow, batch(2), torch.zeros(2, 5, 32, 7), torch.zeros(2, 5, dtype=torch.int64), 0.5)


def log_density(moves) -> Tensor:
    rows = gaussian_log_prob(moves.target.flatten(0, 1), moves.mean.flatten(0, 1), moves.std.flatten().double())
    return rows.unflatten(0, moves.std.shape).sum(-1)
