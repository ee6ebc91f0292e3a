from __future__ import annotations

import pytest
import torch

from tests.conftest import make_model, make_stats, make_windows
from wamrl_torchrl.modules.fastwam.model import draw_flow_noise
from wamrl_torchrl.objectives import ActionSFTLoss, VideoSFTLoss


class TestVideoSFT:
    def test_is_the_models_video_loss(self):
        model, windows = make_model(), make_windows()
        out = VideoSFTLoss(model, generator=torch.Generator().manual_seed(0))(windows)
        latents = model.codec.encode(windows["video"].transpose(1, 2))
        flow = draw_flow_noise(latents, 5.0, torch.Generator().manual_seed(0))
        torch.testing.assert_close(out["loss_video"], model.video_loss(latents, model.context(windows), flow).mean())

    def test_does_not_touch_the_action_expert(self):
        model = make_model()
        VideoSFTLoss(model)(make_windows())["loss_video"].backward()
        assert all(p.grad is None for p in model.mot.action.parameters())
        assert model.mot.video.head.head.weight.grad.abs().sum() > 0

    def test_padded_frames_do_not_count(self):
        model, losses = make_model(), []
        for value in (0, 255):
            windows = make_windows()
            windows["image_is_pad"][:, 5:] = True
            windows["video"][:, 5:] = value
            latents = model.codec.encode(windows["video"].transpose(1, 2))
            flow = draw_flow_noise(latents, 5.0, torch.Generator().manual_seed(0))
            # At sigma = 1 the input is noise alone, so padded frames could only act through the target.
            flow = flow._replace(sigma=torch.full((3,), 0.999999))
            context = model.context(windows)
            losses.append(model.video_loss(latents, context, flow, image_is_pad=windows["image_is_pad"]))
        torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-9)

    def test_overfits_a_batch(self):
        model, windows = make_model(), make_windows(2)
        windows["video"] = windows["video"][:, :1, :, :1, :1].expand(-1, 9, -1, 64, 128)  # still pictures of one colour
        generator = torch.Generator()
        loss = VideoSFTLoss(model, generator=generator)
        optimizer = torch.optim.Adam(model.mot.video.parameters(), lr=3e-3)
        history = []
        for _ in range(60):
            generator.manual_seed(0)  # the same times and noise, so that steps can be compared
            out = loss(windows)
            optimizer.zero_grad()
            out["loss_video"].backward()
            optimizer.step()
            history.append(float(out["loss_video"].detach()))
        assert history[-1] < 0.5 * history[0]


class TestActionSFT:
    def test_trains_both_experts(self):
        model = make_model()
        ActionSFTLoss(model, make_stats())(make_windows())["loss_action"].backward()
        for expert in model.mot.mixtures.values():
            assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in expert.parameters())

    def test_learns_a_constant_action(self):
        model, windows = make_model(), make_windows(4)
        windows["actions"] = torch.tensor([0.3, -0.2, 0.5, 0.0, 0.1, -0.4, 1.0]).expand(4, 32, 7).clone()
        loss = ActionSFTLoss(model, make_stats())
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
        history = []
        torch.manual_seed(0)
        for _ in range(60):
            out = loss(windows)
            optimizer.zero_grad()
            out["loss_action"].backward()
            optimizer.step()
            history.append(float(out["loss_action"].detach()))
        assert sum(history[-10:]) < 0.4 * sum(history[:10])

    @pytest.mark.parametrize("loss", ["video", "action"])
    def test_keys(self, loss):
        model, windows = make_model(), make_windows()
        module = VideoSFTLoss(model) if loss == "video" else ActionSFTLoss(model, make_stats())
        key = "video" if loss == "video" else "actions"
        windows.rename_key_(key, ("deep", key))
        module.set_keys(**{key: ("deep", key)})
        out = module(windows)
        assert set(out.keys()) == set(module.out_keys)
        assert ("deep", key) in module.in_keys
