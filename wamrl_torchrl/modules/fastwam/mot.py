"""The two experts and the mixture of transformers that joins them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wamrl_torchrl.modules.fastwam.config import FastWAMConfig
from wamrl_torchrl.modules.fastwam.dit import Expert, KeyValue, Rope, RopeTable, layer_norm, modulate

PATCH = (1, 2, 2)


class VideoHead(nn.Module):
    """Time-modulated projection of tokens to latent patches."""

    def __init__(self, hidden_dim: int, out_dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.head = nn.Linear(hidden_dim, out_dim)
        self.modulation = nn.Parameter(torch.empty(1, 2, hidden_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start without modulation."""
        nn.init.zeros_(self.modulation)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Project tokens [B,S,hidden] under the time embedding [B,hidden] to [B,S,out]."""
        shift, scale = (self.modulation + time[:, None]).unsqueeze(2).unbind(1)
        return self.head(modulate(layer_norm(x, self.eps), shift, scale))


class VideoExpert(Expert):
    """Video diffusion transformer over latent frames (Wan 2.2 TI2V layout)."""

    def __init__(self, config: FastWAMConfig) -> None:
        super().__init__(config.video)
        hidden, channels = config.video.hidden_dim, config.latent_channels
        self.grid = (config.latent_size[0] // PATCH[1], config.latent_size[1] // PATCH[2])
        self.patch_embedding = nn.Conv3d(channels, hidden, kernel_size=PATCH, stride=PATCH)
        self.head = VideoHead(hidden, channels * PATCH[1] * PATCH[2], config.video.eps)
        positions = torch.cartesian_prod(*(torch.arange(n) for n in (config.latent_frames, *self.grid)))
        third = config.video.head_dim // 3
        self.rope_table = RopeTable(positions, [config.video.head_dim - 2 * third, third, third])

    def rope(self, first: int, count: int) -> Rope:
        """Rotation tables of ``count`` latent frames from frame ``first`` on."""
        tokens = self.grid[0] * self.grid[1]
        return self.rope_table(first * tokens, count * tokens)

    def patchify(self, latents: Tensor) -> Tensor:
        """Tokens [B,F*h*w,hidden] of latents [B,C,F,H,W], ordered frame, row, column."""
        return self.patch_embedding(latents).flatten(2).transpose(1, 2)

    def unpatchify(self, tokens: Tensor) -> Tensor:
        """Latents [B,C,F,H,W] of head outputs [B,F*h*w,4C], whose channel runs fastest."""
        rows, columns = self.grid
        patches = tokens.unflatten(-1, (PATCH[1], PATCH[2], -1)).unflatten(1, (-1, rows, columns))
        return patches.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)


class ActionExpert(Expert):
    """Action diffusion transformer over the actions of a chunk."""

    def __init__(self, config: FastWAMConfig) -> None:
        super().__init__(config.action)
        hidden = config.action.hidden_dim
        self.action_encoder = nn.Linear(config.action_dim, hidden)
        self.head = nn.Linear(hidden, config.action_dim)
        self.rope_table = RopeTable(torch.arange(config.chunk)[:, None], [config.action.head_dim])

    def velocity(self, actions: Tensor, time: Tensor, text: list[KeyValue], video: list[KeyValue]) -> Tensor:
        """Action velocity [B,T,A] at noisy ``actions`` [B,T,A] and times [B], given the caches of text and video."""
        _, six = self.embed_time(time)
        x = self.action_encoder(actions.to(self.head.weight.dtype))
        x, _ = self.run(x, six, self.rope_table(0, actions.shape[1]), text, video)
        return self.head(x)


class MixtureOfTransformers(nn.Module):
    """Video and action experts that share attention, as passes over key/value caches.

    The first latent frame attends to itself at time 0, later frames to all frames, actions to the video cache they are
    given and to each other. Caching the first frame is therefore exact.
    """

    def __init__(self, config: FastWAMConfig) -> None:
        super().__init__()
        self.mixtures = nn.ModuleDict({"video": VideoExpert(config), "action": ActionExpert(config)})

    @property
    def video(self) -> VideoExpert:
        """The video expert."""
        return self.mixtures["video"]  # type: ignore[return-value]

    @property
    def action(self) -> ActionExpert:
        """The action expert."""
        return self.mixtures["action"]  # type: ignore[return-value]

    def first_frame_cache(self, first: Tensor, text: list[KeyValue]) -> list[KeyValue]:
        """Keys and values of the clean first latent frame [B,C,1,H,W], per layer [B,h*w,heads*head_dim]."""
        video = self.video
        _, six = video.embed_time(first.new_zeros(len(first), dtype=torch.float32))
        return video.run(video.patchify(first), six, video.rope(0, 1), text, only_cache=True)[1]

    def video_velocity(self, future: Tensor, time: Tensor, text: list[KeyValue], first_cache: list[KeyValue]) -> Tensor:
        """Velocity [B,C,F,H,W] of the future latent frames ``future`` [B,C,F,H,W] at times [B].

        The first frame is given by its cache and has no velocity.
        """
        video = self.video
        embedding, six = video.embed_time(time)
        x = video.patchify(future)
        x, _ = video.run(x, six, video.rope(1, future.shape[2]), text, first_cache)
        return video.unpatchify(video.head(x, embedding))

    def full_video_cache(
        self, future: Tensor, text: list[KeyValue], first_cache: list[KeyValue], time: Tensor | None = None
    ) -> list[KeyValue]:
        """Keys and values of all frames for inverse dynamics, the first frame's from its cache.

        The future latent frames ``future`` [B,C,F,H,W] are read at time 0, or at times [B] if they are noisy.
        """
        video = self.video
        if time is None:
            time = future.new_zeros(len(future), dtype=torch.float32)
        _, six = video.embed_time(time)
        _, cache = video.run(
            video.patchify(future), six, video.rope(1, future.shape[2]), text, first_cache, only_cache=True
        )
        return [
            KeyValue(torch.cat((a.key, b.key), 1), torch.cat((a.value, b.value), 1))
            for a, b in zip(first_cache, cache, strict=True)
        ]
