"""Reward and advantage transforms; they act when whole trajectories are written to a replay buffer."""

from wamrl_torchrl.objectives.transforms.actor_critic import CriticAdvantage
from wamrl_torchrl.objectives.transforms.advantage import GroupAdvantage
from wamrl_torchrl.objectives.transforms.reconstruction import ReconstructionReward

__all__ = ["CriticAdvantage", "GroupAdvantage", "ReconstructionReward"]
