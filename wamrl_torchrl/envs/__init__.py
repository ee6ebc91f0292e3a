"""Environments with one action chunk per step, and the plan that deals episodes to them.

Names are imported on first use: a simulator process needs its own module only, and not torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wamrl_torchrl.envs.chunk import ChunkEnv
    from wamrl_torchrl.envs.episodes import DealEpisodes, EpisodePlan
    from wamrl_torchrl.envs.libero import LiberoEnv
    from wamrl_torchrl.envs.tabletop import TableTopEnv

__all__ = ["ChunkEnv", "DealEpisodes", "EpisodePlan", "LiberoEnv", "TableTopEnv"]

_MODULES = {
    "ChunkEnv": "chunk",
    "DealEpisodes": "episodes",
    "EpisodePlan": "episodes",
    "LiberoEnv": "libero",
    "TableTopEnv": "tabletop",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
