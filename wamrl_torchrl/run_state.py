"""What a checkpoint of a run holds beside optimisers: trained weights, episodes and buffers."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wamrl_torchrl.data.episodes import EpisodeStore
from wamrl_torchrl.modules.policy import FlowPolicy
from wamrl_torchrl.tensor_files import check_tensors


class StoredEpisodes:
    """Checkpoint component of an episode store."""

    def __init__(self, store: EpisodeStore) -> None:
        self._store = store

    def dump(self, path: Path) -> None:
        """Write the episodes below ``path``."""
        if len(self._store):
            self._store.save(path / "episodes")

    def load(self, path: Path) -> None:
        """Add the episodes below ``path``."""
        if (path / "episodes").exists():
            for episode in EpisodeStore.load(path / "episodes"):
                self._store.add(episode)


class TrainedWeights:
    """State of what a run trains of its policy; the frozen rest, most of a big model, is where the run started from.

    Of the frozen rest a fingerprint is kept, so that a run is not continued on other weights.
    """

    def __init__(self, policy: FlowPolicy) -> None:
        self._policy = policy

    def _fingerprint(self) -> list[float]:
        """Sums, magnitudes and squares of all that is not trained, statistics and contexts included."""
        frozen = [p for p in self._policy.parameters() if not p.requires_grad]
        frozen += [b for name, b in self._policy.named_buffers() if name != "version" and b.is_floating_point()]
        sums = [torch.stack((t.double().sum(), t.double().abs().sum(), t.double().square().sum())) for t in frozen]
        return torch.stack(sums).sum(0).tolist()

    def _options(self) -> dict[str, Any]:
        model = self._policy.model
        parts = {"lora": model.lora, "actor": model.actor_training}
        return {name: None if part is None else asdict(part) for name, part in parts.items()}

    def _tensors(self) -> dict[str, Tensor]:
        trained = {name: p.detach() for name, p in self._policy.named_parameters() if p.requires_grad}
        return {**trained, "version": self._policy.version}

    def state_dict(self) -> dict[str, Any]:
        """Trainable parameters and the version, and what the rest was."""
        described = json.dumps({"options": self._options(), "frozen": self._fingerprint()})
        return {"tensors": self._tensors(), "described": described}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`.

        Raises:
            ValueError: the checkpoint was made with other trained parts or adapters, or on other frozen weights.
        """
        described, own = json.loads(state["described"]), self._tensors()
        if described["options"] != json.loads(json.dumps(self._options())):
            raise ValueError(
                f"the checkpoint was made with {described['options']}, this run has {self._options()}: model.lora and "
                "model.actor must stay as they were"
            )
        check_tensors(own, state["tensors"], "the checkpoint", what="what this run trains")
        before, now = described["frozen"], self._fingerprint()
        if any(abs(a - b) > 1e-9 * before[1] for a, b in zip(before[:2], now[:2], strict=True)) or not math.isclose(
            before[2], now[2], rel_tol=1e-9
        ):
            raise ValueError(
                "the checkpoint was made on other frozen weights, statistics or contexts than this run has: was the "
                "policy at model.policy replaced, or model.contexts?"
            )
        for name, tensor in own.items():
            tensor.copy_(state["tensors"][name])


class OwnBuffers:
    """State of a loss module without the model it refers to, which is saved once elsewhere."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Tensor]:
        """The module's own buffers."""
        return dict(self._module.named_buffers(recurse=False))

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore :meth:`state_dict`."""
        for name, buffer in self._module.named_buffers(recurse=False):
            buffer.copy_(state[name])
