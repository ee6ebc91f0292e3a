"""FastWAM at full size with random weights on one GPU: memory, time and rounding of all that the package does with it.

    python benchmarks/full_size.py            # one GPU of 80 GB or more, 30 GB of disk below --scratch
    python benchmarks/full_size.py --preset tiny --device cpu

Prints a table and, as its last line, one JSON object. Times are medians after warm-up, memory the peak of all that is
loaded.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from tensordict import TensorDict
from torch import Tensor

from wamrl_torchrl import schema
from wamrl_torchrl.data.stats import DatasetStats
from wamrl_torchrl.modules.checkpoint import load_policy, save_policy
from wamrl_torchrl.modules.fastwam.codec import Codec, TinyCodec
from wamrl_torchrl.modules.fastwam.config import ACTION_MODES, preset
from wamrl_torchrl.modules.fastwam.context import ContextBank
from wamrl_torchrl.modules.fastwam.model import FastWAM, draw_flow_noise, force_future
from wamrl_torchrl.modules.fastwam.released import load_checkpoint, save_released
from wamrl_torchrl.modules.fastwam.wan_codec import WAN22_VAE, WanCodec
from wamrl_torchrl.modules.fastwam.weights import build_empty, materialize
from wamrl_torchrl.modules.lora import VideoLoRA, add_video_lora
from wamrl_torchrl.modules.policy import FlowPolicy, FlowSDEConfig, IDMConfig
from wamrl_torchrl.modules.trainable import ActorTraining, actor_parameters, set_actor_training, video_parameters
from wamrl_torchrl.objectives import FeatureKLLoss, FlowPPOLoss, VideoSFTLoss

TASKS = 10


class Bench:
    """Figures of one run, and how they are measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.config = replace(preset(options.preset), action_modes=ACTION_MODES)
        self.repeats = options.repeats
        self.scratch = Path(options.scratch)
        self.figures: dict[str, float] = {}

    def note(self, **figures: float) -> None:
        """Keep and print figures."""
        for name, value in figures.items():
            self.figures[name] = int(value) if isinstance(value, int) else float(f"{value:.5g}")
            print(f"{name:<44}{value:>16.5g}", flush=True)

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def memory(self) -> float:
        """Peak memory in GB since the last call."""
        if self.device.type != "cuda":
            return 0.0
        peak = torch.cuda.max_memory_allocated() / 1e9
        torch.cuda.reset_peak_memory_stats()
        return peak

    def time(self, name: str, run: Callable[[], object], *, warmup: int = 2, memory: bool = True) -> None:
        """Median milliseconds of ``run``, and its peak memory with all that is loaded."""
        for _ in range(warmup):
            run()
        self.wait()
        self.memory()
        times = []
        for _ in range(self.repeats):
            began = time.perf_counter()
            run()
            self.wait()
            times.append(1000 * (time.perf_counter() - began))
        self.note(**{f"{name}_ms": statistics.median(times)})
        if memory and self.device.type == "cuda":
            self.note(**{f"{name}_peak_gb": self.memory()})

    # ---- parts --------------------------------------------------------------------------------------------------
    def model(self, dtype: torch.dtype = torch.bfloat16, codec: Codec | None = None) -> FastWAM:
        """A model with random weights; the same ones for the same dtype."""
        generator = torch.Generator().manual_seed(0)
        shape = (TASKS, self.config.context_length, self.config.video.text_dim)
        contexts = ContextBank(torch.randn(shape, generator=generator).to(torch.bfloat16))
        model = build_empty(self.config, TinyCodec() if codec is None else codec, contexts)
        return materialize(model, device=self.device, dtype=dtype)

    def codec(self, dtype: torch.dtype | None = None, *, channels_last: bool = False) -> WanCodec:
        """The Wan VAE with random weights, in bf16 on a GPU."""
        torch.manual_seed(0)
        if dtype is None:
            dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        narrow = {} if self.config.video.hidden_dim > 1000 else {"base_dim": 8, "decoder_base_dim": 8}
        with self.device:
            vae = AutoencoderKLWan(**{**WAN22_VAE, **narrow})
        return WanCodec(vae, dtype=dtype, channels_last=channels_last)

    def policy(self, model: FastWAM, *, idm: bool = False) -> FlowPolicy:
        """The model as a policy with the sampling of the published evaluation, K=10 and replan 10."""
        bounds = {"state_min": -torch.ones(8), "state_max": torch.ones(8)}
        stats = DatasetStats(**bounds, action_min=-torch.ones(7), action_max=torch.ones(7))
        sde = FlowSDEConfig(num_steps=10, noise_level=0.5)
        policy = FlowPolicy(model, stats, sde=sde, executed_rows=10, idm=IDMConfig(num_steps=10) if idm else None)
        return policy.to(self.device)

    def states(self, batch: int) -> TensorDict:
        """Random states."""
        generator = torch.Generator().manual_seed(batch)
        image = torch.randint(0, 256, (batch, 3, *self.config.image_size), generator=generator, dtype=torch.uint8)
        rows = torch.arange(batch)[:, None]
        ids = dict.fromkeys((schema.INIT_STATE_ID, schema.ENV_SEED, schema.GROUP_ID, schema.CHUNK_INDEX), rows * 0)
        state = {"observation": {"image": image, "proprio": torch.rand(batch, 8, generator=generator) * 2 - 1}}
        states = TensorDict({**state, **ids, schema.TASK_ID: rows % TASKS, schema.EPISODE_ID: rows}, batch_size=[batch])
        return states.to(self.device)

    def windows(self, batch: int) -> TensorDict:
        """Random windows of nine frames."""
        states = self.states(batch)
        shape = (batch, schema.VIDEO_FRAMES, 3, *self.config.image_size)
        video = torch.randint(0, 256, shape, dtype=torch.uint8, device=self.device)
        pad = torch.zeros(batch, schema.VIDEO_FRAMES, dtype=torch.bool, device=self.device)
        return states.update({"video": video, "image_is_pad": pad})

    def noise(self, model: FastWAM, batch: int) -> Tensor:
        """Noise of a video."""
        return torch.randn(batch, *model.future_shape, device=self.device)


def build(bench: Bench) -> None:
    """Meta device, then weights."""
    began = time.perf_counter()
    model = bench.model()
    bench.wait()
    bench.note(
        build_s=time.perf_counter() - began,
        parameters_mot=sum(p.numel() for p in model.mot.parameters()),
        parameters_all=sum(p.numel() for p in model.parameters()),
        weights_gb=bench.memory(),
    )


def rounding(bench: Bench) -> None:
    """The same weights in fp32 and bf16: relative L2 error of what the networks say."""
    model = bench.model(torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    states, generator = bench.states(4), torch.Generator().manual_seed(0)
    x = torch.randn(4, 32, 7, generator=generator).to(bench.device)
    sigma = torch.tensor([0.9, 0.6, 0.3, 0.1], device=bench.device)
    noise = torch.randn(4, *model.future_shape, generator=generator).to(bench.device)

    @torch.no_grad()
    def outputs() -> dict[str, Tensor]:
        latents = model.imagine(states, noise, num_steps=10)
        prefill = model.prefill(states)
        video = model.mot.video_velocity(noise.to(model.dtype), 1000 * sigma, prefill.text, prefill.cache)
        sample = bench.policy(model)(states.clone())
        return {
            "velocity_first_frame": model.action_velocity(x, sigma, model.condition(states)),
            "velocity_idm": model.action_velocity(x, sigma, model.condition(states, future=noise)),
            "velocity_video": video.float(),
            "imagined_latents": latents[:, :, 1:],
            "chunk": sample[schema.CHAIN][:, -1],
        }

    exact = outputs()
    bench.note(weights_fp32_gb=bench.memory())
    model.to(torch.bfloat16)
    for name, value in outputs().items():
        bench.note(**{f"bf16_error_{name}": float((value - exact[name]).norm() / exact[name].norm())})


def decide(bench: Bench, batches: tuple[int, ...]) -> None:
    """Decisions in both modes, and how far replayed log-probs are from the recorded ones."""
    model = bench.model(codec=bench.codec())
    for mode in ACTION_MODES:
        policy = bench.policy(model, idm=mode == "idm")
        for batch in batches:
            states = bench.states(batch)
            bench.time(f"decision_{mode}_b{batch}", lambda policy=policy, states=states: policy(states.clone()))
        record = policy(bench.states(batches[-1]))
        with torch.no_grad():
            gap = (policy.log_prob_rows(record) - record[schema.LOG_PROB_ROWS]).abs().max()
        bench.note(**{f"replay_gap_{mode}_b{batches[-1]}": float(gap)})


def imagine(bench: Bench, batches: tuple[int, ...]) -> None:
    """Imagination for the reconstruction reward: ten steps and the frames at +4 and +8."""
    model = bench.model(codec=bench.codec())
    for batch in batches:
        states, noise = bench.states(batch), bench.noise(model, batch)

        @torch.no_grad()
        def run(states: TensorDict = states, noise: Tensor = noise) -> Tensor:
            return model.decode_frames(model.imagine(states, noise, num_steps=10), (4, 8))

        bench.time(f"imagination_b{batch}", run)


def code(bench: Bench, batch: int) -> None:
    """The VAE by dtype and layout; decoding the first latents against decoding all."""
    windows = bench.windows(batch)
    video = windows["video"].transpose(1, 2)
    reference = None
    for dtype in (torch.float32, torch.bfloat16):
        for channels_last in (False, True):
            codec = bench.codec(dtype, channels_last=channels_last)
            name = f"vae_{str(dtype).removeprefix('torch.')}{'_channels_last' if channels_last else ''}_b{batch}"
            latents = codec.encode(video)
            frames = codec.decode(latents)
            bench.time(f"{name}_encode_1", lambda codec=codec: codec.encode(video[:, :, :1]))
            bench.time(f"{name}_encode_9", lambda codec=codec: codec.encode(video))
            bench.time(f"{name}_decode_5", lambda codec=codec, latents=latents: codec.decode(latents[:, :, :2]))
            bench.time(f"{name}_decode_9", lambda codec=codec, latents=latents: codec.decode(latents))
            part = codec.decode(latents[:, :, :2])
            bench.note(**{f"{name}_partial_decode_gap": float((part - frames[:, :, :5]).abs().max())})
            if reference is None:
                reference = latents
            bench.note(**{f"{name}_latent_error": float((latents - reference).norm() / reference.norm())})


def actor_step(bench: Bench, batch: int) -> None:
    """A PPO gradient step with each choice of what is trained."""
    codec = bench.codec()
    layers = bench.config.action.num_layers
    for name, training in {
        "full": ActorTraining(),
        "last_blocks": ActorTraining(kind="last_blocks", num_blocks=max(1, layers // 8)),
        "lora": ActorTraining(kind="lora", rank=32),
    }.items():
        model = bench.model(codec=codec)
        model.mot.video.requires_grad_(False)
        model.proprio_encoder.requires_grad_(False)
        policy = bench.policy(set_actor_training(model, training))
        loss = FlowPPOLoss(policy).to(bench.device)
        record = policy(bench.states(batch))
        record.set(("next", schema.EXECUTED_MASK), (torch.arange(32) < 10).expand(batch, 32).to(bench.device))
        record.set(schema.ADVANTAGE, torch.randn(batch, 1, device=bench.device))
        parameters = actor_parameters(model)
        optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)

        def step(record=record, loss=loss, parameters=parameters, optimizer=optimizer) -> None:
            loss(record)["loss_objective"].backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        bench.note(**{f"ppo_{name}_trained": sum(p.numel() for p in parameters)})
        bench.time(f"ppo_{name}_b{batch}", step)
        del model, policy, loss, record, parameters, optimizer, step
        clean(bench)


def video_step(bench: Bench, batches: tuple[int, ...]) -> None:
    """A video SFT step on LoRA, with the feature-KL."""
    model = bench.model(codec=bench.codec())
    add_video_lora(model, VideoLoRA(rank=32))
    sft, feature_kl = VideoSFTLoss(model), FeatureKLLoss(model).to(bench.device)
    parameters = video_parameters(model)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    bench.note(video_lora_trained=sum(p.numel() for p in parameters))
    for batch in batches:
        windows = bench.windows(batch)

        def step(windows: TensorDict = windows) -> None:
            (sft(windows)["loss_video"] + feature_kl(windows)["loss_feature_kl"]).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        bench.time(f"video_sft_b{batch}", step)


def joint_loss(bench: Bench, batch: int) -> None:
    """FastWAM's joint loss, forward and backward through both experts, half of the rows teacher-forced."""
    model = bench.model()
    latents = torch.randn(batch, 48, *bench.noise(model, 1).shape[2:], device=bench.device)
    latents = torch.cat((latents[:, :, :1], latents), 2)
    actions = torch.rand(batch, 32, 7, device=bench.device) * 2 - 1
    states = bench.states(batch)

    def step() -> None:
        forced = force_future(torch.arange(0, batch, 2), latents[::2, :, 1:], 5.0)
        flows = {"video_flow": draw_flow_noise(latents, 5.0), "action_flow": draw_flow_noise(actions, 1.0)}
        model.training_loss(latents.to(model.dtype), model.context(states), actions, forced=forced, **flows)[
            0
        ].backward()
        model.zero_grad(set_to_none=True)

    bench.time(f"joint_loss_b{batch}", step)


def checkpoints(bench: Bench, scratch: Path) -> None:
    """Round trips over the disk, bit for bit, and what a load costs in host memory."""
    model = bench.model()
    began = time.perf_counter()
    path = save_released(model, scratch / "random.pt")
    bench.note(save_released_s=time.perf_counter() - began, released_file_bytes=path.stat().st_size)
    began = time.perf_counter()
    again = load_checkpoint(path, bench.config, TinyCodec(), ContextBank(model.contexts.contexts), device=bench.device)
    bench.wait()
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    bench.note(load_released_s=time.perf_counter() - began, released_round_trip_equal=same)
    del again
    script = [sys.executable, __file__, "--load", str(path), "--preset", "libero", "--device", str(bench.device)]
    if bench.config.video.hidden_dim > 1000:
        bench.note(load_released_host_peak_gb=float(subprocess.check_output(script, text=True).split()[-1]))
    path.unlink()
    policy = bench.policy(model)
    began = time.perf_counter()
    directory = save_policy(policy, scratch / "policy")
    bench.note(save_policy_s=time.perf_counter() - began)
    began = time.perf_counter()
    again = load_policy(directory, device=bench.device).model
    bench.wait()
    same = all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    bench.note(load_policy_s=time.perf_counter() - began, policy_round_trip_equal=same)


def load_alone(options: argparse.Namespace) -> None:
    """Load a released file in a process of its own; print the peak of its anonymous memory in GB."""
    peak, stop = 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not stop.wait(0.005):
            line = next(line for line in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line)
            peak = max(peak, int(line.split()[1]) / 1e6)

    config = replace(preset(options.preset), action_modes=ACTION_MODES)
    contexts = ContextBank(torch.zeros(1, config.context_length, config.video.text_dim))
    torch.zeros(1, device=options.device)  # the device's own share of host memory is counted, as it is always there
    watcher = threading.Thread(target=watch)
    watcher.start()
    load_checkpoint(options.load, config, TinyCodec(), contexts, device=options.device)
    stop.set()
    watcher.join()
    print(f"{peak:.3f}")


def clean(bench: Bench) -> None:
    """Give memory back between parts."""
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> None:
    """Run all parts and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="libero")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--scratch", default="runs/full_size")
    parser.add_argument("--only", nargs="+", help="names of the parts to run")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        load_alone(options)
        return
    bench = Bench(options)
    big = bench.config.video.hidden_dim > 1000
    parts: dict[str, Callable[[], None]] = {
        "build": lambda: build(bench),
        "rounding": lambda: rounding(bench),
        "decide": lambda: decide(bench, (1, 16) if big else (1, 2)),
        "imagine": lambda: imagine(bench, (1, 8) if big else (2,)),
        "code": lambda: code(bench, 8 if big else 1),
        "actor_step": lambda: actor_step(bench, 32 if big else 2),
        "video_step": lambda: video_step(bench, (1, 4) if big else (2,)),
        "joint_loss": lambda: joint_loss(bench, 4 if big else 2),
    }
    began = time.perf_counter()
    bench.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=bench.scratch) as scratch:
        parts["checkpoints"] = lambda: checkpoints(bench, Path(scratch))
        for name in options.only or parts:
            print(f"# {name}", flush=True)
            parts[name]()
            clean(bench)
    gpu = torch.cuda.get_device_name() if bench.device.type == "cuda" else platform.processor()
    machine = {"device": gpu, "torch": torch.__version__, "preset": options.preset, "repeats": options.repeats}
    machine["seconds"] = round(time.perf_counter() - began)
    print(json.dumps({"name": "full_size", "figures": bench.figures, "machine": machine}))


if __name__ == "__main__":
    main()
