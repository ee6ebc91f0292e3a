"""The flow policy: a TensorDictModule that emits a chunk, the chain behind it and its log-prob."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import NestedKey, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.distributions import Independent, Normal
from torchrl.data import Bounded, Composite, Unbounded
from torchrl.envs.utils import ExplorationType, exploration_type

from wamrl_torchrl import schema
from wamrl_torchrl.data.stats import DatasetStats
from wamrl_torchrl.modules.fastwam.model import Condition, FastWAM
from wamrl_torchrl.modules.fastwam.schedule import build_schedule
from wamrl_torchrl.modules.flow_sde import (
    Transitions,
    chain_transitions,
    logprob_chain,
    num_stochastic_steps,
    sample_chain,
    sde_coefficients,
    seeded_noise,
    step_weights,
)
from wamrl_torchrl.modules.noise import mix_seeds, seeded_normal


@dataclass
class FlowSDEConfig:
    """How chains are sampled; rollout and learner must use the same.

    Attributes:
        num_steps: sampling steps K.
        noise_level: a of the SDE step.
        stochastic_steps: ``"one_random"``, ``"all"`` or a count K_sde.
        std_floor: smallest standard deviation of a step.
        ignore_last: never make the last step stochastic.
        window: (first, count) of the only steps that may be stochastic, or None.
        weights: weight of each step in the choice, or None for equal ones.
    """

    num_steps: int = 10
    noise_level: float = 0.3
    stochastic_steps: str | int = "one_random"
    std_floor: float = 0.02
    ignore_last: bool = False
    window: tuple[int, int] | None = None
    weights: list[float] | None = None

    def __post_init__(self) -> None:
        # Refuses what could not be sampled, by name.
        sde_coefficients(build_schedule(self.num_steps, 1.0), self.noise_level, std_floor=self.std_floor)
        if self.count < 1:
            raise ValueError("stochastic_steps must leave at least one stochastic step: without one there is no ratio")
        if int((self.step_weights() > 0).sum()) < self.count:
            raise ValueError(f"weights, window and ignore_last leave fewer than {self.count} steps to choose from")

    @property
    def count(self) -> int:
        """Stochastic steps S of a chain."""
        return num_stochastic_steps(self.stochastic_steps, self.num_steps)

    def step_weights(self) -> Tensor:
        """Weights [K] of the choice of stochastic steps."""
        return step_weights(self.num_steps, weights=self.weights, ignore_last=self.ignore_last, window=self.window)


@dataclass
class IDMConfig:
    """Acting by inverse dynamics: first imagine the video, then denoise the actions that lead through it.

    Attributes:
        num_steps: denoising steps of the video.
        shift: shift of their schedule; the model's ``video_shift`` if None. Its own knob, since the published runs of
            the optional-IDM weights set the action's shift (1.0) for the video too.
        store_latents: keep the imagined video in the record (bfloat16, 75 KB at full size). Without it the record keeps
            the seed alone and a replay imagines again, at the cost of the video steps; the log-prob is then exact only
            while the video expert and the batching stay as they were.
    """

    num_steps: int = 10
    shift: float | None = None
    store_latents: bool = True

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps of the imagined video must be at least 1, got {self.num_steps}")
        if self.shift is not None and not self.shift > 0:
            raise ValueError(f"shift of the imagined video must be positive, got {self.shift}")


class FlowPolicy(TensorDictModuleBase):
    """World-action model as an actor.

    Reads the picture, the normalised proprioception and the episode's ids; writes ``action`` (environment convention),
    ``chain``, ``k_star``, ``action_log_prob`` (sum over the executed prefix), ``log_prob_rows`` (per action),
    ``noise_seed`` and ``policy_version``; in idm mode also the imagined future, ``video_latents``. Under
    ``ExplorationType.DETERMINISTIC`` the chain is the ODE from noise that depends on the initial condition alone; then
    ``k_star`` is -1 and the log-probs are 0.

    The noise of a decision is a function of ``(seed, episode_id, chunk_index)``, so a rollout does not depend on how
    episodes were batched or spread over workers.

    Args:
        model: the world-action model.
        stats: normalisation of proprioception and actions.

    Keyword Args:
        sde: sampling options.
        executed_rows: actions of a chunk that the environment executes; only they enter ``action_log_prob``.
        seed: seed of all noise.
        idm: act on an imagined video (idm mode); on the first frame alone if None.

    Raises:
        ValueError: ``executed_rows`` outside 1..chunk, or a mode the model was not trained in.
    """

    def __init__(
        self,
        model: FastWAM,
        stats: DatasetStats,
        *,
        sde: FlowSDEConfig | None = None,
        executed_rows: int = 10,
        seed: int = 0,
        idm: IDMConfig | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= executed_rows <= model.config.chunk:
            raise ValueError(f"executed_rows must lie in 1..{model.config.chunk} (the chunk), got {executed_rows}")
        self.model = model
        self.stats = stats
        self.sde = FlowSDEConfig() if sde is None else sde
        self.executed_rows = executed_rows
        self.seed = seed
        self.register_buffer("version", torch.zeros(1, dtype=torch.int64))
        ids = (schema.TASK_ID, schema.INIT_STATE_ID, schema.ENV_SEED, schema.EPISODE_ID, schema.CHUNK_INDEX)
        self.in_keys = [schema.IMAGE, schema.PROPRIO, *ids]
        self.set_idm(idm)

    def set_idm(self, idm: IDMConfig | None) -> None:
        """Switch to idm mode, or with None to first-frame mode.

        Raises:
            ValueError: the model was not trained in that mode.
        """
        mode, trained = "first_frame" if idm is None else "idm", self.model.config.action_modes
        if mode not in trained:
            raise ValueError(f"action mode {mode!r} needs weights trained for it; this model knows {trained}")
        self.idm = idm
        self.out_keys = list(self.spec.keys())

    @property
    def spec(self) -> Composite:
        """Spec of what one decision emits, without batch dims."""
        chunk, count = self.model.chunk_shape, self.sde.count
        spec = Composite({
            schema.ACTION: Bounded(-1, 1, chunk, dtype=torch.float32),
            schema.CHAIN: Unbounded((self.sde.num_steps + 1, *chunk), dtype=torch.float32),
            schema.K_STAR: Bounded(-1, self.sde.num_steps - 1, (count,), dtype=torch.int64),
            schema.LOG_PROB: Unbounded((count,), dtype=torch.float32),
            schema.LOG_PROB_ROWS: Unbounded((count, chunk[0]), dtype=torch.float32),
            schema.NOISE_SEED: Unbounded((1,), dtype=torch.int64),
            schema.POLICY_VERSION: Unbounded((1,), dtype=torch.int64),
        })  # fmt: skip
        if self.idm is not None and self.idm.store_latents:
            spec[schema.VIDEO_LATENTS] = Unbounded(self.model.future_shape, dtype=torch.bfloat16)
        return spec

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.version.device

    def _noise_seed(self, tensordict: TensorDictBase, deterministic: bool) -> Tensor:
        names = (schema.TASK_ID, schema.INIT_STATE_ID, schema.ENV_SEED) if deterministic else (schema.EPISODE_ID,)
        return mix_seeds(self.seed, *(tensordict.get(key) for key in (*names, schema.CHUNK_INDEX)))

    @torch.no_grad()
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Act on states [B] (or one state without batch dims)."""
        if tensordict.ndim != 1:
            flat = self.forward(tensordict.reshape(-1).select(*self.in_keys))
            return tensordict.update(flat.select(*self.out_keys).reshape(tensordict.batch_size))
        deterministic = exploration_type() == ExplorationType.DETERMINISTIC
        sde, batch = self.sde, tensordict.batch_size[0]
        seeds = self._noise_seed(tensordict, deterministic)
        if self.idm is not None:
            condition, future = self._imagine(tensordict, seeds)
            if self.idm.store_latents:
                tensordict.set(schema.VIDEO_LATENTS, future)
        else:
            condition = self.condition(tensordict)
        sample = sample_chain(
            self,
            tensordict,
            sde.num_steps,
            sde.noise_level,
            stochastic_steps="none" if deterministic else sde.stochastic_steps,
            shift=self.model.config.action_shift,
            std_floor=sde.std_floor,
            weights=sde.step_weights(),
            noise=seeded_noise(seeds.squeeze(-1), self.model.chunk_shape, sde.num_steps),
            condition=condition,
        )
        rows, k_star = sample.log_prob_rows, sample.k_star
        if deterministic:
            rows = rows.new_zeros(batch, sde.count, rows.shape[-1])
            k_star = k_star.new_full((batch, sde.count), -1)
        return tensordict.update({
            schema.ACTION: self.stats.to_env_actions(sample.chain[:, -1]),
            schema.CHAIN: sample.chain,
            schema.K_STAR: k_star,
            schema.LOG_PROB: rows[..., : self.executed_rows].sum(-1),
            schema.LOG_PROB_ROWS: rows,
            schema.NOISE_SEED: seeds,
            schema.POLICY_VERSION: self.version.expand(batch, 1).clone(),
        })  # fmt: skip

    def _imagine(self, state: TensorDictBase, seeds: Tensor) -> tuple[Condition, Tensor]:
        assert self.idm is not None
        noise = seeded_normal(mix_seeds(seeds.squeeze(-1), 3), self.model.future_shape)
        return self.model.imagine_condition(state, noise, num_steps=self.idm.num_steps, shift=self.idm.shift)

    # ---- the flow model that the sampler sees -----------------------------------------------------------------------
    @property
    def chunk_shape(self) -> tuple[int, int]:
        """Shape (actions, action dim) of a chunk."""
        return self.model.chunk_shape

    def condition(self, record: TensorDictBase) -> Condition:
        """What the actions of a record saw, as :class:`~wamrl_torchrl.modules.flow_sde.FlowModel` asks.

        Raises:
            KeyError: idm mode, and the record lacks the imagined video (or its seed).
        """
        if self.idm is None:
            return self.model.condition(record)
        key = schema.VIDEO_LATENTS if self.idm.store_latents else schema.NOISE_SEED
        stored = record.get(key, None)
        if stored is None:
            raise KeyError(
                f"the policy acts in idm mode, whose records need {key!r}; this one has {list(record.keys())}"
            )
        if self.idm.store_latents:
            return self.model.condition(record, future=stored)
        return self._imagine(record, stored)[0]

    def action_velocity(self, actions: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        """Velocity fp32 [B,T,A] at noisy normalised ``actions`` [B,T,A] and ``sigma`` [B]."""
        return self.model.action_velocity(actions, sigma, condition)

    # ---- what a loss needs --------------------------------------------------------------------------------------
    @property
    def replay_keys(self) -> list[NestedKey]:
        """Keys of a record from which its log-prob is recomputed."""
        seen = [] if self.idm is None else [schema.VIDEO_LATENTS if self.idm.store_latents else schema.NOISE_SEED]
        return [schema.IMAGE, schema.PROPRIO, schema.TASK_ID, *seen, schema.CHAIN, schema.K_STAR]

    def _replay_options(self) -> dict[str, float]:
        return {"shift": self.model.config.action_shift, "std_floor": self.sde.std_floor}

    def log_prob_rows(self, record: TensorDictBase) -> Tensor:
        """Log-probs fp32 [B,S,T] of recorded chains under the current weights, with gradient."""
        chain, k_star = record.get(schema.CHAIN), record.get(schema.K_STAR)
        return logprob_chain(self, record, chain, k_star, self.sde.noise_level, **self._replay_options())

    def transitions(self, record: TensorDictBase) -> Transitions:
        """Gaussian transitions of recorded chains under the current weights, with gradient."""
        chain, k_star = record.get(schema.CHAIN), record.get(schema.K_STAR)
        return chain_transitions(self, record, chain, k_star, self.sde.noise_level, **self._replay_options())

    def get_dist(self, record: TensorDictBase) -> Independent:
        """Distribution of ``x_next`` [B,n,A], the executed rows after the stochastic step (S must be 1).

        With it TorchRL's own ``ClipPPOLoss`` trains this policy; see :meth:`x_next`.
        """
        moves = self.transitions(record)
        if moves.mean.shape[1] != 1:
            raise ValueError(f"get_dist needs one stochastic step per chain, found {moves.mean.shape[1]}")
        mean = moves.mean[:, 0, : self.executed_rows]
        return Independent(Normal(mean, moves.std[:, :, None].expand_as(mean)), 2)

    def x_next(self, record: TensorDictBase) -> Tensor:
        """What the stochastic step drew in recorded chains: fp32 [B,n,A], the sample of :meth:`get_dist`."""
        chain, k_star = record.get(schema.CHAIN), record.get(schema.K_STAR)
        return chain[torch.arange(len(chain), device=chain.device), k_star[:, 0] + 1, : self.executed_rows]
