"""The parts of a training run, built from a configuration and saved and resumed together."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor
from torchrl._utils import timeit
from torchrl.checkpoint import Checkpoint, CheckpointRotation, GlobalRNGState
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer
from torchrl.envs import Compose, Transform, TransformedEnv
from torchrl.record.loggers import CSVLogger, TensorboardLogger

from wamrl_torchrl import schema
from wamrl_torchrl.build import EnvFactory, fit_policy, frame_offsets, horizon, task_ids
from wamrl_torchrl.collectors.collect import make_collector
from wamrl_torchrl.config import RunConfig
from wamrl_torchrl.data.analysis import Rate
from wamrl_torchrl.data.episodes import EpisodeStore
from wamrl_torchrl.data.starts import StartStates
from wamrl_torchrl.demos import MAX_ENV_SEED, provide_demonstrations
from wamrl_torchrl.diagnostics import Watch
from wamrl_torchrl.envs.episodes import EpisodePlan
from wamrl_torchrl.learner import ActorUpdate, ParameterWatch, ValueUpdate, VideoUpdate, is_half
from wamrl_torchrl.modules.checkpoint import CONFIG_FILE, load_policy, save_policy
from wamrl_torchrl.modules.lora import add_video_lora
from wamrl_torchrl.modules.policy import FlowPolicy
from wamrl_torchrl.modules.trainable import set_actor_training
from wamrl_torchrl.modules.value import ValueHead
from wamrl_torchrl.objectives.transforms import CriticAdvantage, GroupAdvantage, ReconstructionReward
from wamrl_torchrl.pretrain import pretrain
from wamrl_torchrl.report import metric_table
from wamrl_torchrl.run_state import OwnBuffers, StoredEpisodes, TrainedWeights
from wamrl_torchrl.self_imitation import SuccessReplay


class Start(NamedTuple):
    """What a run starts from."""

    policy: Path  # directory of a saved policy
    demos: EpisodeStore | None  # the demonstrations it was made from, if they are there


def prepare_start(config: RunConfig, console: Console) -> Start:
    """Provide the policy a run starts from and the demonstrations it was made from.

    With ``model.policy`` that policy is taken, where it is, and demonstrations, which the video update mixes in, only
    with ``demos.lerobot.path``. Otherwise demonstrations are made, or imported, and a fresh model is pre-trained on
    them, into ``<directory>/start``, since a random policy never succeeds; what an earlier run left in the directory is
    used again.

    Raises:
        FileExistsError: the directory holds a run and ``resume`` is not set.
        ValueError: a curriculum is asked for without demonstrations.
    """
    directory = Path(config.logger.directory)
    if (directory / "checkpoints").exists() and not config.resume:
        raise FileExistsError(
            f"{directory} holds a run: continue it with resume=true, or choose another logger.directory"
        )
    start = directory / "start"
    check_recipe(config, directory)
    if config.model.policy is not None:
        if config.algo.curriculum.fraction:
            raise ValueError("algo.curriculum.fraction > 0 needs demonstrations, but model.policy was given")
        imported = config.demos.lerobot.path is not None and config.algo.mode != "actor_only"
        return Start(Path(config.model.policy), _demonstrations(config, console) if imported else None)
    if config.model.preset == "libero":
        raise ValueError(
            "model.preset=libero is not trained from scratch here: give model.policy (wamrl-weights import)"
        )
    demos = _demonstrations(config, console)
    if not (start / CONFIG_FILE).exists():
        console.print("Pre-training a fresh model on the demonstrations.")
        save_policy(pretrain(config, demos, console), start)
    return Start(start, demos)


def _demonstrations(config: RunConfig, console: Console) -> EpisodeStore:
    """Those in ``<directory>/demos``, put there now if need be."""
    directory = Path(config.logger.directory) / "demos"
    if directory.exists():
        demos = EpisodeStore.load(directory)
        console.print(f"{len(demos)} demonstrations from {directory}")
        return demos
    if config.demos.lerobot.path is None:
        console.print("A random policy never succeeds: making scripted demonstrations first.")
    demos = provide_demonstrations(config, console)
    demos.save(directory)
    return demos


def check_recipe(config: RunConfig, directory: Path) -> None:
    """Make sure that demonstrations and start policy in a directory were made as this run would make them.

    Raises:
        ValueError: they were made with other options; the message names them.
    """
    env = config.env
    world = [env.name, env.suite, task_ids(env), env.settle_steps, list(env.image_size), list(env.train_init_states)]
    recipe = {
        "seed": config.seed,
        "model.preset": config.model.preset,
        "model.policy": config.model.policy,
        "model.contexts": config.model.contexts,
        "env": world,
        "demos": asdict(config.demos),
        "pretrain": asdict(config.pretrain),
    }
    path = directory / "recipe.json"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(recipe, indent=2))
        return
    found = json.loads(path.read_text())
    different = [name for name, value in recipe.items() if found.get(name) != value]
    if different:
        changes = "; ".join(f"{name}: {found.get(name)} there, {recipe[name]} here" for name in different)
        raise ValueError(f"{directory} was started with other options ({changes}): choose another logger.directory")


def draw_groups(run: Run, weights: Tensor) -> Tensor:
    """Draw an iteration's groups int64 [M,3]: task, init state, env seed; groups of a task next to each other.

    Args:
        run: the run; a share of its groups starts along demonstrations.
        weights: weight of each of the run's tasks.
    """
    algo, inits = run.config.algo, torch.arange(*run.config.env.train_init_states)
    chosen = torch.multinomial(weights, algo.groups_per_iteration, replacement=True).sort().values
    groups = []
    for task in torch.tensor(run.tasks)[chosen].tolist():
        if run.starts is not None and float(torch.rand(())) < algo.curriculum.fraction:
            groups.append((task, *run.starts.draw(task, torch.default_generator)))
        else:
            init = int(inits[torch.randint(len(inits), ())])
            groups.append((task, init, int(torch.randint(MAX_ENV_SEED, ()))))
    return torch.tensor(groups)


class Run:
    """Everything that lives as long as a run; a context manager that starts and ends its processes.

    Args:
        config: the configuration.
        policy: policy to train, in place.
        demos: demonstrations for the video update and the curriculum, or None.
        console: where people are told things.

    With ``resume`` the latest checkpoint of the directory is restored, if there is one.
    """

    def __init__(self, config: RunConfig, policy: FlowPolicy, demos: EpisodeStore | None, console: Console) -> None:
        self.config = config
        self.console = console
        self.directory = Path(config.logger.directory)
        self.iteration = 0
        self.held_out: dict[str, Rate] = {}
        self.seconds: dict[str, float] = defaultdict(float)
        self.tasks = task_ids(config.env)
        self.demos = demos
        self.successes = EpisodeStore(max_episodes=config.algo.video_max_episodes)
        self.starts: StartStates | None = None
        if config.algo.curriculum.fraction and demos is not None:
            self.starts = StartStates(demos, steps_before_end=config.algo.curriculum.steps_before_end)
            share = config.algo.curriculum.fraction
            console.print(f"Reverse curriculum: {share:.0%} of the groups start along demonstrations.")

        self.policy = fit_policy(policy, config)
        if is_half(policy) and config.model.actor.kind != "lora":
            console.print(
                f"[yellow]The weights are {policy.model.dtype} without fp32 master weights: steps smaller than about "
                f"0.4 % of a weight round away. model.actor.kind=lora trains fp32 adapters.[/yellow]"
            )
        torch.manual_seed(config.seed)
        add_video_lora(policy.model, config.model.lora)
        set_actor_training(policy.model, config.model.actor)
        policy.to(policy.device)
        self.actor_update = ActorUpdate(policy, config.algo)
        imitation, keys = config.algo.self_imitation, [*policy.replay_keys, ("next", schema.EXECUTED_MASK)]
        self.replay = SuccessReplay(
            imitation.capacity, batch_size=imitation.batch_size, keys=keys, discount=imitation.discount
        )
        self.video_update = VideoUpdate(policy, config.algo)
        self.watch = ParameterWatch(policy.model)
        self.reconstruction = ReconstructionReward(
            policy.model,
            num_steps=config.algo.imagination_steps,
            shift=config.algo.imagination_shift,
            imagination=config.algo.imagination,  # type: ignore[arg-type]
            ema_decay=config.algo.imagination_decay,
            space=config.algo.reward_space,  # type: ignore[arg-type]
            motion_weight=config.algo.motion_weight,
            frame_offsets=frame_offsets(config.env),
            seed=config.seed,
        )
        weight_task, weight_rec = config.algo.reward_weights
        self.advantage = GroupAdvantage(
            config.algo.group_size,
            weight_task=weight_task,
            weight_rec=weight_rec,
            normalize=config.algo.normalize_advantage,
            drop_degenerate=config.algo.advantage == "group",
        )
        self.value_update: ValueUpdate | None = None
        self.on_writing: Transform = self.advantage
        if config.algo.advantage == "gae":
            critic, limits = config.algo.critic, horizon(config.env)
            decisions = -(-(limits if isinstance(limits, int) else max(limits)) // config.env.replan_steps)
            head = ValueHead(policy.model, hidden=critic.hidden, horizon=decisions).to(policy.device)
            self.value_update = ValueUpdate(head, critic)
            estimate = CriticAdvantage(
                head,
                gamma=critic.gamma,
                lmbda=critic.lmbda,
                weight_task=weight_task,
                weight_rec=weight_rec,
                normalize=critic.normalize,
            )
            self.on_writing = Compose(estimate, self.advantage)  # on writing the last one goes first
        self.diagnosis = Watch(config.diagnostics)
        self.plan = EpisodePlan()

    def make_buffer(self, rows: int) -> TensorDictReplayBuffer:
        """An iteration's buffer; it computes advantages when the rollout is written to it."""
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(rows),  # allocates all its rows at once
            sampler=SamplerWithoutReplacement(),
            transform=self.on_writing,
            batch_size=self.config.algo.minibatch_size,
        )

    # ---- life ---------------------------------------------------------------------------------------------------
    def __enter__(self) -> Run:
        self._stack = contextlib.ExitStack()
        with self._stack:
            self._start()
            self._stack = self._stack.pop_all()  # keep what was started; on an error it has been ended
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        config, stack = self.config, self._stack
        stack.callback(self.plan.close)
        # First, as environments are dealt what the plan releases after they were built, and workers load the policy.
        resumed = self._open_checkpoint()
        states = {} if self.starts is None else self.starts.states
        factory = EnvFactory(config.env, self.policy.stats, self.plan, states)
        if config.collector.topology == "direct":
            # Nothing collects while the learner works, so one environment serves rollouts and evaluation.
            self.eval_env: TransformedEnv = factory()
            self.eval_plan = self.plan
            stack.callback(lambda: self.eval_env.is_closed or self.eval_env.close())
            self.collector = make_collector(lambda *_: self.eval_env, policy=self.policy)
        else:
            self.eval_plan = EpisodePlan()
            stack.callback(self.eval_plan.close)
            self.eval_env = EnvFactory(config.env, factory.stats, self.eval_plan, states)()
            stack.callback(self.eval_env.close)
            snapshot = save_policy(self.policy, self.directory / "workers")
            self.collector = make_collector(
                factory,
                topology="multi_async",
                policy_factory=PolicyFactory(snapshot, self.policy.device),
                num_workers=config.collector.num_workers,
                envs_per_worker=config.env.num_envs,
            )
        stack.callback(self.collector.shutdown)
        stack.callback(self.plan.close)  # before the collector is shut down: idle workers end by it
        self.episodes = iter(self.collector)
        # Last, as building environments and collectors may draw random numbers.
        if resumed is not None:
            self._checkpoint.load(resumed, components=["rng"])
        self._open_logs()

    # ---- checkpoints --------------------------------------------------------------------------------------------
    def _open_checkpoint(self) -> Path | None:
        """Bind what a checkpoint holds and restore the latest one, if any and asked for; returns its path."""
        self._rotation = CheckpointRotation(self.directory / "checkpoints", keep_last=self.config.logger.checkpoints)
        optional = {}
        if self.value_update is not None:
            optional = {"value_head": self.value_update.head, "value_optimizer": self.value_update.optimizer}
        if self.actor_update.average is not None:
            optional["actor_average"] = self.actor_update.average
        self._checkpoint = Checkpoint(
            **optional,
            policy=TrainedWeights(self.policy),
            actor_optimizer=self.actor_update.optimizer,
            video_optimizer=self.video_update.optimizer,
            feature_kl=OwnBuffers(self.video_update.feature_kl),
            reconstruction=self.reconstruction,
            advantage=self.advantage,
            plan=self.plan,
            progress=self,
            successes=StoredEpisodes(self.successes),
            replay=self.replay,
            rng=GlobalRNGState(),
        )
        latest = self._rotation.latest() if self.config.resume else None
        if latest is not None:
            self._checkpoint.load(latest)
            # The optimisers' moments go on, at the rates of this run's options; an adapted rate is none of them.
            for update in (self.actor_update, self.video_update):
                if update is self.video_update or self.config.algo.kl_target is None:
                    for group in update.optimizer.param_groups:
                        group["lr"] = update.learning_rate
            self.watch = ParameterWatch(self.policy.model)
            self.console.print(f"Resumed after iteration {self.iteration} from {latest}")
        return latest

    def state_dict(self) -> dict:
        """Progress of the run."""
        return {
            "iteration": self.iteration,
            "held_out": {name: list(rate) for name, rate in self.held_out.items()},
            "seconds": dict(self.seconds),
            "diagnosis": self.diagnosis.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore :meth:`state_dict`."""
        self.iteration = state["iteration"]
        self.held_out = {name: Rate(*rate) for name, rate in state["held_out"].items()}
        self.seconds = defaultdict(float, state["seconds"])
        self.diagnosis.load_state_dict(state["diagnosis"])

    def save(self) -> None:
        """Write a checkpoint of the current iteration."""
        with timeit("checkpoint"):
            self._rotation.save(self._checkpoint, step=self.iteration)

    # ---- logs ---------------------------------------------------------------------------------------------------
    def _open_logs(self) -> None:
        self.loggers = [CSVLogger("metrics", log_dir=str(self.directory))]
        if self.config.logger.tensorboard:
            self.loggers.append(TensorboardLogger("tensorboard", log_dir=str(self.directory)))
        self.scalars = self.directory / "metrics" / "scalars"

    def log(self, metrics: dict[str, float]) -> None:
        """Log an iteration's metrics and phase times, and show them."""
        times = {f"time/{phase}": seconds for phase, seconds in self.clock().items()}
        if self.policy.device.type == "cuda":
            times["memory/peak_gb"] = torch.cuda.max_memory_allocated(self.policy.device) / 1e9
        for logger in self.loggers:
            for name, value in {**metrics, **times}.items():
                logger.log_scalar(name, value, step=self.iteration)
        shown = {name: value for name, value in {**metrics, **times}.items() if "_step_" not in name}
        self.console.print(metric_table(f"iteration {self.iteration}", shown))
        for advice in self.diagnosis.check(self.iteration, metrics):
            self.console.print(f"[yellow]{advice.cause}:[/yellow] {advice.message}")
            with (self.directory / "warnings.jsonl").open("a") as file:
                file.write(json.dumps(advice._asdict()) + "\n")

    def clock(self) -> dict[str, float]:
        """Seconds per phase since the last call, added to the run's."""
        times = {phase: seconds for phase, seconds in timeit.todict(percall=False).items() if seconds}
        timeit.erase()
        for phase, seconds in times.items():
            self.seconds[phase] += seconds
        return times

    def expect_changed(self, *parts: str) -> None:
        """Make sure that an update changed its own parts of the model and no others, and say so.

        Raises:
            RuntimeError: anything else changed.
        """
        changed = self.watch.changed()
        if changed - set(parts):
            raise RuntimeError(f"the update may change {' and '.join(parts)} only, it changed {sorted(changed)}")
        self.console.print(f"  updated: {', '.join(sorted(changed)) or 'nothing (learning rate 0?)'}")


class PolicyFactory:
    """Picklable builder of a worker's policy from a saved one."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self.directory = directory
        self.device = device

    def __call__(self) -> FlowPolicy:
        """Load the policy onto the learner's kind of device."""
        return load_policy(self.directory, device=self.device)
