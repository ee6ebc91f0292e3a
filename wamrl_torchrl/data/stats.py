"""Normalisation of state and action by the statistics of a dataset, and the gripper conventions.

Two action conventions meet here. *Dataset*: six deltas and a gripper opening ``g``, 1 open and 0 closed; the model sees
its min/max-normalised form. *Environment* (LIBERO, and every ``action`` key of the package): six deltas and a gripper
command, -1 open and +1 close, all in [-1, 1]. The FastWAM evaluation maps one to the other by ``sign(-(2g - 1))``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.data import Bounded, Composite
from torchrl.envs import Transform

from wamrl_torchrl import schema
from wamrl_torchrl.precision import FixedBuffers

#: Normalised values are clamped to +- this, as FastWAM was trained: an outlier must not leave the model's range by far.
CLAMP = 5.0
#: A dim whose range is smaller is constant in the data and is passed through as it is.
MIN_RANGE = 1e-4


def gripper_to_env(actions: Tensor) -> Tensor:
    """Turn the last dim of dataset ``actions`` [...,7] into an environment command: -1 (open) or +1 (close).

    This is ``sign(-(2g - 1))``, and where that sign is 0 it has a value too: ``g = 0.5`` opens, since a command of 0 is
    neither open nor close.
    """
    opens = actions[..., -1:] >= 0.5
    return torch.cat([actions[..., :-1], 1 - 2 * opens.to(actions.dtype)], -1)


def gripper_to_dataset(actions: Tensor) -> Tensor:
    """Turn the last dim of environment ``actions`` [...,7] into an opening: -1 to 1 (open), +1 to 0, linear between."""
    return torch.cat([actions[..., :-1], (1 - actions[..., -1:]) / 2], -1)


class DatasetStats(FixedBuffers):
    """Minimum and maximum of each dim of state and action; maps them to [-1, 1] and back.

    The bounds are buffers: they move and are saved with the policy that owns the module. They stay float32 when the
    owner is cast.

    Keyword Args:
        state_min: least state, ``[8]``.
        state_max: greatest state, ``[8]``.
        action_min: least action in the dataset convention, ``[7]``.
        action_max: greatest action in the dataset convention, ``[7]``.

    Raises:
        ValueError: a bound has the wrong shape, is not finite, or a minimum exceeds its maximum.
    """

    state_min: Tensor
    state_max: Tensor
    action_min: Tensor
    action_max: Tensor

    def __init__(self, *, state_min: Tensor, state_max: Tensor, action_min: Tensor, action_max: Tensor) -> None:
        super().__init__()
        bounds = {"state_min": state_min, "state_max": state_max, "action_min": action_min, "action_max": action_max}
        for name, bound in bounds.items():
            size = schema.STATE_DIM if name.startswith("state") else schema.ACTION_DIM
            if tuple(bound.shape) != (size,):
                raise ValueError(f"{name} must have shape [{size}], found {list(bound.shape)}")
            if not bool(torch.isfinite(bound).all()):
                raise ValueError(f"{name} must be finite, found {bound.tolist()}")
            self.register_buffer(name, bound.detach().to(torch.float32, copy=True))
        for name, low, high in (("state", state_min, state_max), ("action", action_min, action_max)):
            wrong = (low > high).nonzero().flatten().tolist()
            if wrong:
                raise ValueError(f"{name}_min exceeds {name}_max in dims {wrong}")

    # ---- sources ------------------------------------------------------------------------------------------------
    @classmethod
    def from_episodes(cls, episodes: Iterable[TensorDictBase]) -> DatasetStats:
        """Measure ``states`` [F,8] and ``actions`` [T,7] (environment convention) of episodes.

        The gripper's bounds are 0 and 1 whatever the episodes hold: it is a command, and data that never close it must
        not turn it into a constant.

        Raises:
            ValueError: no episodes.
        """
        bounds = [
            (*torch.aminmax(episode.get("states"), dim=0), *torch.aminmax(episode.get("actions"), dim=0))
            for episode in episodes
        ]
        if not bounds:
            raise ValueError("cannot measure statistics of no episodes")
        state_min, state_max, action_min, action_max = (torch.stack(column) for column in zip(*bounds, strict=True))
        low, high = action_min.amin(0), action_max.amax(0)
        low[-1], high[-1] = 0.0, 1.0
        return cls(state_min=state_min.amin(0), state_max=state_max.amax(0), action_min=low, action_max=high)

    @classmethod
    def from_json(cls, path: str | Path) -> DatasetStats:
        """Read a ``dataset_stats.json`` in the layout of the released FastWAM checkpoints.

        Only ``global_min`` and ``global_max`` under ``state.default`` and ``action.default`` are read.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not JSON, a missing field, or a field of the wrong shape, not finite, or with a minimum above
                its maximum; the message names file and field.
        """
        path = Path(path)
        try:
            content = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        bounds = {}
        for name, size in (("state", schema.STATE_DIM), ("action", schema.ACTION_DIM)):
            for bound in ("min", "max"):
                field, value = f"{name}.default.global_{bound}", content
                for key in field.split("."):
                    if not isinstance(value, dict) or key not in value:
                        raise ValueError(f"{path} has no field {field!r}; it is not a FastWAM dataset_stats.json")
                    value = value[key]
                numbers = isinstance(value, list) and all(isinstance(entry, int | float) for entry in value)
                if not numbers or len(value) != size:
                    raise ValueError(f"{path}: field {field!r} must be a list of {size} numbers, found {value!r}")
                bounds[f"{name}_{bound}"] = torch.tensor(value, dtype=torch.float32)
        try:
            return cls(**bounds)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def to_json(self, path: str | Path) -> None:
        """Write the bounds in the layout that :meth:`from_json` reads."""
        content = {
            name: {
                "default": {f"global_{bound}": getattr(self, f"{name}_{bound}").tolist() for bound in ("min", "max")}
            }
            for name in ("state", "action")
        }
        Path(path).write_text(json.dumps(content, indent=2))

    # ---- maps ---------------------------------------------------------------------------------------------------
    @staticmethod
    def _centre_and_half(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        constant = high - low < MIN_RANGE
        return ((high + low) / 2).masked_fill(constant, 0), ((high - low) / 2).masked_fill(constant, 1)

    def normalize_state(self, state: Tensor) -> Tensor:
        """Normalise raw ``state`` [...,8] to [-1, 1] over the dataset's range, clamped to +-5; float32."""
        centre, half = self._centre_and_half(self.state_min, self.state_max)
        return ((state.float() - centre) / half).clamp(-CLAMP, CLAMP)

    def normalize_action(self, action: Tensor) -> Tensor:
        """Normalise dataset ``action`` [...,7] as :meth:`normalize_state` does the state; float32."""
        centre, half = self._centre_and_half(self.action_min, self.action_max)
        return ((action.float() - centre) / half).clamp(-CLAMP, CLAMP)

    def denormalize_action(self, action: Tensor) -> Tensor:
        """Invert :meth:`normalize_action` without a clamp; float32 [...,7]."""
        centre, half = self._centre_and_half(self.action_min, self.action_max)
        return action.float() * half + centre

    def to_env_actions(self, normalized: Tensor) -> Tensor:
        """Turn the model's ``normalized`` actions [...,7] into environment actions, float32 in [-1, 1]."""
        return gripper_to_env(self.denormalize_action(normalized)).clamp(-1, 1)

    def from_env_actions(self, actions: Tensor) -> Tensor:
        """Turn environment ``actions`` [...,7] into normalised ones, float32; the gripper keeps values between."""
        return self.normalize_action(gripper_to_dataset(actions.float()))


class NormalizeProprio(Transform):
    """Write ``("observation","proprio")``, the normalised ``("observation","state")``.

    Works on an environment (reset and step) and on a replay buffer (sampling). It keeps a copy of the statistics:
    a policy that shares them may move to another device than the environment.

    Args:
        stats: statistics of the data the policy was trained on.

    Raises:
        KeyError: the state is missing, in the environment's specs or in a tensordict.
    """

    def __init__(self, stats: DatasetStats) -> None:
        super().__init__(in_keys=[schema.STATE], out_keys=[schema.PROPRIO])
        self.stats = copy.deepcopy(stats)

    def _apply_transform(self, state: Tensor) -> Tensor:
        return self.stats.normalize_state(state)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:  # noqa: ARG002
        return self._call(tensordict_reset)

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        """Add the proprioception, bounded by the clamp, where the state is."""
        if schema.STATE not in observation_spec.keys(True, True):
            have = sorted(str(key) for key in observation_spec.keys(True, True))
            raise KeyError(f"NormalizeProprio needs {schema.STATE!r} in the observation spec, which has {have}")
        state = observation_spec[schema.STATE]
        observation_spec[schema.PROPRIO] = Bounded(-CLAMP, CLAMP, state.shape, dtype=torch.float32, device=state.device)
        return observation_spec
