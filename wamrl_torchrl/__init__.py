"""RL post-training of world-action models, native to TorchRL."""

__version__ = "0.1.0"
