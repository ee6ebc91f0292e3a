"""The reconstruction reward: what the video expert expected against what happened."""

from __future__ import annotations

from typing import Literal

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.envs import Transform

from wamrl_torchrl import schema
from wamrl_torchrl.modules.adapters import adapters_disabled
from wamrl_torchrl.modules.fastwam.model import FastWAM
from wamrl_torchrl.modules.noise import mix_seeds, seeded_normal

REWARD_CLIP = 5.0


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

    Writes ``("next","reward_rec")`` float32 [B,1] (normalised, 0 where masked), ``("next","reward_rec_raw")`` and
    ``("next","reward_rec_mask")`` bool [B,1].

    Args:
        model: the world-action model.

    Keyword Args:
        num_steps: denoising steps of an imagination.
        shift: shift of their schedule; the model's ``video_shift`` if None.
        imagination: ``"frozen"`` imagines with the adapters off, a stationary target; ``"live"`` with them on.
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
        imagination: Literal["frozen", "live"] = "frozen",
        frame_offsets: tuple[int, ...] = schema.FRAME_OFFSETS,
        batch_size: int = 32,
        seed: int = 0,
    ) -> None:
        if imagination not in ("frozen", "live"):
            raise ValueError(f"imagination must be 'frozen' or 'live', got {imagination!r}")
        if batch_size < 1 or num_steps < 1:
            raise ValueError(f"batch_size and num_steps must be at least 1, got {batch_size} and {num_steps}")
        super().__init__(in_keys=[], out_keys=[])
        # Kept out of the module tree: the model is no part of this transform's state.
        self._model = (model,)
        self.num_steps = num_steps
        self.shift = shift
        self.imagination = imagination
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
        raw, mask = self.score(tensordict)
        valid = raw[mask].double()
        if float(self.count) == 0:
            self._update(valid)
            tensordict.set(schema.REWARD_REC, self._normalise(raw, mask))
        else:
            tensordict.set(schema.REWARD_REC, self._normalise(raw, mask))
            self._update(valid)
        tensordict.set(("next", "reward_rec_raw"), raw)
        return tensordict.set(schema.REWARD_REC_MASK, mask)

    @torch.no_grad()
    def score(self, tensordict: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Raw rewards float32 [B,1] (0 where masked) and their mask bool [B,1]; no statistics are touched."""
        frames = tensordict.get(("next", schema.FUTURE_FRAMES))
        if frames.shape[1] != len(self.frame_offsets):
            raise ValueError(
                f"('next', 'future_frames') holds {frames.shape[1]} frames, but frame_offsets={self.frame_offsets} "
                f"names {len(self.frame_offsets)}: give both the environment and the reward the same offsets"
            )
        valid = tensordict.get(("next", schema.FUTURE_MASK))
        device = self.model.proprio_encoder.weight.device
        errors = [self._errors(part.to(device)) for part in tensordict.split(self.batch_size)]
        error = torch.cat(errors).to(valid.device)
        count = valid.sum(-1, keepdim=True)
        raw = -(error * valid).sum(-1, keepdim=True) / count.clamp(min=1)
        return raw, count > 0

    def _errors(self, part: TensorDictBase) -> Tensor:
        """Mean squared error [B,F] of every offset's frame."""
        imagined = self.model.decode_frames(self.imagine(part), self.frame_offsets)
        real = part.get(("next", schema.FUTURE_FRAMES)).float() / 255
        return ((imagined.clamp(-1, 1) + 1) / 2 - real).square().flatten(2).mean(-1)

    def imagine(self, part: TensorDictBase) -> Tensor:
        """Imagined latents fp32 [B,C,1+F,h,w] of the decisions in ``part``."""
        seeds = mix_seeds(self.seed, part.get(schema.GROUP_ID), part.get(schema.CHUNK_INDEX)).squeeze(-1)
        noise = seeded_normal(seeds, self.model.future_shape)
        if self.imagination == "live":
            return self.model.imagine(part, noise, num_steps=self.num_steps, shift=self.shift)
        with adapters_disabled(self.model.mot.video):
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
