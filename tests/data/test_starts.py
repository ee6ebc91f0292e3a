from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from wamrl_torchrl.data.starts import StartStates
from wamrl_torchrl.schema import PLAIN_INIT_STATES


def demonstration(task: int, length: int, *, seed: int = 0, success: bool = True) -> TensorDict:
    return TensorDict({
        "task_id": torch.tensor([task]),
        "env_seed": torch.tensor([seed]),
        "success": torch.tensor([success]),
        "actions": torch.zeros(length, 7),
        "sim_states": torch.arange(length + 1, dtype=torch.float64)[:, None] + 100 * seed,
    })  # fmt: skip


class TestStartStates:
    def test_lie_the_wanted_number_of_steps_before_the_end(self):
        starts = StartStates([demonstration(2, 30, seed=1), demonstration(2, 6, seed=2)], steps_before_end=[4, 10])
        assert starts.states[2].squeeze(-1).tolist() == [126, 120, 202, 200]
        assert starts.env_seeds[2].tolist() == [1, 1, 2, 2]

    def test_a_draw_keeps_state_and_seed_together(self):
        starts = StartStates([demonstration(0, 9, seed=seed) for seed in range(5)], steps_before_end=[1, 2])
        generator = torch.Generator().manual_seed(0)
        rows = set()
        for _ in range(100):
            init, seed = starts.draw(0, generator)
            assert int(starts.states[0][init - PLAIN_INIT_STATES]) // 100 == seed
            rows.add(init)
        assert rows == set(range(PLAIN_INIT_STATES, PLAIN_INIT_STATES + 10))

    def test_failures_are_passed_over(self):
        starts = StartStates([demonstration(1, 5, success=False)], steps_before_end=[1])
        with pytest.raises(KeyError, match="task 1"):
            starts.draw(1, torch.Generator())

    def test_needs_states(self):
        with pytest.raises(KeyError, match="sim_states"):
            StartStates([demonstration(1, 5).exclude("sim_states")], steps_before_end=[1])

    @pytest.mark.parametrize("steps", [[], [0]])
    def test_bad_distances(self, steps):
        with pytest.raises(ValueError, match="steps_before_end"):
            StartStates([], steps_before_end=steps)
