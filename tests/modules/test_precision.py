"""bfloat16 weights, and fp32 where it matters."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import make_model, make_policy, make_record, make_states
from wamrl_torchrl import schema
from wamrl_torchrl.modules.lora import VideoLoRA, add_video_lora
from wamrl_torchrl.modules.trainable import ActorTraining, actor_parameters, set_actor_training, video_parameters
from wamrl_torchrl.objectives import FlowPPOLoss
from wamrl_torchrl.precision import tf32_products


def relative(found, expected) -> float:
    return float(((found - expected).norm() / expected.norm()).detach())


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_tf32_is_for_a_while_and_set_back_after_errors(before, enabled):
    products, seen = torch.backends.cuda.matmul, []

    def fail():
        with tf32_products(enabled):
            seen.append(products.allow_tf32)
            raise KeyError

    with tf32_products(before):
        with pytest.raises(KeyError):
            fail()
        seen.append(products.allow_tf32)
    assert seen == [enabled, before]


class TestBfloat16:
    def test_tables_and_statistics_keep_their_precision(self):
        policy = make_policy()
        tables = {name: value.clone() for name, value in policy.named_buffers() if value.is_floating_point()}
        policy.to(torch.bfloat16)
        kept = {name for name, value in policy.named_buffers() if value.dtype == torch.float32}
        assert kept == set(tables) - {"model.contexts.contexts"}
        assert {name.split(".")[-1] for name in kept} >= {"cos", "sin", "state_min", "atoms", "scale"}
        assert all(torch.equal(tables[name], dict(policy.named_buffers())[name]) for name in kept)

    def test_velocity_is_that_of_fp32_up_to_rounding(self):
        states, x, sigma = make_states(4), torch.randn(4, 32, 7), torch.rand(4)
        exact = make_model()
        rounded = make_model().to(torch.bfloat16)
        # The same weights in both: what is left is rounding inside the passes.
        exact.load_state_dict({name: value.float() for name, value in rounded.state_dict().items()})
        reference = exact.action_velocity(x, sigma, exact.condition(states))
        velocity = rounded.action_velocity(x, sigma, rounded.condition(states))
        assert velocity.dtype == torch.float32
        assert 0 < relative(velocity, reference) < 0.02

    def test_imagination_is_that_of_fp32_up_to_rounding(self):
        states, noise = make_states(3), torch.randn(3, 48, 2, 4, 8)
        exact, rounded = make_model(), make_model().to(torch.bfloat16)
        exact.load_state_dict({name: value.float() for name, value in rounded.state_dict().items()})
        latents = rounded.imagine(states, noise, num_steps=4)
        assert latents.dtype == torch.float32
        assert relative(latents, exact.imagine(states, noise, num_steps=4)) < 0.02

    def test_chain_and_log_prob_are_fp32_and_replay_bit_for_bit(self):
        policy = make_policy(stochastic_steps="all").to(torch.bfloat16)
        record = make_record(policy, 5)
        for key in (schema.CHAIN, schema.LOG_PROB, schema.LOG_PROB_ROWS, schema.ACTION):
            assert record[key].dtype == torch.float32
        # A chain in bfloat16 would hold values of 8 significant bits only.
        assert not torch.equal(record[schema.CHAIN], record[schema.CHAIN].bfloat16().float())
        assert torch.equal(policy.log_prob_rows(record), record[schema.LOG_PROB_ROWS])

    def test_actor_gradients_reach_bfloat16_weights(self):
        policy = make_policy().to(torch.bfloat16)
        out = FlowPPOLoss(policy)(make_record(policy, 4))
        assert out["loss_objective"].dtype == torch.float32
        out["loss_objective"].backward()
        gradients = [p.grad for p in policy.model.mot.action.parameters()]
        assert {g.dtype for g in gradients} == {torch.bfloat16}
        assert all(bool(torch.isfinite(g).all()) for g in gradients)

    def test_adapters_are_fp32_over_bfloat16_weights(self):
        model, states, noise = make_model().to(torch.bfloat16), make_states(2), torch.randn(2, 48, 2, 4, 8)
        before = model.imagine(states, noise, num_steps=2)
        add_video_lora(model, VideoLoRA(rank=2))
        set_actor_training(model, ActorTraining(kind="lora", rank=2))
        trained = [*actor_parameters(model), *video_parameters(model)]
        assert {p.dtype for p in trained} == {torch.float32}
        assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
        assert torch.equal(model.imagine(states, noise, num_steps=2), before)
        # Steps a thousandth of a weight survive, which bfloat16 would round away.
        weights = [p.detach().clone() for p in trained]
        with torch.no_grad():
            for p in trained:
                p.mul_(1.001)
        changed = [not torch.equal(a, b) for a, b in zip(trained, weights, strict=True) if b.any()]
        assert changed
        assert all(changed)
