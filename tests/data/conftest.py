from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from wamrl_torchrl import schema
from wamrl_torchrl.envs.chunk import ChunkEnv, Outcome


class CountingEnv(ChunkEnv):
    """Pictures and states tell the time: after ``s`` actions of episode ``e``, red and state[0] are ``s``, green ``e``.

    An episode succeeds after ``succeed_after`` actions if its ``task_id`` is even.
    """

    def __init__(self, num_envs: int = 2, *, succeed_after: int = 14, **options) -> None:
        self.succeed_after = succeed_after
        defaults = {"image_size": (2, 4), "replan_steps": 8, "max_episode_steps": 30}
        super().__init__(num_envs, **{**defaults, **options})

    def _start_episodes(self, slots: Tensor, episodes: Tensor) -> None:
        pass

    def _draw_episodes(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(0, 10, (count, 3), generator=generator)

    def _picture(self, slots: Tensor, steps: Tensor) -> Tensor:
        image = torch.zeros(len(slots), 3, *self.image_size, dtype=torch.uint8)
        image[:, 0] = steps[:, None, None].byte()
        image[:, 1] = self._episodes[slots, -1][:, None, None].clamp(min=0).byte()
        return image

    def _observe(self) -> tuple[Tensor, Tensor]:
        state = torch.zeros(self.num_envs, schema.STATE_DIM)
        state[:, 0] = self._steps
        return self._picture(torch.arange(self.num_envs), self._steps), state

    def _execute(self, slots: Tensor, actions: Tensor, limits: Tensor) -> Outcome:
        start = self._steps[slots]
        to_success = torch.where(self._episodes[slots, 0] % 2 == 0, self.succeed_after - start, schema.CHUNK + 1)
        executed = torch.minimum(limits, to_success)
        frames = [
            self._picture(slots, start + offset) * (executed >= offset).byte()[:, None, None, None]
            for offset in self.frame_offsets
        ]
        return Outcome(executed, executed == to_success, torch.stack(frames, 1), None)


@pytest.fixture(scope="session")
def counting_env() -> Callable[..., CountingEnv]:
    return CountingEnv
