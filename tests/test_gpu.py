"""What only a GPU shows: the loop on it, and the model at full size with random weights."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer

from tests.conftest import make_model, make_record, make_states, make_stats
from tests.test_pretrain import make_demos
from tests.test_train import load, scalars
from wamrl_torchrl import schema
from wamrl_torchrl.config import AlgoConfig
from wamrl_torchrl.data.episodes import EpisodeStore
from wamrl_torchrl.data.stats import DatasetStats
from wamrl_torchrl.learner import ActorUpdate, ParameterWatch, VideoUpdate
from wamrl_torchrl.modules.fastwam.codec import TinyCodec
from wamrl_torchrl.modules.fastwam.config import ACTION_MODES, preset
from wamrl_torchrl.modules.fastwam.context import ContextBank
from wamrl_torchrl.modules.fastwam.released import load_checkpoint, save_released
from wamrl_torchrl.modules.fastwam.weights import build_empty, materialize
from wamrl_torchrl.modules.lora import VideoLoRA, add_video_lora
from wamrl_torchrl.modules.policy import FlowPolicy, FlowSDEConfig, IDMConfig
from wamrl_torchrl.modules.trainable import ActorTraining, set_actor_training
from wamrl_torchrl.objectives import FlowPPOLoss
from wamrl_torchrl.pretrain import Pretraining
from wamrl_torchrl.train import train

pytestmark = pytest.mark.gpu


def make_policy(mode: str, model=None, *, dtype: torch.dtype | None = torch.float32) -> FlowPolicy:
    model = make_model() if model is None else model
    model.config = replace(model.config, action_modes=ACTION_MODES)
    sde = FlowSDEConfig(num_steps=4, noise_level=0.5, stochastic_steps=2)
    idm = IDMConfig(num_steps=3) if mode == "idm" else None
    policy = FlowPolicy(model, make_stats(), sde=sde, executed_rows=8, idm=idm)
    policy.to(model.proprio_encoder.weight.device)
    return policy if dtype is None else policy.to(dtype)


@pytest.mark.parametrize("mode", ACTION_MODES)
class TestPolicy:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_replay_is_bit_for_bit(self, mode, dtype):
        policy = make_policy(mode, dtype=dtype).cuda()
        record = make_record_on_gpu(policy, 5)
        with torch.no_grad():
            assert torch.equal(policy.log_prob_rows(record), record[schema.LOG_PROB_ROWS])

    def test_acts_as_on_the_cpu(self, mode):
        """The noise is a function of ids, so both devices take the same decision up to rounding."""
        policy = make_policy(mode)
        here, there = policy(make_states(4)), policy.cuda()(make_states(4).cuda()).cpu()
        assert torch.equal(here[schema.NOISE_SEED], there[schema.NOISE_SEED])
        assert torch.equal(here[schema.K_STAR], there[schema.K_STAR])
        torch.testing.assert_close(
            here[schema.CHAIN], there[schema.CHAIN], rtol=0, atol=1e-2 if mode == "idm" else 1e-3
        )

    def test_actor_gradients(self, mode):
        policy = make_policy(mode, dtype=torch.bfloat16).cuda()
        FlowPPOLoss(policy).cuda()(make_record_on_gpu(policy, 4))["loss_objective"].backward()
        gradients = [p.grad for p in policy.model.mot.action.parameters()]
        assert all(g is not None and bool(torch.isfinite(g).all()) for g in gradients)


def make_record_on_gpu(policy: FlowPolicy, batch: int):
    record = make_record(make_policy("first_frame"), batch).cuda()  # states and made-up outcomes
    return policy(record)


class TestLoop:
    @pytest.mark.parametrize("options", [(), ("model.action_mode=idm", "pretrain.action_idm_prob=0.5")])
    def test_trains_and_resumes(self, tmp_path, options):
        console = Console(quiet=True)
        train(load(tmp_path / "run", "device=cuda", "algo.iterations=1", *options), console)
        train(load(tmp_path / "run", "device=cuda", "algo.iterations=2", "resume=true", *options), console)
        assert set(scalars(tmp_path / "run", "actor/clip_fraction")) == {1, 2}
        assert set(scalars(tmp_path / "run", "video/loss_video")) == {1, 2}
        assert max(scalars(tmp_path / "run", "rollout/parity_gap").values()) < 1e-3


class TestPretraining:
    def test_graphs_take_the_steps_of_the_eager_update(self, tmp_path):
        """Same windows, noise, losses and weights up to rounding; a checkpoint goes on with either."""
        weights, losses = {}, {}
        for execution in ("eager", "graphs"):
            options = ("device=cuda", f"pretrain.execution={execution}", "pretrain.video_every=3", "pretrain.ema=0.5")
            config = load(tmp_path, "pretrain.batch_size=8", "pretrain.steps=20", *options)
            demos = make_demos(6)
            training = Pretraining(config, demos, DatasetStats.from_episodes(demos))
            torch.cuda.manual_seed(5)
            for _ in range(10):
                training.step()
            training.checkpoint().save(tmp_path / execution)
            training = Pretraining(config, demos, DatasetStats.from_episodes(demos))
            training.checkpoint().load(tmp_path / execution)
            for _ in range(10):
                training.step()
            assert training.graphs == (execution == "graphs")
            weights[execution], losses[execution] = training.average.state_dict(), training.seen.read()
        assert set(losses["graphs"]) == {"action", "video"}
        for name, loss in losses["eager"].items():
            assert losses["graphs"][name] == pytest.approx(loss, rel=1e-3), name
        for name, value in weights["eager"].items():
            if value.is_floating_point():
                torch.testing.assert_close(weights["graphs"][name], value, rtol=0, atol=2e-4, msg=name)

    def test_windows_are_the_same_wherever_they_are_cut(self):
        demos, generator = make_demos(3), torch.Generator()
        here = demos.sample_windows(16, generator=generator.manual_seed(1))
        demos.sample_on(torch.device("cuda"))
        there = demos.sample_windows(16, generator=generator.manual_seed(1))
        assert {value.device.type for value in there.values(True, True)} == {"cuda"}
        assert bool((there.cpu() == here).all())


def full_size_model():
    """The model of the released weights with random ones."""
    contexts = ContextBank(torch.randn(3, 128, 4096))
    model = build_empty(preset("libero"), TinyCodec(), contexts)
    return materialize(model, device="cuda", dtype=torch.bfloat16)


def full_size_states(batch: int):
    states = make_states(batch).cuda()
    shape = (batch, 3, 224, 448)
    states["observation", "image"] = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")
    return states


def made_up_episode() -> TensorDict:
    generator = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 256, (11, 3, 224, 448), generator=generator, dtype=torch.uint8)
    ids = {key: torch.zeros(1, dtype=torch.int64) for key in (schema.TASK_ID, schema.INIT_STATE_ID, schema.ENV_SEED)}
    data = {"frames": frames, "states": torch.rand(11, 8), "is_decision": torch.ones(11, dtype=torch.bool)}
    return TensorDict({**data, **ids, "actions": torch.rand(40, 7), "success": torch.ones(1, dtype=torch.bool)})


class TestFullSize:
    def test_decides_and_replays_in_both_modes(self):
        model, states = full_size_model(), full_size_states(2)
        assert sum(p.numel() for p in model.mot.parameters()) == 6_020_673_735
        for mode in ACTION_MODES:
            policy = make_policy(mode, model, dtype=torch.bfloat16).cuda()
            record = policy(states.clone())
            assert bool(torch.isfinite(record[schema.CHAIN]).all())
            with torch.no_grad():
                assert torch.equal(policy.log_prob_rows(record), record[schema.LOG_PROB_ROWS])

    @pytest.mark.parametrize("actor", [ActorTraining(), ActorTraining(kind="lora", rank=8)], ids=["full", "lora"])
    def test_each_update_changes_its_own_part(self, actor):
        model = set_actor_training(add_video_lora(full_size_model(), VideoLoRA(rank=8)), actor)
        policy = make_policy("first_frame", model, dtype=None)
        config = AlgoConfig(minibatch_size=4, video_steps=2, video_batch_size=2, actor_lr=1e-3)
        actor_update, video_update = ActorUpdate(policy, config), VideoUpdate(policy, config)
        watch = ParameterWatch(model)
        record = policy(full_size_states(4))
        record.set(("next", schema.EXECUTED_MASK), (torch.arange(32) < 8).expand(4, 32).cuda())
        record.set(schema.ADVANTAGE, torch.tensor([1.0, -1.0, 0.5, -0.5], device="cuda")[:, None])
        buffer = TensorDictReplayBuffer(
            storage=LazyTensorStorage(4), sampler=SamplerWithoutReplacement(), batch_size=config.minibatch_size
        )
        buffer.extend(record.cpu())
        metrics = actor_update(buffer)
        assert watch.changed() == {"action_expert"}
        episodes = EpisodeStore()
        episodes.add(made_up_episode())
        metrics |= video_update(episodes, None)
        assert watch.changed() == {"adapters"}
        assert all(math.isfinite(value) for value in metrics.values())


def test_checkpoint_is_filled_on_the_gpu(tmp_path):
    model = make_model().cuda()
    path = save_released(model, tmp_path / "mine.pt")
    again = load_checkpoint(path, model.config, TinyCodec(), ContextBank(torch.zeros(3, 24, 32)), device="cuda")
    assert {tensor.device.type for tensor in (*again.parameters(), *again.buffers())} == {"cuda"}
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
