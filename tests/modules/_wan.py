"""A narrow Wan2.2 VAE with random weights."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLWan

from wamrl_torchrl.modules.fastwam.wan_codec import WAN22_VAE, WanCodec


def make_vae(seed: int = 0, **options):
    """The Wan2.2 VAE 20 to 32 times narrower, with random weights (1.05 M parameters)."""
    torch.manual_seed(seed)
    return AutoencoderKLWan(**{**WAN22_VAE, "base_dim": 8, "decoder_base_dim": 8, **options})


def make_wan(**options) -> WanCodec:
    return WanCodec(make_vae(), **{"dtype": torch.float32, **options})
