"""FastWAM: a world-action model that predicts video and action chunks from one picture, text and proprioception."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from tensordict import TensorDictBase
from torch import Tensor, nn

from wamrl_torchrl import schema
from wamrl_torchrl.modules.fastwam.codec import Codec
from wamrl_torchrl.modules.fastwam.config import FastWAMConfig
from wamrl_torchrl.modules.fastwam.context import ContextBank
from wamrl_torchrl.modules.fastwam.dit import KeyValue
from wamrl_torchrl.modules.fastwam.mot import MixtureOfTransformers
from wamrl_torchrl.modules.fastwam.schedule import TIME_SCALE, build_schedule, shift_sigma, training_weight

if TYPE_CHECKING:
    from wamrl_torchrl.modules.lora import VideoLoRA
    from wamrl_torchrl.modules.trainable import ActorTraining


class Condition(NamedTuple):
    """All that the action expert reads while it denoises one chunk; constant over its steps."""

    video: list[KeyValue]  # per layer, keys and values of the video tokens
    text: list[KeyValue]  # per layer, cross-attention keys and values of the action expert


class Prefill(NamedTuple):
    """What imagining and acting on a state share."""

    context: Tensor  # [B,L+1,text_dim]
    text: list[KeyValue]  # per layer, cross-attention keys and values of the video expert
    first: Tensor  # [B,C,1,h,w]
    cache: list[KeyValue]  # per layer, keys and values of the first frame


class FlowNoise(NamedTuple):
    """Random part of a training example: time on the flow and the noise to mix in."""

    sigma: Tensor  # [B] in [0, 1]
    noise: Tensor  # as the data

    def mix(self, data: Tensor) -> tuple[Tensor, Tensor]:
        """Noisy data and target velocity, both as ``data``."""
        sigma = self.sigma.view(-1, *[1] * (data.ndim - 1))
        return (1 - sigma) * data + sigma * self.noise, self.noise - data


def draw_flow_noise(data: Tensor, shift: float, generator: torch.Generator | None = None) -> FlowNoise:
    """Draw ``sigma = shift(u)``, ``u`` uniform, and Gaussian noise for ``data`` [B,...]."""
    u = torch.rand(len(data), generator=generator, device=data.device)
    noise = torch.randn(data.shape, generator=generator, device=data.device)
    return FlowNoise(shift_sigma(u, shift), noise)


class TeacherForcing(NamedTuple):
    """Examples whose actions see the real future (inverse dynamics) and what they see of it."""

    rows: Tensor  # int64 [R], distinct rows of the batch
    future: Tensor  # [R,C,F,h,w], their future latents, noisy where sigma > 0
    sigma: Tensor  # fp32 [R]


def force_future(
    rows: Tensor, future: Tensor, shift: float, *, noise_prob: float = 0.0, generator: torch.Generator | None = None
) -> TeacherForcing:
    """Let the actions of ``rows`` [R] see their clean ``future`` [R,C,F,h,w], noised with probability ``noise_prob``.

    Noise on what is teacher-forced narrows the gap to imagined video (0.5 in the plain IDM recipe of FastWAM, 0 in the
    optional-IDM one); the time is drawn as in training with the video's ``shift``.
    """
    sigma = torch.zeros(len(rows), device=future.device)
    if noise_prob:
        flow = draw_flow_noise(future, shift, generator)
        noised = torch.rand(len(rows), generator=generator, device=future.device) < noise_prob
        sigma = torch.where(noised, flow.sigma, sigma)
        future = FlowNoise(sigma, flow.noise).mix(future)[0]
    return TeacherForcing(rows, future, sigma)


def _take(cache: list[KeyValue], rows: Tensor) -> list[KeyValue]:
    return [KeyValue(key[rows], value[rows]) for key, value in cache]


def masked_mean(values: Tensor, is_pad: Tensor | None) -> Tensor:
    """Mean over the last dim of ``values`` [B,T] without padded entries; 0 for a row that is all padding."""
    if is_pad is None:
        return values.mean(-1)
    valid = (~is_pad).to(values.dtype)
    return (values * valid).sum(-1) / valid.sum(-1).clamp(min=1)


class FastWAM(nn.Module):
    """The world-action model with its codec and text contexts.

    Args:
        config: sizes and schedules.
        codec: frames to latents and back.
        contexts: text contexts by ``task_id``.

    The trained part is ``mot`` and ``proprio_encoder``, under the parameter names of the released checkpoints. A
    *state* below is a tensordict with ``("observation","image")`` uint8 [B,3,H,W], ``("observation","proprio")``
    float32 [B,8] normalised, and ``task_id`` int64 [B,1].
    """

    def __init__(self, config: FastWAMConfig, codec: Codec, contexts: ContextBank) -> None:
        super().__init__()
        self.config = config
        self.mot = MixtureOfTransformers(config)
        self.proprio_encoder = nn.Linear(config.proprio_dim, config.video.text_dim)
        self.codec = codec
        self.contexts = contexts
        self.lora: VideoLoRA | None = None  # set by add_video_lora
        self.actor_training: ActorTraining | None = None  # set by set_actor_training

    @property
    def chunk_shape(self) -> tuple[int, int]:
        """Shape (actions, action dim) of a chunk."""
        return self.config.chunk, self.config.action_dim

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights; inputs are cast to it once, outputs back to fp32 once."""
        return self.proprio_encoder.weight.dtype

    # ---- inputs -------------------------------------------------------------------------------------------------
    def context(self, state: TensorDictBase) -> Tensor:
        """Text context with the proprioception token after it, [B,L+1,text_dim]."""
        return self.append_proprio(self.contexts(state.get(schema.TASK_ID)), state.get(schema.PROPRIO))

    def append_proprio(self, text: Tensor, proprio: Tensor) -> Tensor:
        """Append the token of ``proprio`` [B,8] to a text context [B,L,text_dim]."""
        token = self.proprio_encoder(proprio.to(self.dtype))
        return torch.cat((text.to(self.dtype), token[:, None]), 1)

    def encode_image(self, state: TensorDictBase) -> Tensor:
        """First-frame latents [B,C,1,h,w] of the state's picture."""
        return self.codec.encode(state.get(schema.IMAGE).unsqueeze(2)).to(self.dtype)

    @torch.no_grad()
    def prefill(self, state: TensorDictBase) -> Prefill:
        """Context and caches of a batch of states, without gradient."""
        context, first = self.context(state), self.encode_image(state)
        text = self.mot.video.text_cache(context)
        return Prefill(context, text, first, self.mot.first_frame_cache(first, text))

    # ---- acting -------------------------------------------------------------------------------------------------
    def condition(self, state: TensorDictBase, *, future: Tensor | None = None) -> Condition:
        """Prepare the caches for acting on ``state``.

        Gradients reach the action expert's text path. The video expert is a fixed feature extractor here: its caches
        are computed without gradient, as flow-PPO trains the action expert only.

        Keyword Args:
            future: future latents [B,C,F,h,w] that the actions see (inverse dynamics); they see the first frame alone
                if None.
        """
        prefill = self.prefill(state)
        return self._condition(prefill, future)

    def _condition(self, prefill: Prefill, future: Tensor | None) -> Condition:
        video = prefill.cache
        if future is not None:
            with torch.no_grad():
                video = self.mot.full_video_cache(future.to(self.dtype), prefill.text, video)
        return Condition(video, self.mot.action.text_cache(prefill.context))

    def imagine_condition(
        self, state: TensorDictBase, noise: Tensor, *, num_steps: int, shift: float | None = None
    ) -> tuple[Condition, Tensor]:
        """Imagine the future and prepare the caches for acting on it.

        Args:
            state: batch of states.
            noise: see :meth:`imagine`.

        Keyword Args:
            num_steps: see :meth:`imagine`.
            shift: see :meth:`imagine`.

        Returns:
            what :meth:`condition` gives for this future, and the future latents bfloat16 [B,C,F,h,w]: they are rounded
            before they are used, so that a record of them gives the same condition again.
        """
        prefill = self.prefill(state)
        future = self._denoise(prefill.text, prefill.cache, noise, num_steps, shift).bfloat16()
        return self._condition(prefill, future), future

    def action_velocity(self, actions: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """Velocity fp32 [B,T,A] at noisy normalised ``actions`` [B,T,A] and ``sigma`` [B]."""
        return self.mot.action.velocity(actions, TIME_SCALE * sigma, condition.text, condition.video).float()

    # ---- imagining ----------------------------------------------------------------------------------------------
    @property
    def future_shape(self) -> tuple[int, int, int, int]:
        """Shape (channels, frames, height, width) of the future latents of one state."""
        config = self.config
        return config.latent_channels, config.latent_frames - 1, *config.latent_size

    @torch.no_grad()
    def imagine(
        self, state: TensorDictBase, noise: Tensor, *, num_steps: int = 10, shift: float | None = None
    ) -> Tensor:
        """Denoise the future of ``state`` by Euler steps of the video expert.

        Args:
            state: batch of states.
            noise: Gaussian noise fp32 [B,C,F,h,w] for the F future latent frames.

        Keyword Args:
            num_steps: steps of the schedule.
            shift: shift of the schedule; the ``video_shift`` of the training if None.

        Returns:
            latents fp32 [B,C,1+F,h,w] whose frame 0 is the clean picture.
        """
        prefill = self.prefill(state)
        future = self._denoise(prefill.text, prefill.cache, noise, num_steps, shift)
        return torch.cat((prefill.first.float(), future), 2)

    @torch.no_grad()
    def _denoise(
        self,
        text: list[KeyValue],
        first_cache: list[KeyValue],
        noise: Tensor,
        num_steps: int,
        shift: float | None,
    ) -> Tensor:
        # Frame 0 stays clean and sees only itself, so its cache serves every step exactly.
        shift = self.config.video_shift if shift is None else shift
        schedule = build_schedule(num_steps, shift, device=noise.device)
        x = noise
        for time, delta in zip(schedule.timesteps, schedule.deltas, strict=True):
            velocity = self.mot.video_velocity(x.to(self.dtype), time.expand(len(x)), text, first_cache)
            x = x + delta * velocity.float()
        return x

    def decode_frames(self, latents: Tensor, steps: tuple[int, ...]) -> Tensor:
        """Pictures fp32 [B,len(steps),3,H,W] in [-1,1] at action ``steps`` (multiples of 4), from ``latents``.

        Only the latent frames up to the last wanted step are decoded.

        Raises:
            ValueError: a step is no multiple of the video stride or lies beyond the latents.
        """
        frames = [step // schema.VIDEO_STRIDE for step in steps]
        last = max(frames)
        if any(step % schema.VIDEO_STRIDE for step in steps) or last > 4 * (latents.shape[2] - 1):
            raise ValueError(f"imagined frames exist at every {schema.VIDEO_STRIDE}th action, cannot give {steps}")
        video = self.codec.decode(latents[:, :, : 1 + -(-last // 4)])
        return video[:, :, frames].transpose(1, 2)

    # ---- training -----------------------------------------------------------------------------------------------
    def video_loss(
        self, latents: Tensor, context: Tensor, flow: FlowNoise, *, image_is_pad: Tensor | None = None
    ) -> Tensor:
        """Flow-matching loss [B] of the video expert on latents [B,C,F,h,w] of 1+4n frames.

        Args:
            latents: clean latents; frame 0 is given and carries no loss.
            context: context [B,L,text_dim].
            flow: time and noise; the noise is [B,C,F,h,w] and its frame 0 is not used.

        Keyword Args:
            image_is_pad: bool [B,1+4n]; a latent frame is padding if all its four frames are.
        """
        text = self.mot.video.text_cache(context)
        first_cache = self.mot.first_frame_cache(latents[:, :, :1].to(self.dtype), text)
        return self._video_loss(latents, text, first_cache, flow, image_is_pad)

    def _video_loss(
        self,
        latents: Tensor,
        text: list[KeyValue],
        first_cache: list[KeyValue],
        flow: FlowNoise,
        image_is_pad: Tensor | None,
    ) -> Tensor:
        noisy, target = FlowNoise(flow.sigma, flow.noise[:, :, 1:]).mix(latents[:, :, 1:])
        velocity = self.mot.video_velocity(noisy.to(self.dtype), TIME_SCALE * flow.sigma, text, first_cache)
        error = F.mse_loss(velocity.float(), target.float(), reduction="none").mean((1, 3, 4))
        pad = None if image_is_pad is None else image_is_pad[:, 1:].unflatten(1, (-1, 4)).all(-1)
        return masked_mean(error, pad) * training_weight(flow.sigma, self.config.video_shift)

    def _action_loss(
        self,
        actions: Tensor,
        context: Tensor,
        cache: list[KeyValue],
        flow: FlowNoise,
        action_is_pad: Tensor | None,
    ) -> Tensor:
        noisy, target = flow.mix(actions)
        condition = Condition(cache, self.mot.action.text_cache(context))
        error = (self.action_velocity(noisy, flow.sigma, condition) - target).square().mean(-1)
        return masked_mean(error, action_is_pad) * training_weight(flow.sigma, self.config.action_shift)

    def _forced_action_loss(
        self,
        actions: Tensor,
        context: Tensor,
        text: list[KeyValue],
        cache: list[KeyValue],
        flow: FlowNoise,
        action_is_pad: Tensor | None,
        forced: TeacherForcing | None,
    ) -> Tensor:
        """Loss [B] with some rows on their whole video: two passes, as they attend to different lengths."""
        if forced is None or not len(forced.rows):
            return self._action_loss(actions, context, cache, flow, action_is_pad)
        others = torch.ones(len(actions), dtype=torch.bool).index_fill_(0, forced.rows.cpu(), 0).nonzero().flatten()
        time = TIME_SCALE * forced.sigma
        video = self.mot.full_video_cache(
            forced.future.to(self.dtype), _take(text, forced.rows), _take(cache, forced.rows), time
        )
        losses = []
        for rows, seen in ((forced.rows, video), (others, _take(cache, others))):
            if len(rows):
                part = FlowNoise(flow.sigma[rows], flow.noise[rows])
                pad = None if action_is_pad is None else action_is_pad[rows]
                losses.append(self._action_loss(actions[rows], context[rows], seen, part, pad))
        return torch.cat(losses)[torch.cat((forced.rows.cpu(), others)).argsort()]

    def action_loss(
        self,
        first: Tensor,
        context: Tensor,
        actions: Tensor,
        flow: FlowNoise,
        *,
        action_is_pad: Tensor | None = None,
        forced: TeacherForcing | None = None,
    ) -> Tensor:
        """Flow-matching loss [B] of the action chunk on first-frame latents [B,C,1,h,w]; trains both experts.

        Args:
            first: clean first-frame latents.
            context: context [B,L,text_dim].
            actions: normalised actions [B,T,A].
            flow: time and noise of the actions.

        Keyword Args:
            action_is_pad: bool [B,T].
            forced: rows that see their future too (teacher-forced inverse dynamics).
        """
        text = self.mot.video.text_cache(context)
        cache = self.mot.first_frame_cache(first, text)
        return self._forced_action_loss(actions, context, text, cache, flow, action_is_pad, forced)

    def training_loss(
        self,
        latents: Tensor,
        context: Tensor,
        actions: Tensor,
        *,
        video_flow: FlowNoise,
        action_flow: FlowNoise,
        image_is_pad: Tensor | None = None,
        action_is_pad: Tensor | None = None,
        forced: TeacherForcing | None = None,
        lambda_video: float = 1.0,
        lambda_action: float = 1.0,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """FastWAM's joint loss: weighted sum of video and action flow-matching losses.

        Args:
            latents: clean latents [B,C,F,h,w].
            context: context [B,L,text_dim].
            actions: normalised actions [B,T,A].

        Keyword Args:
            video_flow: time and noise of the video.
            action_flow: time and noise of the actions.
            image_is_pad: bool [B,1+4(F-1)].
            action_is_pad: bool [B,T].
            forced: rows whose actions see their whole video (teacher-forced inverse dynamics); the others see the first
                frame. See :func:`force_future`.
            lambda_video: weight of the video loss.
            lambda_action: weight of the action loss.

        Returns:
            the scalar loss, and the scalars ``loss_video`` and ``loss_action``.
        """
        text = self.mot.video.text_cache(context)
        cache = self.mot.first_frame_cache(latents[:, :, :1].to(self.dtype), text)
        loss_video = self._video_loss(latents, text, cache, video_flow, image_is_pad).mean()
        loss_action = self._forced_action_loss(actions, context, text, cache, action_flow, action_is_pad, forced).mean()
        loss = lambda_video * loss_video + lambda_action * loss_action
        return loss, {"loss_video": loss_video, "loss_action": loss_action}
