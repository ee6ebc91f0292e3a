from __future__ import annotations

import pytest
import torch

from tests.conftest import make_model, make_states
from wamrl_torchrl.modules.lora import VideoLoRA, add_video_lora
from wamrl_torchrl.modules.trainable import video_parameters
from wamrl_torchrl.objectives import FeatureKLLoss

KINDS = ["gauss_kl", "whitened_mse", "mse", "cosine"]


def make_loss(kind: str = "gauss_kl", *, drifted: bool = False) -> FeatureKLLoss:
    model = add_video_lora(make_model(), VideoLoRA(rank=4))
    if drifted:
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in video_parameters(model):
                parameter.normal_(std=0.1)
    return FeatureKLLoss(model, kind=kind)


class TestDivergence:
    @pytest.mark.parametrize("kind", KINDS)
    def test_is_zero_with_fresh_adapters(self, kind):
        out = make_loss(kind)(make_states(4))
        assert float(out["loss_feature_kl"].detach()) == pytest.approx(0, abs=1e-6)
        assert float(out["feature_drift"]) == 0
        assert float(out["action_drift"]) == 0

    @pytest.mark.parametrize("kind", KINDS)
    def test_is_positive_after_a_change_and_trains_the_adapters_only(self, kind):
        loss = make_loss(kind, drifted=True)
        out = loss(make_states(4))
        assert float(out["loss_feature_kl"].detach()) > 0
        assert float(out["feature_drift"]) > 0
        assert float(out["action_drift"]) > 0
        out["loss_feature_kl"].backward()
        touched = {name for name, p in loss.model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
        assert touched
        assert all("lora_" in name for name in touched)

    def test_gaussian_form_against_the_closed_form(self):
        loss = make_loss(drifted=True)
        features = len(loss.frozen_variance)  # keys and values of every layer
        live, frozen = torch.randn(features, 2, 8, 96), torch.randn(features, 2, 8, 96)
        loss.live_variance.copy_(torch.rand(features, 96) + 0.5)
        loss.frozen_variance.copy_(torch.rand(features, 96) + 0.5)
        live_dist = torch.distributions.Normal(live, loss.live_variance.sqrt()[:, None, None])
        frozen_dist = torch.distributions.Normal(frozen, loss.frozen_variance.sqrt()[:, None, None])
        expected = torch.distributions.kl_divergence(live_dist, frozen_dist).mean()
        torch.testing.assert_close(loss._divergence(live, frozen), expected)

    def test_gaussian_gradient_is_that_of_half_a_whitened_mse(self):
        gradients = []
        for kind, scale in (("gauss_kl", 1.0), ("whitened_mse", 0.5)):
            loss = make_loss(kind, drifted=True)
            (scale * loss(make_states(3))["loss_feature_kl"]).backward()
            gradients.append(torch.cat([p.grad.flatten() for p in video_parameters(loss.model) if p.grad is not None]))
        torch.testing.assert_close(*gradients)

    def test_descent_brings_the_features_back(self):
        loss = make_loss(drifted=True)
        optimizer = torch.optim.Adam(video_parameters(loss.model), lr=3e-3)
        drift = []
        for _ in range(30):
            out = loss(make_states(4))
            optimizer.zero_grad()
            out["loss_feature_kl"].backward()
            optimizer.step()
            drift.append(float(out["action_drift"]))
        assert drift[-1] < 0.6 * drift[0]


class TestStatistics:
    def test_first_call_sets_the_variances_without_bias(self):
        loss = make_loss()
        loss(make_states(6))
        assert int(loss.calls) == 1
        assert torch.equal(loss.live_variance, loss.frozen_variance)
        assert not torch.equal(loss.frozen_variance, torch.ones_like(loss.frozen_variance))

    def test_evaluation_mode_leaves_them_alone(self):
        loss = make_loss().eval()
        loss(make_states(6))
        assert int(loss.calls) == 0

    def test_keys_are_taken_before_rope(self):
        """Same picture everywhere: without positions every token of the first layer has the same key."""
        loss = make_loss()
        states = make_states(1)
        states["observation", "image"] = torch.full_like(states["observation", "image"], 90)
        latents = loss.model.encode_image(states)
        cache = loss._first_frame_cache(latents, loss.model.context(states))
        keys = loss._features(cache)[0, 0]
        torch.testing.assert_close(keys, keys[:1].expand_as(keys), rtol=1e-3, atol=1e-4)
        assert (cache[0].key[0] - cache[0].key[0, :1]).abs().max() > 0.1


class TestOptions:
    def test_needs_adapters(self):
        with pytest.raises(ValueError, match="adapters"):
            FeatureKLLoss(make_model())

    def test_unknown_kind(self):
        with pytest.raises(ValueError, match="'l1'"):
            make_loss("l1")

    def test_keys(self):
        loss = make_loss().eval()
        out = loss(make_states(2))
        assert set(out.keys()) == set(loss.out_keys)
        states = make_states(2)
        states.rename_key_(("observation", "image"), "picture")
        loss.set_keys(image="picture")
        assert torch.equal(loss(states)["loss_feature_kl"], out["loss_feature_kl"])
