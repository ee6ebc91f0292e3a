"""Losses of the actor and of the video expert."""

from wamrl_torchrl.objectives.feature_kl import FeatureKLLoss
from wamrl_torchrl.objectives.flow_matching import FlowNFTLoss, WeightedFlowLoss
from wamrl_torchrl.objectives.flow_ppo import FlowPPOLoss
from wamrl_torchrl.objectives.video_sft import ActionSFTLoss, VideoSFTLoss

__all__ = ["ActionSFTLoss", "FeatureKLLoss", "FlowNFTLoss", "FlowPPOLoss", "VideoSFTLoss", "WeightedFlowLoss"]
