"""The reconstruction reward: what the video expert expected against what happened."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import Transform

from wamrl_torchrl import schema
from wamrl_torchrl.modules.adapters import adapters_disabled
from wamrl_torchrl.modules.fastwam.model import FastWAM
from wamrl_torchrl.modules.noise import mix_seeds, seeded_normal
from wamrl_torchrl.modules.reference import ReferenceActor
from wamrl_torchrl.modules.trainable import video_parameters

IMAGINATIONS = ("frozen", "ema", "live")
SPACES = ("pixels", "latents")
REWARD_CLIP = 5.0


class Score(NamedTuple):
    """What :meth:`ReconstructionReward.score` found, each [B,1]."""

    raw: Tensor  # float32, minus the error of imagination; 0 where masked
    mask: Tensor  # bool, whether any frame was reached
    copied: Tensor  # float32, minus the error of predicting that nothing moves, alike


class ReconstructionReward(Transform):
    r"""Writes the reconstruction reward when macro-steps are written to a replay buffer (or by ``transform.inv``).

    For every decision the video expert imagines the future from the decision's picture; the reward is minus the mean
    squared error between imagined and real frames, pixels in [0, 1], averaged over the offsets that were reached:

    .. math:: r = -\frac{1}{|V|} \sum_{o \in V} mean (\hat x_o - x_o)^2, \quad
              \tilde r = clip((r - m) / s, -5, 5)

    ``m`` and ``s`` are the mean and standard deviation of all rewards seen before the current call (of the current
    call, in the first), so the scale is frozen while a batch is scored. A decision that reached no offset is masked.

    Within a group the imagination noise of a decision depends on the group and the chunk's index alone: otherwise the
    noise of imagining would swamp the differences inside a group.

    A still background dominates the error of pixels: ``motion_weight`` w weights a pixel by ``1 - w + w * m / mean(m)``
    with m the change of the real picture since the decision there (mean over colours), so that w = 1 looks at what
    moved alone. In ``space="latents"`` both frames pass the codec's encoder first, each as a picture of its own, and
    the error is that of their latents: of textures and edges at the codec's scales instead of pixels.

    Writes ``("next","reward_rec")`` float32 [B,1] (normalised, 0 where masked), ``("next","reward_rec_raw")``,
    ``("next","reward_rec_mask")`` bool [B,1] and, for comparison, ``("next","reward_rec_copy")``: the raw reward that
    a copy of the decision's picture would have had.

    Args:
        model: the world-action model.

    Keyword Args:
        num_steps: denoising steps of an imagination.
        shift: shift of their schedule; the model's ``video_shift`` if None.
        imagination: ``"frozen"`` imagines with the adapters off, a stationary target; ``"live"`` with them on;
            ``"ema"`` with their moving average, which :meth:`follow` moves.
        ema_decay: share of itself that the moving average keeps per call of :meth:`follow`.
        space: ``"pixels"`` or ``"latents"``.
        motion_weight: 0..1, see above; of pixels only.
        frame_offsets: action offsets of the frames in ``("next","future_frames")``.
        batch_size: decisions imagined at once.
        seed: seed of the imagination noise.

    Raises:
        ValueError: a bad option, or records whose frames do not match ``frame_offsets``.
    """

    def __init__(
        self,
        model: FastWAM,
        *,
        num_steps: int = 10,
        shift: float | None = None,
        imagination: Literal["frozen", "ema", "live"] = "frozen",
        ema_decay: float = 0.99,
        space: Literal["pixels", "latents"] = "pixels",
        motion_weight: float = 0.0,
        frame_offsets: tuple[int, ...] = schema.FRAME_OFFSETS,
        batch_size: int = 32,
        seed: int = 0,
    ) -> None:
        for name, value, known in (("imagination", imagination, IMAGINATIONS), ("space", space, SPACES)):
            if value not in known:
                raise ValueError(f"{name} must be one of {known}, got {value!r}")
        for name, share in (("ema_decay", ema_decay), ("motion_weight", motion_weight)):
            if not 0 <= share <= 1:
                raise ValueError(f"{name} must lie in 0..1, got {share}")
        if motion_weight and space != "pixels":
            raise ValueError(f"motion_weight={motion_weight:g} weights pixels: set it to 0 for space={space!r}")
        if batch_size < 1 or num_steps < 1:
            raise ValueError(f"batch_size and num_steps must be at least 1, got {batch_size} and {num_steps}")
        super().__init__(in_keys=[], out_keys=[])
        # Kept out of the module tree: the model is no part of this transform's state.
        self._model = (model,)
        self.num_steps = num_steps
        self.shift = shift
        self.imagination = imagination
        self.ema_decay = ema_decay
        self.space = space
        self.motion_weight = motion_weight
        self.average = ReferenceActor(video_parameters(model)) if imagination == "ema" else None
        self.frame_offsets = tuple(frame_offsets)
        self.batch_size = batch_size
        self.seed = seed
        # Chan's running moments; float64, as thousands of small numbers are summed.
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.register_buffer("square_sum", torch.zeros((), dtype=torch.float64))

    @property
    def model(self) -> FastWAM:
        """The world-action model."""
        return self._model[0]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Leave sampled batches alone: the reward is computed once, on writing."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        raw, mask, copied = self.score(tensordict)
        valid = raw[mask].double()
        if float(self.count) == 0:
            self._update(valid)
            tensordict.set(schema.REWARD_REC, self._normalise(raw, mask))
        else:
            tensordict.set(schema.REWARD_REC, self._normalise(raw, mask))
            self._update(valid)
        tensordict.set(schema.REWARD_REC_RAW, raw).set(schema.REWARD_REC_COPY, copied)
        return tensordict.set(schema.REWARD_REC_MASK, mask)

    @torch.no_grad()
    def score(self, tensordict: TensorDictBase) -> Score:
        """Raw rewards of decisions [B] and their mask; no statistics are touched."""
        frames = tensordict.get(("next", schema.FUTURE_FRAMES))
        if frames.shape[1] != len(self.frame_offsets):
            raise ValueError(
                f"('next', 'future_frames') holds {frames.shape[1]} frames, but frame_offsets={self.frame_offsets} "
                f"names {len(self.frame_offsets)}: give both the environment and the reward the same offsets"
            )
        valid = tensordict.get(("next", schema.FUTURE_MASK))
        device = self.model.proprio_encoder.weight.device
        errors = [self._errors(part.to(device)) for part in tensordict.split(self.batch_size)]
        count = valid.sum(-1, keepdim=True)
        raw, copied = (
            -(torch.cat(error).to(valid.device) * valid).sum(-1, keepdim=True) / count.clamp(min=1)
            for error in zip(*errors, strict=True)
        )
        return Score(raw, count > 0, copied)

    def follow(self) -> None:
        """Take in the adapters as they are, after they were trained; nothing unless the imagination is ``"ema"``."""
        if self.average is not None:
            self.average.follow(self.ema_decay)

    def get_extra_state(self) -> dict[str, Any]:
        """The moving average of the adapters, for checkpoints."""
        return {} if self.average is None else self.average.state_dict()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore :meth:`get_extra_state`; an average without a past starts from the adapters as they are."""
        if self.average is None:
            return
        if state:
            self.average.load_state_dict(state)
        else:
            self.average.follow(0.0)

    def _errors(self, part: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Errors [B,F] of every offset's frame: of imagination, and of a copy of the decision's picture."""
        imagined = self.model.decode_frames(self.imagine(part), self.frame_offsets).clamp(-1, 1)
        real, now = part.get(("next", schema.FUTURE_FRAMES)), part.get(schema.IMAGE)[:, None]
        if self.space == "latents":
            target = self._encode(real)
            errors = [(self._encode(x) - target).square() for x in (imagined, now)]
            return errors[0].flatten(2).mean(-1), errors[1].flatten(2).mean(-1)
        real, now = real.float() / 255, now.float() / 255
        errors = [(x - real).square().mean(2) for x in ((imagined + 1) / 2, now)]
        if self.motion_weight:
            motion = (real - now).abs().mean(2)
            share = motion / motion.mean((-2, -1), keepdim=True).clamp(min=1e-6)
            weight = 1 - self.motion_weight + self.motion_weight * share
            errors = [error * weight for error in errors]
        return errors[0].flatten(2).mean(-1), errors[1].flatten(2).mean(-1)

    def _encode(self, frames: Tensor) -> Tensor:
        """Latents [B,F,...] of frames [B,F,3,H,W], each a picture of its own."""
        latents = self.model.codec.encode(frames.flatten(0, 1).unsqueeze(2))
        return latents.unflatten(0, frames.shape[:2])

    @contextlib.contextmanager
    def _imagining(self) -> Iterator[None]:
        """The video expert that imagines."""
        if self.average is not None:
            with self.average.applied():
                yield
        elif self.imagination == "frozen":
            with adapters_disabled(self.model.mot.video):
                yield
        else:
            yield

    def imagine(self, part: TensorDictBase) -> Tensor:
        """Imagined latents fp32 [B,C,1+F,h,w] of the decisions in ``part``."""
        seeds = mix_seeds(self.seed, part.get(schema.GROUP_ID), part.get(schema.CHUNK_INDEX)).squeeze(-1)
        noise = seeded_normal(seeds, self.model.future_shape)
        with self._imagining():
            return self.model.imagine(part, noise, num_steps=self.num_steps, shift=self.shift)

    @property
    def std(self) -> float:
        """Standard deviation of the rewards seen so far, 1 before there were two."""
        return float((self.square_sum / (self.count - 1)).sqrt()) if self.count > 1 else 1.0

    def _normalise(self, raw: Tensor, mask: Tensor) -> Tensor:
        scaled = ((raw - float(self.mean)) / (self.std + 1e-6)).clamp(-REWARD_CLIP, REWARD_CLIP)
        return torch.where(mask, scaled, 0.0)

    def _update(self, values: Tensor) -> None:
        if not len(values):
            return
        batch_mean = values.mean()
        total = self.count + len(values)
        delta = batch_mean - self.mean
        self.square_sum += (values - batch_mean).square().sum() + delta.square() * self.count * len(values) / total
        self.mean += delta * len(values) / total
        self.count.copy_(total)
