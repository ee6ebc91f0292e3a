"""Collecting whole episodes with TorchRL's collectors, in process or in several worker processes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.collectors import BaseCollector, Collector, MultiAsyncCollector
from torchrl.envs import EnvBase
from torchrl.weight_update import MultiProcessWeightSyncScheme

from wamrl_torchrl import schema
from wamrl_torchrl.envs.episodes import EpisodePlan, describe_episode
from wamrl_torchrl.modules.policy import FlowPolicy

_log = logging.getLogger(__name__)

#: Builds the environment of worker ``w`` of ``W``: ``make_env(worker, num_workers)``.
MakeEnv = Callable[[int, int], EnvBase]

#: Collector options under which whole episodes come out one at a time, on the CPU.
EPISODES: dict[str, Any] = {
    "total_frames": -1,
    "trajs_per_batch": 1,
    "traj_format": "cat",
    "use_buffers": False,
    "env_device": "cpu",
    "storing_device": "cpu",
    "auto_register_policy_transforms": False,
}


def tidy_record(steps: TensorDictBase) -> TensorDictBase:
    """Turn collected steps into macro-step records: flat, without parked slots and without duplicates.

    Outcomes belong under "next" only; the root copies are those of the step before. The next observation is the next
    record's own, and at the end of an episode nothing reads it. If all slots are parked one parked step is left, as
    TorchRL cannot assemble episodes from an empty batch; :func:`collect_episodes` passes over it.
    """
    steps = steps.reshape(-1)
    busy = steps.get(schema.EPISODE_ID).squeeze(-1) != schema.PARKED
    busy[0] |= ~busy.any()
    steps = steps[busy]
    ids = [("next", key) for key in (*schema.EPISODE_KEYS, schema.CHUNK_INDEX)]
    return steps.exclude(*schema.OUTCOME_KEYS, ("next", "observation"), *ids)


def _worker_collector(*args, **kwargs) -> Collector:
    """Collector of a worker process.

    TorchRL runs ``postproc`` in the parent; parked steps must go before episodes are assembled, which is in the worker.
    """
    return Collector(*args, **{**kwargs, "postproc": tidy_record})


def make_collector(
    make_env: MakeEnv,
    *,
    topology: Literal["direct", "multi_async"] = "direct",
    policy: FlowPolicy | None = None,
    policy_factory: Callable[[], FlowPolicy] | None = None,
    num_workers: int = 1,
    envs_per_worker: int = 1,
) -> BaseCollector:
    """Build a collector that yields one complete episode at a time.

    Args:
        make_env: builds the environment of a worker; must be picklable for worker processes.

    Keyword Args:
        topology: ``"direct"`` collects in this process and uses ``policy`` itself, so it always acts with the
            learner's weights; ``"multi_async"`` runs ``num_workers`` processes, each with its own environment and its
            own copy of the policy from ``policy_factory``, to be updated by :func:`push_weights`.
        policy: policy of the direct topology.
        policy_factory: picklable builder of the workers' policies.
        num_workers: worker processes.
        envs_per_worker: batch size of a worker's environment.

    Raises:
        ValueError: a topology without what it needs.
    """
    if topology == "direct":
        if policy is None:
            raise ValueError("topology 'direct' needs policy=...")
        env = make_env(0, 1)
        frames = env.batch_size.numel()
        return Collector(
            env, policy, frames_per_batch=frames, policy_device=policy.device, postproc=tidy_record, **EPISODES
        )
    if topology != "multi_async":
        raise ValueError(f"topology must be 'direct' or 'multi_async', got {topology!r}")
    if policy_factory is None or num_workers < 1:
        raise ValueError("topology 'multi_async' needs policy_factory=... and num_workers >= 1")
    return MultiAsyncCollector(
        [partial(make_env, worker, num_workers) for worker in range(num_workers)],
        policy_factory=policy_factory,
        frames_per_batch=envs_per_worker,
        collector_class=_worker_collector,
        weight_sync_schemes={"policy": MultiProcessWeightSyncScheme()},
        **EPISODES,
    )


def collect_episodes(episodes: Iterator[TensorDictBase], plan: EpisodePlan, count: int) -> Iterator[TensorDictBase]:
    """Take ``count`` episodes from a running collector, one at a time as they end.

    An episode whose simulator was lost (``("next", "invalid")``) is dropped with a warning and run again under the same
    ids, so that its group completes.

    Args:
        episodes: ``iter(collector)``, kept by the caller from one iteration to the next.
        plan: the plan that the collector's environments are dealt from.
        count: episodes that were released.

    Raises:
        RuntimeError: an episode was lost in each of the plan's ``max_attempts``.
    """
    while count:
        episode = next(episodes)
        last = episode[-1]
        ids = torch.cat([last.get(key) for key in schema.EPISODE_KEYS])
        if int(ids[-1]) == schema.PARKED:
            continue
        if bool(last.get(("next", schema.INVALID))):
            _log.warning(
                "the simulator was lost in decision %d of an episode, which is run again: %s",
                len(episode),
                describe_episode(ids.tolist()),
            )
            plan.requeue(ids[-1:])
            continue
        count -= 1
        yield episode


def join_episodes(episodes: list[TensorDictBase]) -> TensorDictBase:
    """Concatenate episodes into one flat batch [rows], in the order of their ids whatever order they ended in."""
    order = sorted(episodes, key=lambda episode: int(episode[0].get(schema.EPISODE_ID)))
    return torch.cat(order)


def trainable_weights(policy: FlowPolicy) -> TensorDict:
    """Detached clones of what changes during training: trainable parameters and the version."""
    weights = {
        name: parameter.detach().clone() for name, parameter in policy.named_parameters() if parameter.requires_grad
    }
    weights["version"] = policy.version.clone()
    return TensorDict({tuple(name.split(".")): value for name, value in weights.items()})


def push_weights(collector: BaseCollector, policy: FlowPolicy) -> None:
    """Raise the policy's version and send its trainable weights to every worker.

    Clones are sent: workers share memory with what they are given, and an optimiser step of the learner must not reach
    them before the next push.
    """
    policy.version += 1
    if isinstance(collector, MultiAsyncCollector):
        collector.update_policy_weights_(trainable_weights(policy))
