from __future__ import annotations

import json

import pytest
import torch

from tests.conftest import make_policy, make_states
from wamrl_torchrl.modules.checkpoint import CONFIG_FILE, TENSOR_FILE, load_policy, save_policy
from wamrl_torchrl.modules.lora import VideoLoRA, add_video_lora
from wamrl_torchrl.modules.trainable import video_parameters


@pytest.fixture
def saved(tmp_path):
    return save_policy(make_policy(seed=3), tmp_path / "policy")


class TestRoundTrip:
    @pytest.mark.parametrize("lora", [None, VideoLoRA(rank=3, alpha=6, projections=("q", "o"))])
    def test_acts_bit_for_bit_as_before(self, tmp_path, lora):
        policy = make_policy(seed=3, stochastic_steps=2, window=(0, 3))
        if lora is not None:
            add_video_lora(policy.model, lora)
            with torch.no_grad():
                for parameter in video_parameters(policy.model):
                    parameter.normal_()
        policy.version += 5
        again = load_policy(save_policy(policy, tmp_path / "p"))
        assert again.sde == policy.sde
        assert again.model.lora == lora
        before, after = policy(make_states(3)), again(make_states(3))
        assert all(torch.equal(before[key], after[key]) for key in policy.out_keys)

    def test_saving_again_replaces(self, saved):
        other = make_policy(seed=4)
        save_policy(other, saved)
        assert torch.equal(load_policy(saved)(make_states(2))["chain"], other(make_states(2))["chain"])
        assert sorted(path.name for path in saved.iterdir()) == [CONFIG_FILE, TENSOR_FILE]


class TestBadFiles:
    def test_no_policy_there(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"config.json is missing"):
            load_policy(tmp_path)

    def test_other_format(self, saved):
        config = json.loads((saved / CONFIG_FILE).read_text()) | {"format": 99}
        (saved / CONFIG_FILE).write_text(json.dumps(config))
        with pytest.raises(ValueError, match="format 99"):
            load_policy(saved)

    def test_another_size_names_a_tensor(self, saved):
        config = json.loads((saved / CONFIG_FILE).read_text())
        config["model"]["action"]["hidden_dim"] = 48
        (saved / CONFIG_FILE).write_text(json.dumps(config))
        with pytest.raises(ValueError, match=r"mixtures.action.*has shape \(64, 32\), expected \(48, 32\)"):
            load_policy(saved)

    def test_damaged_file(self, saved):
        (saved / TENSOR_FILE).write_bytes(b"no tensors")
        with pytest.raises(ValueError, match=TENSOR_FILE):
            load_policy(saved)
