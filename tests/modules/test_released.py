from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import IMAGE_SIZE, make_model, make_states
from wamrl_torchrl.modules.fastwam.codec import TinyCodec
from wamrl_torchrl.modules.fastwam.config import preset
from wamrl_torchrl.modules.fastwam.context import ContextBank
from wamrl_torchrl.modules.fastwam.model import draw_flow_noise
from wamrl_torchrl.modules.fastwam.released import load_checkpoint, read_checkpoint, save_released

CONFIG = preset("tiny", image_size=IMAGE_SIZE)
UNCOND = "libero_uncond_2cam224.pt"
OPTIONAL_IDM = "libero_optional_idm_2cam224.pt"


def bank() -> ContextBank:
    return ContextBank.hashed(["red block", "blue block", "plate"], length=CONFIG.context_length, text_dim=32)


def load(path, config=CONFIG, **options):
    return load_checkpoint(path, config, TinyCodec(), bank(), **options)


def payload(model, **extra) -> dict:
    """A checkpoint as the released code writes it: no field but the four."""
    fields = {"mot": model.mot.state_dict(), "proprio_encoder": model.proprio_encoder.state_dict()}
    return {**fields, "step": 21000, "torch_dtype": "torch.float32", **extra}


def older_lerobot(model) -> dict:
    """The names of the first LeRobot files."""
    return {f"model.{name}": value for name, value in model.state_dict().items() if "contexts" not in name}


@pytest.fixture
def written(tmp_path):
    torch.save(payload(make_model(seed=3)), tmp_path / OPTIONAL_IDM)
    return tmp_path / OPTIONAL_IDM


def train_one_step(model) -> None:
    states = make_states(3)
    latents = torch.randn(3, 48, 3, 4, 8, generator=torch.Generator().manual_seed(1))
    actions = torch.rand(3, 32, 7, generator=torch.Generator().manual_seed(2)) * 2 - 1
    generator = torch.Generator().manual_seed(3)
    flows = {
        "video_flow": draw_flow_noise(latents, 5.0, generator),
        "action_flow": draw_flow_noise(actions, 1.0, generator),
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.training_loss(latents.to(model.dtype), model.context(states), actions, **flows)[0].backward()
    optimizer.step()


class TestRoundTrip:
    def test_loads_trains_saves_and_loads_bit_for_bit(self, written, tmp_path):
        model = load(written)
        original = make_model(seed=3).mot.state_dict()
        assert all(torch.equal(value, original[name]) for name, value in model.mot.state_dict().items())
        train_one_step(model)
        assert any(not torch.equal(value, original[name]) for name, value in model.mot.state_dict().items())
        again = load(save_released(model, tmp_path / "mine.pt", step=7))
        assert list(again.state_dict()) == list(model.state_dict())
        assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
        assert read_checkpoint(tmp_path / "mine.pt").step == 7

    def test_what_is_saved_loads_strictly_under_the_released_names(self, tmp_path):
        model = make_model(seed=4)
        raw = torch.load(save_released(model, tmp_path / "mine.pt"), weights_only=True)
        fresh = make_model(seed=5)
        fresh.mot.load_state_dict(raw["mot"], strict=True)
        fresh.proprio_encoder.load_state_dict(raw["proprio_encoder"], strict=True)
        assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in model.state_dict().items())
        assert raw["torch_dtype"] == "torch.float32"
        assert list(raw)[:4] == ["mot", "proprio_encoder", "step", "torch_dtype"]

    def test_bfloat16_is_kept_or_cast(self, tmp_path):
        path = save_released(make_model(seed=3).to(torch.bfloat16), tmp_path / "b.pt")
        assert {p.dtype for p in load(path).parameters()} == {torch.bfloat16}
        cast = load(path, dtype=torch.float32)
        assert {p.dtype for p in cast.parameters()} == {torch.float32}
        assert cast.mot.video.rope_table.cos.dtype == load(path).mot.video.rope_table.cos.dtype == torch.float32

    def test_the_file_may_go_after_loading(self, written):
        model = load(written)
        written.write_bytes(b"gone")  # in place: a map of the file would read this
        original = make_model(seed=3).mot.state_dict()
        assert all(torch.equal(value, original[name]) for name, value in model.mot.state_dict().items())

    def test_lerobot_names(self, written, tmp_path):
        model = make_model(seed=3)
        renamed = {}
        for name, value in model.state_dict().items():
            parts = name.split(".")
            if parts[0] == "mot" and parts[3] == "blocks":
                renamed[f"model.mot.layers.{parts[4]}.blocks.{parts[2]}.{'.'.join(parts[5:])}"] = value
            elif parts[0] in ("mot", "proprio_encoder"):
                renamed[f"model.{name}"] = value
        assert any(".layers.3.blocks.action.self_attn.norm_q" in name for name in renamed)
        save_file(renamed, tmp_path / "model.safetensors")
        for path in (tmp_path, tmp_path / "model.safetensors"):
            loaded = load(path).state_dict()
            assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())
        save_file(older_lerobot(model), tmp_path / "model.safetensors")
        loaded = load(tmp_path).state_dict()
        assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())


class TestActionShift:
    def test_known_files_tell_theirs(self, tmp_path):
        for name, shift, modes in ((UNCOND, 5.0, ("first_frame",)), (OPTIONAL_IDM, 1.0, ("first_frame", "idm"))):
            torch.save(payload(make_model()), tmp_path / name)
            recipe = read_checkpoint(tmp_path / name).recipe
            assert (recipe.action_shift, recipe.action_modes) == (shift, modes)

    def test_mismatch_is_refused(self, tmp_path):
        torch.save(payload(make_model()), tmp_path / UNCOND)
        with pytest.raises(ValueError, match=r"libero_uncond_2cam224.pt was trained with action_shift 5.0.*says 1.0"):
            load(tmp_path / UNCOND)
        assert load(tmp_path / UNCOND, replace(CONFIG, action_shift=5.0)).config.action_shift == 5.0

    def test_a_mode_it_was_not_trained_in_is_refused(self, tmp_path):
        torch.save(payload(make_model()), tmp_path / UNCOND)
        config = replace(CONFIG, action_shift=5.0, action_modes=("first_frame", "idm"))
        with pytest.raises(ValueError, match=r"not \['idm'\]"):
            load(tmp_path / UNCOND, config)

    def test_travels_with_what_we_save(self, tmp_path):
        model = make_model()
        model.config = replace(CONFIG, action_shift=2.5, action_modes=("idm",))
        path = save_released(model, tmp_path / "renamed.pt")
        recipe = read_checkpoint(path).recipe
        assert (recipe.action_shift, recipe.action_modes) == (2.5, ("idm",))
        with pytest.raises(ValueError, match=r"action_shift 2.5"):
            load(path)

    def test_lerobot_config_tells(self, tmp_path):
        save_file(older_lerobot(make_model()), tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(
            json.dumps({"action_scheduler": {"train_shift": 5.0, "infer_shift": 5.0}})
        )
        with pytest.raises(ValueError, match=r"action_shift 5.0"):
            load(tmp_path)
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ValueError, match=r"action_scheduler.train_shift"):
            load(tmp_path)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"sigma_shift": 1.0}, r"train_shift is 5.0, but .*\[None, 1.0\]"),
            ({"normalization_mapping": {"STATE": "MEAN_STD", "ACTION": "MIN_MAX"}}, "'STATE': 'MEAN_STD'"),
            ({"use_relative_actions": True}, "use_relative_actions"),
        ],
    )
    def test_a_lerobot_policy_that_acts_otherwise_is_refused(self, tmp_path, change, message):
        save_file(older_lerobot(make_model()), tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"action_scheduler": {"train_shift": 5.0}, **change}))
        with pytest.raises(ValueError, match=message):
            read_checkpoint(tmp_path)

    def test_unknown_files_tell_nothing(self, tmp_path):
        torch.save(payload(make_model()), tmp_path / "other.pt")
        assert read_checkpoint(tmp_path / "other.pt").recipe is None


class Unsafe:
    def __reduce__(self):
        return print, ("code was run",)


class TestRefused:
    def test_tensors_that_do_not_fit_are_named_as_in_the_model(self, tmp_path):
        content = payload(make_model())
        content["mot"] = {**content["mot"], "mixtures.action.blocks.2.ffn.0.weight": torch.zeros(3, 5)}
        content["proprio_encoder"] = {"weight": content["proprio_encoder"]["weight"], "surplus": torch.zeros(1)}
        torch.save(content, tmp_path / "bad.pt")
        problems = (
            "proprio_encoder.bias is missing; proprio_encoder.surplus is unexpected; "
            r"mot.mixtures.action.blocks.2.ffn.0.weight has shape \(3, 5\), expected \(192, 64\)$"
        )
        with pytest.raises(ValueError, match=f"bad.pt does not fit the model: {problems}"):
            load(tmp_path / "bad.pt")

    def test_missing_and_unknown_fields(self, tmp_path):
        content = payload(make_model(), optimizer={})
        del content["proprio_encoder"]
        torch.save(content, tmp_path / "bad.pt")
        with pytest.raises(ValueError, match=r"lacks \['proprio_encoder'\] and has unknown \['optimizer'\]"):
            load(tmp_path / "bad.pt")
        torch.save(payload(make_model(), mot=[1]), tmp_path / "bad.pt")
        with pytest.raises(ValueError, match="'mot' must hold tensors by name, found list"):
            load(tmp_path / "bad.pt")
        torch.save([1], tmp_path / "bad.pt")
        with pytest.raises(ValueError, match="must hold a dict, found list"):
            load(tmp_path / "bad.pt")

    def test_code_is_not_run(self, tmp_path, capsys):
        torch.save(payload(make_model(), step=Unsafe()), tmp_path / "bad.pt")
        with pytest.raises(ValueError, match=r"bad.pt.*would run code"):
            load(tmp_path / "bad.pt")
        assert "code was run" not in capsys.readouterr().out

    def test_foreign_safetensors(self, tmp_path):
        save_file({"encoder.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=r"must start with 'model.', found 'encoder.weight'"):
            load(tmp_path)

    def test_no_file(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"nothing.pt"):
            load(tmp_path / "nothing.pt")

    def test_a_failed_save_leaves_the_old_file(self, tmp_path, monkeypatch):
        path = save_released(make_model(seed=1), tmp_path / "mine.pt")
        before = path.read_bytes()

        def fail(*_):
            raise OSError("disk full")

        monkeypatch.setattr(torch, "save", fail)
        with pytest.raises(OSError, match="disk full"):
            save_released(make_model(seed=2), path)
        assert path.read_bytes() == before
        assert [file.name for file in tmp_path.iterdir()] == ["mine.pt"]
