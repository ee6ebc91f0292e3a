"""Typed configuration of a run, filled by hydra from ``configs/`` and the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from wamrl_torchrl.config_checks import check_config
from wamrl_torchrl.data.lerobot import LeRobotConfig
from wamrl_torchrl.diagnostics import DiagnosticsConfig
from wamrl_torchrl.modules.lora import VideoLoRA
from wamrl_torchrl.modules.policy import FlowSDEConfig, IDMConfig
from wamrl_torchrl.modules.trainable import ActorTraining
from wamrl_torchrl.schema import PLAIN_INIT_STATES

# Hydra composes the files of CONFIG_DIR onto these types, so it refuses unknown keys and wrong types by name.
CONFIG_DIR = str(Path(__file__).parent / "configs")


@dataclass
class EnvConfig:
    """World, tasks and protocol."""

    name: str = "libero"  # libero or tabletop
    suite: str = "libero_spatial"  # LIBERO only: a suite, perturbed or not, a folder of tasks, or several joined by +
    task_ids: list[int] | None = None  # all tasks of the suite if null
    num_envs: int = 2  # simulator processes (LIBERO) or vectorised slots (tabletop) per collector
    replan_steps: int = 8  # actions executed per decision; a multiple of 4 where video is trained on live frames
    future_frames: bool = True  # render every 4th step between decisions, for the reconstruction reward and live video
    max_episode_steps: int | None = None  # the horizon of the world or suite if null
    standard_horizon: bool = False  # of LIBERO, that is the published one; evaluation.protocol=standard sets it
    settle_steps: int = 10  # no-ops after a reset (LIBERO; the released protocol waits 30)
    physics: str = "exact"  # or fast: half the cost of a step, no longer LIBERO's states to the bit (LIBERO)
    background_reset: bool = True  # a simulator that resets does not hold up the others (LIBERO; not in evaluation)
    max_failures: int = 3  # simulators lost in one slot, with no whole episode between, before the run stops (LIBERO)
    render_devices: list[int] | None = None  # LIBERO on GPUs: EGL numbers, dealt in turn; the first visible if null
    image_size: list[int] = field(default_factory=lambda: [224, 448])
    train_init_states: tuple[int, int] = (0, 40)  # from, to (excluded)
    eval_init_states: tuple[int, int] = (40, 50)  # held out
    allow_overlap: bool = False  # train on init states that the run is evaluated on, as LIBERO's own protocol does


@dataclass
class ModelConfig:
    """The model and what of it is trained."""

    preset: str = "tiny"  # or small; libero is the size of the released weights, which model.policy then gives
    policy: str | None = None  # directory of a saved policy to start from; demonstrations and pre-training if null
    vae: str | None = None  # where the Wan VAE of an imported policy is, if it has moved
    contexts: str | None = None  # context cache (wamrl-context build); hashed words if null, or the policy's own
    action_mode: str = "first_frame"  # or idm: imagine the video first, then act on it
    idm: IDMConfig = field(default_factory=IDMConfig)
    lora: VideoLoRA = field(default_factory=lambda: VideoLoRA(rank=8))  # adapters of the video expert
    actor: ActorTraining = field(default_factory=ActorTraining)  # what is trained of the action expert


@dataclass
class DemoConfig:
    """Demonstrations: of the scripted expert, or imported."""

    lerobot: LeRobotConfig = field(default_factory=LeRobotConfig)
    episodes_per_task: int = 12  # made, or at most imported
    noise: float = 0.2  # largest action noise of an episode
    grasp_variation: float = 1.0  # size of the random variation of grasp and approach (LIBERO)
    grasp_offset: list[float] = field(
        default_factory=lambda: [0.0, 0.0]
    )  # a flaw: x and y off the centre, m (tabletop)
    aligned: float = 0.004  # error at which the expert acts, m: a content one is easier to imitate (tabletop)
    start_spread: float = 0.0  # the gripper starts up to so far off along each axis, m (tabletop)


@dataclass
class PretrainConfig:
    """Pre-training on demonstrations by FastWAM's flow-matching losses."""

    steps: int = 600
    batch_size: int = 32
    video_batch_size: int = 4
    video_every: int = 2  # a video step at every so many action steps
    lr: float = 2e-3
    weight_decay: float = 1e-2
    warmup: int = 50
    ema: float = 0.995
    grad_clip: float = 1.0
    # of a step: graphs (CUDA graphs; not with action_idm_prob, whose shapes vary), eager, or whichever is possible
    execution: str = "auto"
    tf32: bool = True  # matrix products on a GPU read their factors as TF32; RL always computes in full float32
    action_idm_prob: float = 0.0  # share of action examples that see the real video; above 0 the policy knows idm mode
    video_cond_noise_prob: float = 0.0  # share of those videos that are noised
    validation: float = 0.05  # share of the demonstrations held out for validation, if there are at least 10
    validations: int = 10  # looks at them


@dataclass
class CurriculumConfig:
    """Reverse curriculum: episodes that start from simulator states along demonstrations."""

    fraction: float = 0.0  # share of groups that start so
    steps_before_end: list[int] = field(default_factory=lambda: [16, 24, 32])


@dataclass
class SelfImitationConfig:
    """Imitating the newest successful episodes, beside the actor loss or as algo.actor_loss=self_imitation."""

    weight: float = 0.0  # of its loss beside the actor loss; 0 for none
    capacity: int = 4096  # decisions kept, in memory and in checkpoints
    batch_size: int = 64  # decisions per step
    steps: int | None = None  # per epoch of actor_loss=self_imitation; as many as the kept decisions make if null
    discount: float = 1.0  # weight of a decision for every decision that success was still away: below 1 haste counts


@dataclass
class CriticConfig:
    """The value head of algo.advantage=gae."""

    gamma: float = 0.99  # discount per decision
    lmbda: float = 0.95  # of generalised advantage estimation
    hidden: int = 128  # width of its two layers
    lr: float = 1e-3
    epochs: int = 4  # over the decisions of an iteration
    batch_size: int = 256
    normalize: bool = True  # advantages of an iteration to mean 0 and deviation 1


@dataclass
class AlgoConfig:
    """The iteration: groups, actor update, video update."""

    # actor_only, video_only, alternate (the actor's steps, then the video expert's) or joint (step by step)
    mode: str = "alternate"
    iterations: int = 3
    groups_per_iteration: int = 4
    group_size: int = 4
    reward: str = "both"  # or task, rec: the other one's weight counts as 0
    weight_task: float = 1.0
    weight_rec: float = 0.1
    advantage: str = "group"  # or gae: actor-critic, by a value head on the video expert's features
    critic: CriticConfig = field(default_factory=CriticConfig)
    normalize_advantage: bool = False
    # How often a task is dealt, by its running success p: by its chance of a mixed group (mixed), by (1-p)^gamma
    # (failure), all alike (uniform), or by the numbers of task_weight_list (list).
    task_weights: str = "mixed"
    task_weight_floor: float = 0.1  # least weight of a task under mixed and failure
    task_weight_gamma: float = 1.0
    task_weight_list: list[float] | None = None  # one for each of the run's tasks, taken as they are
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    # actor
    actor_loss: str = "flow_ppo"  # or weighted_flow, nft, self_imitation
    epochs: int = 1
    minibatch_size: int = 64
    actor_lr: float = 1e-4
    actor_lr_final: float | None = None  # rate of the last iteration, reached linearly; constant if null
    kl_target: float | None = None  # halve or double the rate after an update whose KL is twice or half as large
    lr_range: list[float] = field(default_factory=lambda: [1e-7, 1e-2])  # within these bounds
    clip_epsilon: list[float] = field(default_factory=lambda: [0.2, 0.28])
    dual_clip: float | None = 3.0
    normalize_steps: bool = True
    rows: str = "executed"  # actions in the ratio; or prefix, all
    row_reduction: str = "sum"  # over them; or mean, token
    step_loss_weights: list[float] | None = None  # one per sampling step; equal ones if null
    anchor: str = "none"  # hold the actor near its start by velocity (mean squared change) or analytic (KL), flow_ppo
    anchor_weight: float = 0.01
    weighting: str = "positive"  # of weighted_flow: max(A, 0); or exponential, exp(A / temperature)
    temperature: float = 0.5
    nft_beta: float = 1.0  # distance of the implicit policies of nft
    self_imitation: SelfImitationConfig = field(default_factory=SelfImitationConfig)
    actor_average: float = 0.0  # decay per step of a moving average of the actor, which is evaluated and saved; 0: none
    shuffle_advantages: bool = False  # a control: of permuted advantages and outcomes nothing can be learned
    target_kl: float | None = 0.1  # end the actor update when an epoch's KL passes this
    grad_clip: float = 1.0
    # reconstruction reward
    imagination_steps: int = 5
    imagination_shift: float | None = None  # shift of their schedule; the model's own if null
    imagination: str = "frozen"  # with the adapters off; or ema, live: their moving average, or as they are
    imagination_decay: float = 0.99  # share that the moving average keeps per video update
    reward_space: str = "pixels"  # or latents
    motion_weight: float = 0.0  # 0..1, of pixels: how much more what moved counts
    # video expert
    video_every: int = 1  # iterations between video updates
    video_frames: str = "live"  # as returned while collecting; or rendered: afterwards, of successful episodes (LIBERO)
    video_steps: int = 4  # per video update; with mode=joint one beside each step of the actor instead
    video_batch_size: int = 4
    video_lr: float = 5e-4
    video_min_episodes: int = 1  # successful episodes needed before the first video update
    video_max_episodes: int = 64  # newest successful episodes kept, in memory and in checkpoints
    demo_fraction: float = 0.5  # share of demonstration windows in a video batch
    feature_kl: float = 1.0
    parity_gap: float = 1e-3  # largest |log-prob difference| between rollout and learner in fp32
    parity_kl: float = 0.1  # largest mean KL between them in half precision, whose rounding varies with the batch size

    @property
    def reward_weights(self) -> tuple[float, float]:
        """Weights of success and of the reconstruction reward."""
        return (
            0.0 if self.reward == "rec" else self.weight_task,
            0.0 if self.reward == "task" else self.weight_rec,
        )


@dataclass
class CollectorConfig:
    """How episodes are collected."""

    topology: str = "direct"  # direct or multi_async
    num_workers: int = 1


@dataclass
class EvalConfig:
    """Evaluation by the ODE."""

    # held_out: env.eval_init_states of every task. standard: LIBERO's benchmark, all 50 init states of every task once,
    # within the published horizons unless env.max_episode_steps is set.
    protocol: str = "held_out"
    every: int = 0  # iterations between evaluations; 0 evaluates before the first and after the last only
    start: bool = True  # evaluate before the first iteration
    repeats: int = 1  # env seeds per task and init state
    seed: int = 0  # the first of them
    episodes: int | None = None  # at most so many, spread over tasks; all if null
    videos: int = 0  # wamrl-eval: the first so many episodes of every task are written as MP4


@dataclass
class LoggerConfig:
    """What is written where."""

    directory: str = "runs/latest"
    tensorboard: bool = True
    video: bool = True  # one rollout video at the end
    checkpoints: int = 2  # kept
    rollouts: bool = False  # keep every iteration's records, memory-mapped, for TensorDict.load_memmap


@dataclass
class RunConfig:
    """A whole run."""

    seed: int = 0
    device: str = "auto"
    resume: bool = False
    env: EnvConfig = field(default_factory=EnvConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    sde: FlowSDEConfig = field(default_factory=FlowSDEConfig)
    demos: DemoConfig = field(default_factory=DemoConfig)
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)
    algo: AlgoConfig = field(default_factory=AlgoConfig)
    collector: CollectorConfig = field(default_factory=CollectorConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    diagnostics: DiagnosticsConfig = field(default_factory=DiagnosticsConfig)


ConfigStore.instance().store(name="run_config", node=RunConfig)


def parse_config(raw: DictConfig) -> RunConfig:
    """Check a composed configuration and turn it into the types above.

    Raises:
        ValueError: a value out of range; the message names the option.
    """
    config = OmegaConf.to_object(raw)
    assert isinstance(config, RunConfig)
    check_config(config)
    return config


def eval_init_states(config: RunConfig) -> range:
    """Init states that the run's evaluation protocol starts from."""
    standard = config.evaluation.protocol == "standard"
    return range(PLAIN_INIT_STATES) if standard else range(*config.env.eval_init_states)


def check_held_out(config: RunConfig) -> list[int]:
    """Make sure that training is not evaluated on its own initial states, unless that is asked for.

    Returns:
        the init states that are trained and evaluated on, which only ``env.allow_overlap`` permits.

    Raises:
        ValueError: the two ranges overlap.
    """
    overlap = sorted(set(range(*config.env.train_init_states)) & set(eval_init_states(config)))
    if overlap and not config.env.allow_overlap:
        standard = config.evaluation.protocol == "standard"
        evaluated = "evaluation.protocol=standard" if standard else "env.eval_init_states"
        raise ValueError(
            f"env.train_init_states and {evaluated} share {overlap}: success would not be held out; "
            "keep them apart, or set env.allow_overlap=true"
        )
    return overlap
