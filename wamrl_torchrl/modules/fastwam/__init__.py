"""FastWAM: a compact, batched implementation under the parameter names of the released checkpoints."""

from wamrl_torchrl.modules.fastwam.codec import Codec, TinyCodec
from wamrl_torchrl.modules.fastwam.config import PRESETS, ExpertConfig, FastWAMConfig, preset
from wamrl_torchrl.modules.fastwam.context import ContextBank
from wamrl_torchrl.modules.fastwam.model import FastWAM

__all__ = ["PRESETS", "Codec", "ContextBank", "ExpertConfig", "FastWAM", "FastWAMConfig", "TinyCodec", "preset"]
