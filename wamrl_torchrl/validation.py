"""How good a policy is on demonstrations that it was not trained on: losses, and imagination against copying."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torch import Tensor

from wamrl_torchrl import schema
from wamrl_torchrl.data.episodes import EpisodeStore
from wamrl_torchrl.learner import normalize_windows
from wamrl_torchrl.modules.noise import seeded_normal
from wamrl_torchrl.modules.policy import FlowPolicy
from wamrl_torchrl.objectives import ActionSFTLoss, VideoSFTLoss

#: With fewer demonstrations than this none is held out.
LEAST_EPISODES = 10


def hold_out(demos: EpisodeStore, share: float) -> tuple[EpisodeStore, EpisodeStore | None]:
    """Split off a share of the demonstrations, evenly spaced so that every task is in both parts.

    Returns:
        what to train on and what to validate on, or all and None: for a share of 0, or of few demonstrations.
    """
    if not share or len(demos) < LEAST_EPISODES:
        return demos, None
    count = max(1, round(share * len(demos)))
    held = {int((i + 0.5) * len(demos) / count) for i in range(count)}
    parts = EpisodeStore(), EpisodeStore()
    for index, episode in enumerate(demos):
        parts[index in held].add(episode)
    return parts


class Validation:
    """The same windows of held-out demonstrations and the same noise at every look, so that looks are comparable.

    Args:
        demos: held-out demonstrations.

    Keyword Args:
        windows: windows that are looked at.
        batch_size: windows per pass.
        seed: which windows, and the noise.
    """

    def __init__(self, demos: EpisodeStore, *, windows: int = 64, batch_size: int = 16, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._windows = demos.sample_windows(windows, generator=generator)
        self._batch_size = batch_size
        self._seed = seed

    def _batches(self, policy: FlowPolicy) -> list[TensorDict]:
        parts = self._windows.split(self._batch_size)
        return [normalize_windows(part.to(policy.device), policy) for part in parts]

    @torch.no_grad()
    def losses(self, policy: FlowPolicy) -> dict[str, float]:
        """Flow-matching losses ``action`` and ``video`` on the held-out windows."""
        generator = torch.Generator(policy.device).manual_seed(self._seed)
        action = ActionSFTLoss(policy.model, policy.stats, generator=generator)
        video = VideoSFTLoss(policy.model, generator=generator)
        sums, total = torch.zeros(2, device=policy.device), 0
        for batch in self._batches(policy):
            sums += len(batch) * torch.stack((action(batch)["loss_action"], video(batch)["loss_video"]))
            total += len(batch)
        return dict(zip(("action", "video"), (sums / total).tolist(), strict=True))

    @torch.no_grad()
    def imagination(self, policy: FlowPolicy, *, num_steps: int, shift: float | None = None) -> dict[str, float]:
        """Mean squared errors of the frames at +4 and +8, pixels in [0, 1], where the episode reached them.

        Args:
            policy: whose video expert imagines.

        Keyword Args:
            num_steps: denoising steps.
            shift: shift of their schedule; the model's ``video_shift`` if None.

        Returns:
            ``imagined``; ``copied``, of predicting that nothing moves; and ``codec``, of the real frames after the
            codec, below which imagination cannot come.
        """
        model, offsets = policy.model, schema.FRAME_OFFSETS
        index = [offset // schema.VIDEO_STRIDE for offset in offsets]
        sums, count = torch.zeros(3, device=policy.device), torch.zeros((), device=policy.device)
        for number, batch in enumerate(self._batches(policy)):
            rows = number * self._batch_size + torch.arange(len(batch), device=policy.device)
            noise = seeded_normal(rows + self._seed, model.future_shape)
            video = batch.get("video")
            latents = model.imagine(batch, noise, num_steps=num_steps, shift=shift)
            coded = model.codec.encode(video.transpose(1, 2))
            real = video[:, index].float() / 255
            imagined, through_codec = (_pixels(model.decode_frames(x, offsets)) for x in (latents, coded))
            predictions = (imagined, video[:, :1].float() / 255, through_codec)
            reached = ~batch.get("image_is_pad")[:, index]
            errors = [((x - real).square().flatten(2).mean(-1) * reached).sum() for x in predictions]
            sums += torch.stack(errors)
            count += reached.sum()
        means = sums / count.clamp(min=1)
        return dict(zip(("imagined", "copied", "codec"), means.tolist(), strict=True))


def _pixels(frames: Tensor) -> Tensor:
    return (frames.clamp(-1, 1) + 1) / 2
