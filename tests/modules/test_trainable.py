from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from tests.conftest import (
    make_model,
    make_policy,
    make_record,
    make_states,
    make_stats,
    make_windows,
    randomize_adapters,
)
from wamrl_torchrl.modules.lora import VideoLoRA, add_video_lora
from wamrl_torchrl.modules.trainable import ActorTraining, actor_parameters, set_actor_training, video_parameters
from wamrl_torchrl.objectives import ActionSFTLoss, FeatureKLLoss, VideoSFTLoss

# Written out from the layout of the released checkpoints: 27 tensors a block, and the action expert's others.
ATTENTION = [f"{name}.{kind}" for name in ("q", "k", "v", "o") for kind in ("weight", "bias")]
ATTENTION += ["norm_q.weight", "norm_k.weight"]
BLOCK = ["modulation", "norm3.weight", "norm3.bias", "ffn.0.weight", "ffn.0.bias", "ffn.2.weight", "ffn.2.bias"]
BLOCK += [f"{attention}.{name}" for attention in ("self_attn", "cross_attn") for name in ATTENTION]
LINEARS = ["action_encoder", "text_embedding.0", "text_embedding.2", "time_embedding.0", "time_embedding.2"]
LINEARS += ["time_projection.1", "head"]
ACTION = "mot.mixtures.action."
VIDEO = "mot.mixtures.video."
QKVO = ["self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o"]
CROSS = ["cross_attn.q", "cross_attn.k", "cross_attn.v", "cross_attn.o"]
FFN = ["ffn.0", "ffn.2"]


def blocks(*indices: int) -> set[str]:
    return {f"{ACTION}blocks.{index}.{name}" for index in indices for name in BLOCK}


def linears(*names: str) -> set[str]:
    return {f"{ACTION}{name}.{kind}" for name in names for kind in ("weight", "bias")}


def adapters(prefix: str, indices, parts) -> set[str]:
    return {
        f"{prefix}blocks.{index}.{part}.lora_{factor}.default.weight"
        for index in indices
        for part in parts
        for factor in "AB"
    }


FULL = blocks(0, 1, 2, 3) | linears(*LINEARS)
#: What each kind trains in the tiny model of four blocks.
KINDS = {
    "default": (None, FULL),
    "full": (ActorTraining(), FULL),
    "last_block": (ActorTraining(kind="last_blocks", num_blocks=1), blocks(3) | linears("head")),
    "last_blocks": (ActorTraining(kind="last_blocks", num_blocks=2), blocks(2, 3) | linears("head")),
    "lora": (ActorTraining(kind="lora", rank=2), adapters(ACTION, range(4), QKVO)),
    "lora_everywhere": (
        ActorTraining(kind="lora", rank=2, cross_attention=True, ffn=True),
        adapters(ACTION, range(4), QKVO + CROSS + FFN),
    ),
    "lora_some": (
        ActorTraining(kind="lora", rank=2, projections=("q",), ffn=True, blocks=(1, 3)),
        adapters(ACTION, (1, 2), ["self_attn.q", *FFN]),
    ),
}
EVERYWHERE = VideoLoRA(rank=2, cross_attention=True, ffn=True)


def setup(model, training: ActorTraining | None, lora: VideoLoRA | None = EVERYWHERE):
    if lora is not None:
        add_video_lora(model, lora)
    if training is not None:
        set_actor_training(model, training)
    randomize_adapters(model)
    return model


def touched(model) -> set[str]:
    """Names with a gradient; none of them may be zero throughout."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert all(gradient.any() for gradient in gradients.values())
    return set(gradients)


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "name"),
        [
            ({"kind": "some"}, "'some'"),
            ({"kind": "last_blocks"}, "num_blocks must be at least 1"),
            ({"kind": "full", "num_blocks": 2}, "num_blocks is for kind 'last_blocks' only"),
            ({"kind": "lora", "num_blocks": 2}, "num_blocks is for kind 'last_blocks' only"),
            ({"kind": "full", "rank": 4, "ffn": True}, "rank, ffn: for kind 'lora' only"),
            ({"kind": "last_blocks", "num_blocks": 1, "blocks": (0, 1)}, "blocks: for kind 'lora' only"),
            ({"kind": "lora", "rank": 0}, "rank must be"),
        ],
    )
    def test_bad_options(self, options, name):
        with pytest.raises(ValueError, match=name):
            ActorTraining(**options)

    @pytest.mark.parametrize("kind", sorted(set(KINDS) - {"default"}))
    def test_round_trip_through_json(self, kind):
        training = KINDS[kind][0]
        assert ActorTraining(**json.loads(json.dumps(asdict(training)))) == training


class TestSetActorTraining:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("first", ["video", "actor"])
    def test_trains_what_it_says_in_either_order(self, kind, first):
        training, expected = KINDS[kind]
        model = make_model()
        if first == "video":
            setup(model, training)
        else:
            setup(model, training, lora=None)
            add_video_lora(model, EVERYWHERE)
        trainable = {name for name, p in model.named_parameters() if p.requires_grad}
        assert trainable == expected | adapters(VIDEO, range(4), QKVO + CROSS + FFN)
        by_id = {id(p): name for name, p in model.named_parameters()}
        assert {by_id[id(p)] for p in actor_parameters(model)} == expected
        assert {by_id[id(p)] for p in video_parameters(model)} == trainable - expected
        assert model.actor_training == training

    def test_leaves_the_video_side_alone(self):
        model = set_actor_training(make_model(), ActorTraining(kind="lora", rank=2))
        outside = [p for name, p in model.named_parameters() if not name.startswith(ACTION)]
        assert outside
        assert all(p.requires_grad for p in outside)

    def test_the_same_once_more_changes_nothing(self):
        model = setup(make_model(), ActorTraining(kind="lora", rank=2), lora=None)
        before = {name: (p.clone(), p.requires_grad) for name, p in model.named_parameters()}
        set_actor_training(model, ActorTraining(kind="lora", rank=2))
        set_actor_training(model, ActorTraining(kind="lora", rank=2, alpha=2, blocks=(0, 4)))
        after = dict(model.named_parameters())
        assert list(after) == list(before)
        assert all(torch.equal(after[n], value) and after[n].requires_grad == g for n, (value, g) in before.items())

    @pytest.mark.parametrize("other", ["full", "last_block", "lora_everywhere"])
    def test_another_one_is_refused(self, other):
        model = setup(make_model(), ActorTraining(kind="lora", rank=2), lora=None)
        with pytest.raises(ValueError, match="otherwise already"):
            set_actor_training(model, KINDS[other][0])

    @pytest.mark.parametrize(
        ("training", "message"),
        [
            (ActorTraining(kind="last_blocks", num_blocks=5), "num_blocks is 5, the action expert has 4"),
            (ActorTraining(kind="lora", blocks=(2, 5)), "ends beyond the 4 blocks"),
        ],
    )
    def test_more_blocks_than_there_are(self, training, message):
        model = make_model()
        with pytest.raises(ValueError, match=message):
            set_actor_training(model, training)
        assert model.actor_training is None
        assert all(p.requires_grad for p in model.parameters())
        assert not any(".lora_" in name for name in model.state_dict())


class TestGradients:
    """Exactly the intended parameters get a gradient."""

    @pytest.mark.parametrize("lora", [EVERYWHERE, None], ids=["video_lora", "no_video_lora"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_actor_update(self, kind, lora):
        training, expected = KINDS[kind]
        policy = make_policy()
        setup(policy.model, training, lora)
        policy.log_prob_rows(make_record(policy, 3)).sum().backward()
        assert touched(policy.model) == expected

    @pytest.mark.parametrize("kind", ["default", "lora"])
    @pytest.mark.parametrize(
        ("lora", "expected"),
        [
            (VideoLoRA(rank=2), adapters(VIDEO, range(4), QKVO)),
            (EVERYWHERE, adapters(VIDEO, range(4), QKVO + CROSS + FFN)),
            (
                VideoLoRA(rank=2, projections=("k", "o"), cross_attention=True, blocks=(2, 4)),
                adapters(VIDEO, (2, 3), ["self_attn.k", "self_attn.o", "cross_attn.k", "cross_attn.o"]),
            ),
        ],
        ids=["self", "everywhere", "some"],
    )
    def test_video_sft(self, kind, lora, expected):
        model = setup(make_model(), KINDS[kind][0], lora)
        VideoSFTLoss(model)(make_windows())["loss_video"].backward()
        assert touched(model) == expected

    # The features are the keys and values of every layer, so of the last layer nothing else takes part.
    FEATURES = adapters(VIDEO, range(3), QKVO + CROSS + FFN) | adapters(VIDEO, [3], ["self_attn.k", "self_attn.v"])

    @pytest.mark.parametrize("kind", ["default", "lora"])
    @pytest.mark.parametrize("divergence", ["gauss_kl", "cosine"])
    def test_feature_kl(self, kind, divergence):
        model = setup(make_model(), KINDS[kind][0])
        FeatureKLLoss(model, kind=divergence)(make_states(3))["loss_feature_kl"].backward()
        assert touched(model) == self.FEATURES

    @pytest.mark.parametrize("kind", KINDS)
    def test_action_sft_trains_both(self, kind):
        training, expected = KINDS[kind]
        model = setup(make_model(), training)
        ActionSFTLoss(model, make_stats())(make_windows())["loss_action"].backward()
        assert touched(model) == self.FEATURES | expected

    def test_a_step_changes_no_more_than_that(self):
        policy = make_policy()
        training, expected = KINDS["last_block"]
        setup(policy.model, training)
        before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
        optimizer = torch.optim.AdamW(actor_parameters(policy.model), lr=1e-2, weight_decay=0.1)
        policy.log_prob_rows(make_record(policy, 3)).sum().backward()
        optimizer.step()
        assert {n for n, p in policy.model.named_parameters() if not torch.equal(p, before[n])} == expected
