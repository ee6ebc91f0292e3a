"""Start states along demonstrations, for a reverse curriculum."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from wamrl_torchrl import schema


class StartStates:
    """Simulator states some steps before the end of successful demonstrations.

    A state goes with the env seed of its demonstration: the seed places the fixtures, which no state holds.

    Args:
        episodes: demonstrations with ``sim_states``; failed ones are passed over.

    Keyword Args:
        steps_before_end: how many actions before the end a start lies; a longer one than the episode is its beginning.

    Attributes:
        states: float64 [M,D] by task; init state id ``50 + j`` means row ``j``.
        env_seeds: int64 [M] by task.
    """

    def __init__(self, episodes: Iterable[TensorDictBase], *, steps_before_end: Sequence[int]) -> None:
        if not steps_before_end or min(steps_before_end) < 1:
            raise ValueError(f"steps_before_end must be positive numbers, got {list(steps_before_end)}")
        states: dict[int, list[Tensor]] = defaultdict(list)
        seeds: dict[int, list[int]] = defaultdict(list)
        for episode in episodes:
            if not bool(episode.get(schema.SUCCESS)):
                continue
            if episode.get(schema.SIM_STATES, None) is None:
                raise KeyError(f"start states need {schema.SIM_STATES!r} in every demonstration")
            task, length = int(episode.get(schema.TASK_ID)), len(episode.get("actions"))
            for steps in steps_before_end:
                states[task].append(episode.get(schema.SIM_STATES)[max(0, length - steps)])
                seeds[task].append(int(episode.get(schema.ENV_SEED)))
        self.states = {task: torch.stack(rows) for task, rows in states.items()}
        self.env_seeds = {task: torch.tensor(rows) for task, rows in seeds.items()}

    def draw(self, task: int, generator: torch.Generator) -> tuple[int, int]:
        """Draw (init state id, env seed) of a start state of ``task``.

        Raises:
            KeyError: no successful demonstration of the task.
        """
        if task not in self.states:
            raise KeyError(f"no successful demonstration of task {task}, so it has no start states")
        row = int(torch.randint(len(self.states[task]), (), generator=generator))
        return schema.PLAIN_INIT_STATES + row, int(self.env_seeds[task][row])
