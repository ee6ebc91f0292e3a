from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from wamrl_torchrl import schema
from wamrl_torchrl.modules.fastwam.context import ContextBank

INSTRUCTIONS = ["open the drawer", "put the red bowl on the plate", "put the plate on the red bowl", "Open  the drawer"]
# First four entries of the three words of task 0.
GOLDEN = [[1.3525, -0.7674, -2.2319, -1.1357], [0.4053, 1.6255, -0.5128, -0.7849], [0.0973, 0.4018, -0.1799, -0.2729]]


@pytest.fixture(scope="module")
def bank() -> ContextBank:
    return ContextBank.hashed(INSTRUCTIONS, length=8, text_dim=64)


class TestHashed:
    def test_shape_and_padding(self, bank):
        assert bank.num_tasks == 4
        assert bank.contexts.shape == (4, 8, 64)
        assert bank.contexts.dtype == torch.float32
        used = (bank.contexts != 0).any(-1).sum(-1)
        assert used.tolist() == [3, 7, 7, 3]

    def test_case_and_spaces_do_not_matter(self, bank):
        assert torch.equal(bank.contexts[0], bank.contexts[3])

    def test_entries_have_unit_variance(self):
        words = " ".join(f"word{i}" for i in range(100))
        contexts = ContextBank.hashed([words], length=100, text_dim=512).contexts
        assert contexts.std() == pytest.approx(1, abs=0.02)
        assert contexts.mean() == pytest.approx(0, abs=0.02)

    def test_word_order_matters_to_attention_that_sees_a_set(self, bank):
        first, second = bank.contexts[1, :7], bank.contexts[2, :7]
        # No vector of one is a vector of the other where word and position are not both the same.
        equal = (first[:, None] == second[None]).all(-1)
        assert equal.nonzero().tolist() == [[0, 0], [1, 1]]
        assert (first.sum(0) - second.sum(0)).abs().max() < 1e-4  # the same bag of words and positions

    def test_same_word_and_position_share_their_vector(self, bank):
        assert torch.equal(bank.contexts[1, :2], bank.contexts[2, :2])
        assert torch.equal(bank.contexts[0, 1], ContextBank.hashed(["on the"], length=2, text_dim=64).contexts[0, 1])

    def test_golden(self, bank):
        expected = torch.tensor(GOLDEN)
        torch.testing.assert_close(bank.contexts[0, :3, :4], expected, atol=1e-4, rtol=0)

    def test_stable_across_processes(self, bank):
        """Python salts ``hash()`` per process; contexts must not depend on it."""
        code = (
            "from wamrl_torchrl.modules.fastwam.context import ContextBank; import sys; "
            f"c = ContextBank.hashed({INSTRUCTIONS!r}, length=8, text_dim=64).contexts; "
            "sys.stdout.write(c.numpy().tobytes().hex())"
        )
        run = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": "7"},
        )
        assert run.stdout == bank.contexts.numpy().tobytes().hex()

    @pytest.mark.parametrize(
        ("instruction", "message"), [("one two three", "3 words.*length=2"), ("  ", "task 1 has 0 words")]
    )
    def test_bad_instruction(self, instruction, message):
        with pytest.raises(ValueError, match=message):
            ContextBank.hashed(["fine", instruction], length=2, text_dim=8)

    @pytest.mark.libero
    def test_all_libero_instructions_are_apart(self):
        from libero.libero import benchmark

        suites = benchmark.get_benchmark_dict()
        names = set()
        for suite in ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90"):
            tasks = suites[suite]()
            names |= {tasks.get_task(i).language for i in range(tasks.get_num_tasks())}
        assert len(names) == 112  # 130 tasks; some scenes of libero_90 share an instruction
        contexts = ContextBank.hashed(sorted(names), length=24, text_dim=32).contexts.flatten(1)
        distance = torch.cdist(contexts, contexts, compute_mode="donot_use_mm_for_euclid_dist")
        distance.fill_diagonal_(torch.inf)
        # One differing word is sqrt(text_dim) away on average.
        assert distance.min() > 3


class TestLookup:
    @pytest.mark.parametrize("shape", [(3,), (3, 1)])
    def test_by_id(self, bank, shape):
        found = bank(torch.tensor([2, 0, 2]).reshape(shape))
        assert torch.equal(found, bank.contexts[[2, 0, 2]])

    def test_parked_slot_has_a_zero_context(self, bank):
        found = bank(torch.tensor([[1], [schema.PARKED]]))
        assert torch.equal(found[0], bank.contexts[1])
        assert not found[1].any()
        assert bank.contexts[0].any()

    def test_moves_and_is_saved_with_its_owner(self, bank):
        other = ContextBank(torch.zeros_like(bank.contexts))
        other.load_state_dict(bank.state_dict())
        assert torch.equal(other(torch.tensor([1])), bank(torch.tensor([1])))
        assert ContextBank(bank.contexts).bfloat16()(torch.tensor([1])).dtype == torch.bfloat16

    @pytest.mark.parametrize("task_id", [4, 100, -2])
    def test_unknown_id(self, bank, task_id):
        with pytest.raises(KeyError, match=rf"\[{task_id}\].*4 tasks"):
            bank(torch.tensor([0, task_id]))

    @pytest.mark.parametrize("task_id", [torch.zeros(2), torch.zeros(2, 2, dtype=torch.int64), torch.tensor(0)])
    def test_bad_ids(self, bank, task_id):
        with pytest.raises(ValueError, match="task_id must be int64"):
            bank(task_id)

    @pytest.mark.parametrize("contexts", [torch.zeros(2, 3), torch.zeros(0, 2, 3), torch.zeros(1, 2, 3).long()])
    def test_bad_contexts(self, contexts):
        with pytest.raises(ValueError, match="num_tasks, L, text_dim"):
            ContextBank(contexts)
