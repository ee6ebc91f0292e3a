"""The world-action model, its flow-SDE sampler, the policy, and what of it is trained."""

from wamrl_torchrl.modules.flow_sde import logprob_chain, sample_chain
from wamrl_torchrl.modules.lora import VideoLoRA, add_video_lora
from wamrl_torchrl.modules.policy import FlowPolicy, FlowSDEConfig, IDMConfig
from wamrl_torchrl.modules.trainable import ActorTraining, set_actor_training

__all__ = [
    "ActorTraining",
    "FlowPolicy",
    "FlowSDEConfig",
    "IDMConfig",
    "VideoLoRA",
    "add_video_lora",
    "logprob_chain",
    "sample_chain",
    "set_actor_training",
]
