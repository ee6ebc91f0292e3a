"""Collecting whole episodes with TorchRL's collectors."""

from wamrl_torchrl.collectors.collect import collect_episodes, join_episodes, make_collector, push_weights

__all__ = ["collect_episodes", "join_episodes", "make_collector", "push_weights"]
