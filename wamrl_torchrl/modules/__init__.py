"""The world-action model, its flow-SDE sampler and the policy."""

from wamrl_torchrl.modules.flow_sde import logprob_chain, sample_chain
from wamrl_torchrl.modules.lora import VideoLoRA, add_video_lora
from wamrl_torchrl.modules.policy import FlowPolicy, FlowSDEConfig

__all__ = ["FlowPolicy", "FlowSDEConfig", "VideoLoRA", "add_video_lora", "logprob_chain", "sample_chain"]
