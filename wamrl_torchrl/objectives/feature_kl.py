"""Feature-KL: holds the video expert's features, which the action expert reads, near those of the frozen expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import dispatch
from torch import Tensor

from wamrl_torchrl import schema
from wamrl_torchrl.modules.adapters import adapters_disabled
from wamrl_torchrl.modules.fastwam.dit import KeyValue, Rope, apply_rope
from wamrl_torchrl.modules.fastwam.model import Condition, FastWAM
from wamrl_torchrl.modules.noise import seeded_normal
from wamrl_torchrl.objectives.common import CriticFreeLoss

#: Smallest variance a feature is whitened with, as a share of the layer's median variance.
VARIANCE_FLOOR = 1e-4


class FeatureKLLoss(CriticFreeLoss):
    r"""Drift of the first-frame features of the video expert from the frozen one (its adapters switched off).

    The features are what the action expert attends to: the keys (before RoPE) and values of every layer. With diagonal
    Gaussians around both features, and variances from running statistics (fixed for the frozen expert, a detached
    moving average for the live one), the divergence per feature dim is

    .. math::
        KL = \frac12 (\sigma^2 / \sigma_o^2 + (z - z_o)^2 / \sigma_o^2 - 1 - \ln(\sigma^2 / \sigma_o^2))

    whose gradient is that of a whitened mean squared error. Reduced by the mean over dims, tokens, layers and batch.

    Reads a state; writes ``loss_feature_kl`` and, detached, ``feature_drift`` (relative norm of the change) and
    ``action_drift`` (rms change of the action velocity that it causes at fixed noise: the number that matters).

    Args:
        model: the model, with LoRA on its video expert.

    Keyword Args:
        kind: ``"gauss_kl"``, ``"whitened_mse"``, ``"mse"`` or ``"cosine"``.
        momentum: share that the running variances keep per call in training mode.

    Raises:
        ValueError: unknown kind, or a video expert without adapters (it would be its own reference).
    """

    @dataclass
    class _AcceptedKeys:
        """Keys of the input; set them with :meth:`set_keys`."""

        image: NestedKey = schema.IMAGE

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys
    out_keys = ("loss_feature_kl", "feature_drift", "action_drift")

    def __init__(
        self,
        model: FastWAM,
        *,
        kind: Literal["gauss_kl", "whitened_mse", "mse", "cosine"] = "gauss_kl",
        momentum: float = 0.99,
    ) -> None:
        super().__init__()
        if kind not in ("gauss_kl", "whitened_mse", "mse", "cosine"):
            raise ValueError(f"kind must be gauss_kl, whitened_mse, mse or cosine, got {kind!r}")
        if model.lora is None:
            raise ValueError("the video expert has no adapters: add LoRA first, the reference is the expert without it")
        self.model = model
        self.kind = kind
        self.momentum = momentum
        config = model.config.video
        shape = (2 * config.num_layers, config.attention_dim)
        self.register_buffer("frozen_variance", torch.ones(shape))
        self.register_buffer("live_variance", torch.ones(shape))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def _in_keys(self) -> list[NestedKey]:
        return [self.tensor_keys.image, schema.PROPRIO, schema.TASK_ID]

    def _first_frame_cache(self, latents: Tensor, context: Tensor) -> list[KeyValue]:
        video = self.model.mot.video
        return self.model.mot.first_frame_cache(latents, video.text_cache(context))

    def _features(self, cache: list[KeyValue]) -> Tensor:
        """Keys before RoPE and values of all layers: fp32 [2 * layers, B, S, dim]."""
        video = self.model.mot.video
        rope = video.rope(0, 1)
        back = Rope(rope.cos, -rope.sin)
        heads = self.model.config.video.num_heads
        features = [f for layer in cache for f in (apply_rope(layer.key, back, heads), layer.value)]
        return torch.stack(features).float()

    def _update_variances(self, live: Tensor, frozen: Tensor) -> None:
        """Moving averages, started by the first call and free of its bias."""
        keep = min(self.momentum, float(self.calls) / (float(self.calls) + 1))
        for buffer, features in ((self.live_variance, live), (self.frozen_variance, frozen)):
            buffer.lerp_(features.detach().var((1, 2)), 1 - keep)
        self.calls += 1

    def _divergence(self, live: Tensor, frozen: Tensor) -> Tensor:
        if self.kind == "mse":
            return F.mse_loss(live, frozen)
        if self.kind == "cosine":
            return (1 - F.cosine_similarity(live, frozen, dim=-1)).mean()
        floor = VARIANCE_FLOOR * self.frozen_variance.median(-1, keepdim=True).values
        frozen_variance = self.frozen_variance.clamp(min=floor)[:, None, None]
        whitened = (live - frozen).square() / frozen_variance
        if self.kind == "whitened_mse":
            return whitened.mean()
        ratio = self.live_variance.clamp(min=floor)[:, None, None] / frozen_variance
        return 0.5 * (ratio + whitened - 1 - ratio.log()).mean()

    @torch.no_grad()
    def _action_drift(self, live: list[KeyValue], frozen: list[KeyValue], context: Tensor) -> Tensor:
        model, batch = self.model, len(context)
        text = model.mot.action.text_cache(context)
        x = seeded_normal(torch.arange(batch, device=context.device), model.chunk_shape)
        sigma = torch.full((batch,), 0.5, device=context.device)
        change = model.action_velocity(x, sigma, Condition(live, text))
        return (change - model.action_velocity(x, sigma, Condition(frozen, text))).square().mean().sqrt()

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Drift on a batch of states [B]."""
        model = self.model
        with torch.no_grad():
            latents = model.codec.encode(tensordict.get(self.tensor_keys.image).unsqueeze(2)).to(model.dtype)
            context = model.context(tensordict)
            with adapters_disabled(model.mot.video):
                frozen_cache = self._first_frame_cache(latents, context)
        live_cache = self._first_frame_cache(latents, context)
        live, frozen = self._features(live_cache), self._features(frozen_cache)
        if self.training:
            self._update_variances(live, frozen)
        return TensorDict({
            "loss_feature_kl": self._divergence(live, frozen),
            "feature_drift": (live - frozen).detach().norm() / frozen.norm(),
            "action_drift": self._action_drift(live_cache, frozen_cache, context),
        })  # fmt: skip
