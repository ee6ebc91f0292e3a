from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.conftest import make_model, make_states, randomize_adapters
from wamrl_torchrl.modules import adapter_files
from wamrl_torchrl.modules.adapter_files import load_adapters, save_adapters
from wamrl_torchrl.modules.lora import VideoLoRA, add_video_lora
from wamrl_torchrl.modules.trainable import ActorTraining, set_actor_training, video_parameters

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
EVERYWHERE = VideoLoRA(rank=3, alpha=5, cross_attention=True, ffn=True)
SOME = VideoLoRA(rank=2, projections=("q", "o"), ffn=True, blocks=(1, 3))
ACTOR_LORA = ActorTraining(kind="lora", rank=2, projections=("k", "v"), cross_attention=True)


def adapted_model(lora=EVERYWHERE):
    model = add_video_lora(make_model(), lora)
    randomize_adapters(model)
    return model


def actor_model():
    model = set_actor_training(make_model(), ACTOR_LORA)
    randomize_adapters(model)
    return model


@torch.no_grad()
def velocity(model, expert: str = "video"):
    """Velocity of an expert at fixed noise."""
    states, generator = make_states(3), torch.Generator().manual_seed(2)
    time = torch.tensor([100.0, 500.0, 900.0])
    if expert == "action":
        actions = torch.randn(3, *model.chunk_shape, generator=generator)
        return model.action_velocity(actions, time / 1000, model.condition(states))
    future = torch.randn(3, 48, 2, 4, 8, generator=generator)
    text = model.mot.video.text_cache(model.context(states))
    return model.mot.video_velocity(future, time, text, model.mot.first_frame_cache(model.encode_image(states), text))


@pytest.fixture
def saved(tmp_path) -> Path:
    return save_adapters(adapted_model(), tmp_path / "adapters")


def edit_config(directory: Path, **fields) -> None:
    path = directory / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


class TestRoundTrip:
    @pytest.mark.parametrize("lora", [VideoLoRA(rank=4), EVERYWHERE, SOME])
    @pytest.mark.parametrize("there", [False, True])
    def test_video(self, tmp_path, lora, there):
        model = adapted_model(lora)
        fresh = add_video_lora(make_model(), lora) if there else make_model()
        assert not torch.equal(velocity(fresh), velocity(model))
        assert load_adapters(fresh, save_adapters(model, tmp_path / "new" / "adapters")) is fresh
        assert torch.equal(velocity(fresh), velocity(model))
        assert fresh.lora == lora
        assert {n for n, p in fresh.named_parameters() if p.requires_grad} == {
            n for n, p in model.named_parameters() if p.requires_grad
        }

    def test_action(self, tmp_path):
        model = actor_model()
        fresh = load_adapters(make_model(), save_adapters(model, tmp_path, expert="action"), expert="action")
        assert torch.equal(velocity(fresh, "action"), velocity(model, "action"))
        assert not torch.equal(velocity(fresh, "action"), velocity(make_model(), "action"))
        assert fresh.actor_training == ACTOR_LORA
        assert fresh.lora is None

    def test_both_experts_beside_each_other(self, tmp_path):
        model = set_actor_training(add_video_lora(make_model(), SOME), ACTOR_LORA)
        randomize_adapters(model)
        save_adapters(model, tmp_path / "video")
        save_adapters(model, tmp_path / "action", expert="action")
        fresh = load_adapters(make_model(), tmp_path / "action", expert="action")
        load_adapters(fresh, tmp_path / "video")
        for expert in ("video", "action"):
            assert torch.equal(velocity(fresh, expert), velocity(model, expert))

    def test_half_precision(self, tmp_path):
        model = add_video_lora(make_model().bfloat16(), SOME)
        randomize_adapters(model)
        fresh = load_adapters(make_model().bfloat16(), save_adapters(model, tmp_path))
        pairs = zip(video_parameters(fresh), video_parameters(model), strict=True)
        assert all(a.dtype == torch.float32 and torch.equal(a, b) for a, b in pairs)

    def test_spelled_out_defaults_are_the_same_adapters(self, tmp_path):
        lora = VideoLoRA(rank=2, alpha=2, blocks=(0, 4))
        model = adapted_model(lora)
        fresh = load_adapters(add_video_lora(make_model(), lora), save_adapters(model, tmp_path))
        assert fresh.lora == lora
        assert torch.equal(velocity(fresh), velocity(model))


class TestStockPeft:
    @pytest.mark.parametrize("lora", [VideoLoRA(rank=4), EVERYWHERE, SOME])
    def test_reads_our_video_adapters(self, tmp_path, lora):
        model, fresh = adapted_model(lora), make_model()
        wrapped = PeftModel.from_pretrained(fresh.mot.video, str(save_adapters(model, tmp_path)))
        assert torch.equal(velocity(fresh), velocity(model))
        assert wrapped.peft_config["default"].r == lora.rank

    def test_reads_our_actor_adapters(self, tmp_path):
        model, fresh = actor_model(), make_model()
        PeftModel.from_pretrained(fresh.mot.action, str(save_adapters(model, tmp_path, expert="action")))
        assert torch.equal(velocity(fresh, "action"), velocity(model, "action"))

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            (
                {"r": 3, "lora_alpha": 6, "target_modules": ["q", "v"], "lora_dropout": 0.1},
                VideoLoRA(rank=3, alpha=6, projections=("q", "v"), cross_attention=True),
            ),
            (
                {"r": 2, "lora_alpha": 2, "target_modules": ["self_attn.q", "ffn.0", "ffn.2"]},
                VideoLoRA(rank=2, projections=("q",), ffn=True),
            ),
            (
                {
                    "r": 2,
                    "lora_alpha": 4,
                    "target_modules": ["k", "o"],
                    "exclude_modules": r".*cross_attn.*",
                    "layers_to_transform": [1, 2],
                    "layers_pattern": "blocks",
                    "init_lora_weights": "gaussian",
                },
                VideoLoRA(rank=2, alpha=4, projections=("k", "o"), blocks=(1, 3)),
            ),
        ],
    )
    def test_we_read_what_it_writes(self, tmp_path, options, expected):
        theirs = make_model()
        wrapped = get_peft_model(theirs.mot.video, LoraConfig(**options))
        randomize_adapters(wrapped)
        wrapped.save_pretrained(str(tmp_path))
        wrapped.eval()
        ours = load_adapters(make_model(), tmp_path)
        assert ours.lora == expected
        assert torch.equal(velocity(ours), velocity(theirs))

    def test_names_in_the_file(self, tmp_path):
        directory = save_adapters(adapted_model(VideoLoRA(rank=2, projections=("k",), blocks=(3, 4))), tmp_path)
        assert set(load_file(directory / TENSORS)) == {
            f"base_model.model.blocks.3.self_attn.k.lora_{factor}.weight" for factor in "AB"
        }
        with safe_open(directory / TENSORS, "pt") as file:
            assert file.metadata() == {"format": "pt"}


class TestWriting:
    def test_saving_again_replaces_and_leaves_other_files(self, saved):
        (saved / "README.md").write_text("a card")
        model = adapted_model(SOME)
        save_adapters(model, saved)
        assert torch.equal(velocity(load_adapters(make_model(), saved)), velocity(model))
        assert sorted(path.name for path in saved.iterdir()) == ["README.md", CONFIG, TENSORS]

    def test_a_failure_while_writing_leaves_the_old_ones(self, saved, monkeypatch):
        before = {path.name: path.read_bytes() for path in saved.iterdir()}

        def fail(*args, **options):
            raise OSError("disk full")

        monkeypatch.setattr(adapter_files, "save_file", fail)
        with pytest.raises(OSError, match="disk full"):
            save_adapters(adapted_model(SOME), saved)
        assert {path.name: path.read_bytes() for path in saved.iterdir()} == before

    @pytest.fixture
    def stopped(self, saved, monkeypatch):
        """Save over ``saved`` and be stopped before the second file is in its place."""
        replace = Path.replace

        def stop(path, target):
            if path.name == CONFIG:
                raise KeyboardInterrupt
            return replace(path, target)

        def save(model):
            monkeypatch.setattr(Path, "replace", stop)
            with pytest.raises(KeyboardInterrupt):
                save_adapters(model, saved)

        return save

    def test_a_stop_between_the_files_never_leaves_a_mixture(self, saved, stopped):
        """The scale is in the one file and the tensors in the other; their shapes would not tell."""
        stopped(adapted_model(VideoLoRA(rank=3, alpha=9, cross_attention=True, ffn=True)))
        with pytest.raises(FileNotFoundError, match=CONFIG):
            load_adapters(make_model(), saved)

    def test_a_stop_between_the_files_of_equal_adapters_leaves_whole_ones(self, saved, stopped):
        model = adapted_model()
        with torch.no_grad():
            video_parameters(model)[0].add_(1)
        stopped(model)
        assert torch.equal(velocity(load_adapters(make_model(), saved)), velocity(model))

    @pytest.mark.parametrize(("expert", "message"), [("video", "add_video_lora"), ("action", "kind 'lora'")])
    def test_nothing_to_save(self, tmp_path, expert, message):
        with pytest.raises(ValueError, match=rf"the {expert} expert has no adapters to save; .*{message}"):
            save_adapters(set_actor_training(make_model(), ActorTraining()), tmp_path / "a", expert=expert)
        assert not (tmp_path / "a").exists()

    def test_unknown_expert(self, tmp_path, saved):
        with pytest.raises(ValueError, match=r"one of \['action', 'video'\], got 'text'"):
            save_adapters(adapted_model(), tmp_path, expert="text")
        with pytest.raises(ValueError, match="got 'text'"):
            load_adapters(make_model(), saved, expert="text")


class TestRefusals:
    @pytest.fixture
    def refused(self, saved):
        """Check that loading ``saved`` fails and leaves the model as it was."""

        def check(error, match, *, model=None, expert="video"):
            model = make_model() if model is None else model
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            flags = [parameter.requires_grad for parameter in model.parameters()]
            lora = model.lora
            with pytest.raises(error, match=match):
                load_adapters(model, saved, expert=expert)
            after = model.state_dict()
            assert list(after) == list(before)
            assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
            assert [parameter.requires_grad for parameter in model.parameters()] == flags
            assert model.lora == lora

        return check

    @pytest.mark.parametrize("name", [CONFIG, TENSORS])
    def test_a_missing_file(self, saved, refused, name):
        (saved / name).unlink()
        refused(FileNotFoundError, f"{name} is missing")

    @pytest.mark.parametrize("name", [CONFIG, TENSORS])
    def test_a_damaged_file(self, saved, refused, name):
        (saved / name).write_bytes(b"[1]")
        refused(ValueError, f"cannot read .*{name}")

    def test_tensors_that_do_not_fit(self, saved, refused):
        tensors = load_file(saved / TENSORS)
        block = "base_model.model.blocks.2.ffn.0"
        del tensors[f"{block}.lora_A.weight"]
        tensors |= {f"{block}.lora_B.weight": torch.zeros(191, 3), f"{block}.lora_B.bias": torch.zeros(3)}
        save_file(tensors, saved / TENSORS)
        problems = (
            f"{block}.lora_A.weight is missing; {block}.lora_B.bias is unexpected; "
            rf"{block}.lora_B.weight has shape \(191, 3\), expected \(192, 3\)$"
        )
        refused(ValueError, f"{TENSORS} does not fit the VideoExpert: {problems}")

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"use_dora": True}, "use_dora=True"),
            ({"use_rslora": True}, "use_rslora=True"),
            ({"rank_pattern": {"q": 2}}, "rank_pattern="),
            ({"bias": "all"}, "bias='all'"),
            ({"modules_to_save": ["head"]}, "modules_to_save="),
            ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ],
    )
    def test_more_than_plain_lora(self, saved, refused, fields, message):
        edit_config(saved, **fields)
        refused(ValueError, f"{CONFIG} describes more than plain LoRA.*{message}")

    def test_another_method(self, saved, refused):
        IA3Config(target_modules=["k"], feedforward_modules=[]).save_pretrained(str(saved))
        refused(ValueError, "IA3")

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"target_modules": ["q", "text_embedding.0"]}, "text_embedding.0"),
            ({"target_modules": ["cross_attn.q"]}, "blocks.0.self_attn.q"),
            ({"target_modules": ["self_attn.q", "ffn.0"]}, "blocks.0.ffn.2"),
            (
                {"target_modules": ["self_attn.q"], "layers_to_transform": [0, 2], "layers_pattern": "blocks"},
                "blocks.1.self_attn.q",
            ),
            ({"target_modules": ["to_q"]}, "no layer in the blocks of VideoExpert"),
        ],
    )
    def test_layers_that_cannot_be_chosen(self, saved, refused, fields, message):
        edit_config(saved, **fields)
        refused(ValueError, message)

    def test_the_other_experts(self, refused):
        refused(ValueError, "adapters of VideoExpert, not of ActionExpert", expert="action")

    def test_other_adapters_are_there(self, refused):
        refused(ValueError, "has other adapters already", model=adapted_model(SOME))

    def test_the_actor_trains_otherwise(self, saved, refused):
        save_adapters(actor_model(), saved, expert="action")
        model = set_actor_training(make_model(), ActorTraining(kind="last_blocks", num_blocks=2))
        refused(ValueError, "trained otherwise already", model=model, expert="action")
