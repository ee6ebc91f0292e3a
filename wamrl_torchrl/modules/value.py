"""A value head on what the video expert sees."""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from wamrl_torchrl import schema
from wamrl_torchrl.modules.fastwam.model import FastWAM

#: Features of a state, and the value that the head reads from them.
VALUE_FEATURES, STATE_VALUE = "value_features", "state_value"


class ValueHead(TensorDictModuleBase):
    """State value from pooled features of the frozen first-frame pass of the video expert.

    A state's features are the values (of attention) of the last layer, averaged over the tokens of the first frame and
    brought to unit scale, its normalised proprioception, and the decisions made so far as a share of ``horizon``: with
    an end to the episode the same picture is worth less later. No gradient reaches the expert, so features are computed
    once per rollout and the head is trained on them.

    Args:
        model: the world-action model; it is no part of this module's state.

    Keyword Args:
        hidden: width of the two hidden layers.
        horizon: decisions in an episode.

    Reads a state with its ``chunk_index``, or ``value_features`` float32 [B,D] if they are there; writes both
    ``value_features`` and ``state_value`` float32 [B,1].
    """

    def __init__(self, model: FastWAM, *, hidden: int = 128, horizon: int) -> None:
        super().__init__()
        self._model = (model,)
        self.horizon = horizon
        self.in_keys = [schema.IMAGE, schema.PROPRIO, schema.TASK_ID, schema.CHUNK_INDEX]
        self.out_keys = [VALUE_FEATURES, STATE_VALUE]
        width = model.config.video.attention_dim + model.config.proprio_dim + 1
        last = nn.Linear(hidden, 1)
        nn.init.zeros_(last.weight)  # a fresh head says 0 everywhere
        nn.init.zeros_(last.bias)
        self.head = nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), last)

    @torch.no_grad()
    def features(self, state: TensorDictBase) -> Tensor:
        """Features float32 [B,D] of states [B]."""
        pooled = self._model[0].prefill(state).cache[-1].value.mean(1).float()
        pooled = nn.functional.rms_norm(pooled, pooled.shape[-1:])
        elapsed = state.get(schema.CHUNK_INDEX).float() / self.horizon
        return torch.cat((pooled, state.get(schema.PROPRIO).float(), elapsed), -1)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the values of states [B]."""
        features = tensordict.get(VALUE_FEATURES, None)
        if features is None:
            features = self.features(tensordict)
            tensordict.set(VALUE_FEATURES, features)
        return tensordict.set(STATE_VALUE, self.head(features))
