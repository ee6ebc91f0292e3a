from __future__ import annotations

import math

import pytest
import torch
from rich.console import Console

from tests.conftest import make_policy, make_record
from tests.test_train import load, scalars, tensors
from wamrl_torchrl import schema
from wamrl_torchrl.learner import fill_batch, is_half, parity, recompute_log_probs
from wamrl_torchrl.modules.checkpoint import load_policy, save_policy
from wamrl_torchrl.objectives import FlowPPOLoss
from wamrl_torchrl.train import train


class TestParity:
    def test_of_a_rollout_under_its_own_weights(self):
        policy = make_policy()
        found = parity(policy, make_record(policy, 6))
        assert found.gap == found.kl == 0

    def test_measures_what_was_changed(self):
        policy = make_policy()
        record = make_record(policy, 6)
        record[schema.LOG_PROB] -= 0.25  # the learner's are higher by that
        found = parity(policy, record)
        assert found.gap == pytest.approx(0.25, abs=1e-5)
        assert found.kl == pytest.approx(math.exp(0.25) - 1 - 0.25, abs=1e-5)

    def test_another_version_is_refused(self):
        policy = make_policy()
        record = make_record(policy, 3)
        policy.version += 1
        with pytest.raises(RuntimeError, match=r"versions \[0\], the learner has \[1\]"):
            parity(policy, record)


class TestRecompute:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_gives_the_learners_own(self, dtype):
        policy = make_policy().to(dtype)
        record = make_record(policy, 7)
        expected = record[schema.LOG_PROB_ROWS].clone()
        record[schema.LOG_PROB_ROWS] += 1
        record[schema.LOG_PROB] += 1
        recompute_log_probs(policy, record, batch_size=3)
        tolerance = 1e-4 if dtype == torch.float32 else 0.3
        torch.testing.assert_close(record[schema.LOG_PROB_ROWS], expected, rtol=0, atol=tolerance)
        torch.testing.assert_close(record[schema.LOG_PROB], record[schema.LOG_PROB_ROWS][..., :8].sum(-1))

    def test_every_row_is_computed_in_a_whole_batch(self, monkeypatch):
        policy, sizes = make_policy(), []
        record, own = make_record(policy, 7), policy.log_prob_rows
        monkeypatch.setattr(policy, "log_prob_rows", lambda part: sizes.append(len(part)) or own(part))
        recompute_log_probs(policy, record, batch_size=3)
        assert sizes == [3, 3, 3]

    def test_ratios_start_at_one_in_half_precision(self):
        policy = make_policy().to(torch.bfloat16)
        record = make_record(policy, 6)
        recompute_log_probs(policy, record, batch_size=4)
        out = FlowPPOLoss(policy)(record[:4])
        assert float(out["max_ratio"].detach()) == 1.0
        out = FlowPPOLoss(policy)(fill_batch(record[4:], 4))
        assert float(out["max_ratio"].detach()) == 1.0


class TestFillBatch:
    def test_repeated_rows_have_no_weight(self):
        losses, gradients = [], []
        for size in (3, 8):
            policy = make_policy()
            batch = make_record(policy, 3)
            batch[schema.LOG_PROB_ROWS] += 0.01
            batch = fill_batch(batch, size)
            assert len(batch) == size
            loss = FlowPPOLoss(policy)(batch)["loss_objective"]
            loss.backward()
            losses.append(loss.detach())
            gradients.append(policy.model.mot.action.head.weight.grad)
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*gradients)

    def test_a_whole_batch_is_left_alone(self):
        batch = make_record(make_policy(), 4)
        filled = fill_batch(batch, 4)
        assert torch.equal(filled["next", schema.EXECUTED_MASK], batch["next", schema.EXECUTED_MASK])
        assert torch.equal(filled[schema.CHAIN], batch[schema.CHAIN])


def test_a_run_in_bfloat16(tmp_path):
    """Weights stay in bf16, adapters in fp32, and rollout and learner agree up to rounding."""
    console = Console(quiet=True)
    train(load(tmp_path / "fp32", "algo.iterations=1", "algo.mode=actor_only"), console)
    policy = load_policy(tmp_path / "fp32" / "start").to(torch.bfloat16)
    assert is_half(policy)
    save_policy(policy, tmp_path / "half")
    options = (f"model.policy={tmp_path / 'half'}", "algo.curriculum.fraction=0", "model.actor.kind=lora")
    train(load(tmp_path / "run", *options, "model.actor.rank=4", "algo.iterations=1"), console)
    assert 1 in scalars(tmp_path / "run", "rollout/parity_kl")
    end = tensors(tmp_path / "run" / "policy")
    assert {value.dtype for name, value in end.items() if "lora_" in name} == {torch.float32}
    assert end["model.mot.mixtures.video.patch_embedding.weight"].dtype == torch.bfloat16
