"""Supervised flow-matching losses: video SFT on successful episodes, and cloning of action chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import dispatch

from wamrl_torchrl import schema
from wamrl_torchrl.data.stats import DatasetStats
from wamrl_torchrl.modules.fastwam.model import FastWAM, TeacherForcing, draw_flow_noise, force_future
from wamrl_torchrl.objectives.common import CriticFreeLoss


class VideoSFTLoss(CriticFreeLoss):
    """Flow-matching loss of the video expert on windows of real frames.

    Reads ``video`` uint8 [B,1+4n,3,H,W] (frames at every 4th action from the decision on), ``image_is_pad`` bool
    [B,1+4n], ``("observation","proprio")`` and ``task_id``; writes ``loss_video``. The loss is FastWAM's: mean squared
    velocity error of the future latent frames, padded ones left out, weighted over time.

    Args:
        model: the world-action model.

    Keyword Args:
        generator: source of times and noise; the default generator if None.
    """

    @dataclass
    class _AcceptedKeys:
        """Keys of the input; set them with :meth:`set_keys`."""

        video: NestedKey = "video"
        image_is_pad: NestedKey = "image_is_pad"

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys
    out_keys = ("loss_video",)

    def __init__(self, model: FastWAM, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.model = model
        self.generator = generator

    def _in_keys(self) -> list[NestedKey]:
        return [self.tensor_keys.video, self.tensor_keys.image_is_pad, schema.PROPRIO, schema.TASK_ID]

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Loss of a batch of windows [B]."""
        model = self.model
        latents = model.codec.encode(tensordict.get(self.tensor_keys.video).transpose(1, 2))
        flow = draw_flow_noise(latents, model.config.video_shift, self.generator)
        losses = model.video_loss(
            latents,
            model.context(tensordict),
            flow,
            image_is_pad=tensordict.get(self.tensor_keys.image_is_pad),
        )
        return TensorDict({"loss_video": losses.mean()})


class ActionSFTLoss(CriticFreeLoss):
    """Flow-matching loss of action chunks (behaviour cloning); trains both experts.

    Reads a state, ``actions`` float32 [B,32,7] in the environment's convention and ``action_is_pad`` bool [B,32], and
    ``video`` uint8 [B,1+4n,3,H,W] if ``action_idm_prob`` is positive; writes ``loss_action``.

    Args:
        model: the world-action model.
        stats: normalisation of the actions.

    Keyword Args:
        action_idm_prob: share of examples whose actions see the real video of their chunk (teacher-forced inverse
            dynamics, 0.5 in the optional-IDM recipe of FastWAM); the others see the first frame.
        video_cond_noise_prob: share of those videos that are noised; see
            :func:`~wamrl_torchrl.modules.fastwam.model.force_future`.
        generator: source of times and noise; the default generator if None.

    Raises:
        ValueError: a probability outside 0..1.
    """

    @dataclass
    class _AcceptedKeys:
        """Keys of the input; set them with :meth:`set_keys`."""

        actions: NestedKey = "actions"
        action_is_pad: NestedKey = "action_is_pad"
        video: NestedKey = "video"

    tensor_keys: _AcceptedKeys
    default_keys = _AcceptedKeys
    out_keys = ("loss_action",)

    def __init__(
        self,
        model: FastWAM,
        stats: DatasetStats,
        *,
        action_idm_prob: float = 0.0,
        video_cond_noise_prob: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        probabilities = {"action_idm_prob": action_idm_prob, "video_cond_noise_prob": video_cond_noise_prob}
        for name, probability in probabilities.items():
            if not 0 <= probability <= 1:
                raise ValueError(f"{name} must lie in 0..1, got {probability}")
        self.model = model
        self.stats = stats
        self.action_idm_prob = action_idm_prob
        self.video_cond_noise_prob = video_cond_noise_prob
        self.generator = generator

    def _in_keys(self) -> list[NestedKey]:
        keys = self.tensor_keys
        video = [keys.video] if self.action_idm_prob else []
        return [schema.IMAGE, schema.PROPRIO, schema.TASK_ID, keys.actions, keys.action_is_pad, *video]

    def _force(self, tensordict: TensorDictBase) -> TeacherForcing | None:
        """Draw the rows that see their video; only their frames are encoded."""
        if not self.action_idm_prob:
            return None
        # Drawn where the generator is; on the default one that is the CPU, where counting rows waits for nothing.
        device = None if self.generator is None else self.generator.device
        chosen = torch.rand(tensordict.batch_size, generator=self.generator, device=device) < self.action_idm_prob
        rows = chosen.nonzero().flatten().cpu()
        if not len(rows):
            return None
        video = tensordict.get(self.tensor_keys.video)[rows].transpose(1, 2)
        future = self.model.codec.encode(video)[:, :, 1:]
        shift = self.model.config.video_shift
        return force_future(rows, future, shift, noise_prob=self.video_cond_noise_prob, generator=self.generator)

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Loss of a batch of windows [B]."""
        model = self.model
        actions = self.stats.from_env_actions(tensordict.get(self.tensor_keys.actions))
        flow = draw_flow_noise(actions, model.config.action_shift, self.generator)
        losses = model.action_loss(
            model.encode_image(tensordict),
            model.context(tensordict),
            actions,
            flow,
            action_is_pad=tensordict.get(self.tensor_keys.action_is_pad),
            forced=self._force(tensordict),
        )
        return TensorDict({"loss_action": losses.mean()})
