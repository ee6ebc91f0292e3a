"""Whether the options of a run fit together; every message names the option."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from wamrl_torchrl.envs.tabletop_expert import ALIGNED
from wamrl_torchrl.modules.fastwam.config import ACTION_MODES
from wamrl_torchrl.schema import PLAIN_INIT_STATES, VIDEO_STRIDE

if TYPE_CHECKING:
    from wamrl_torchrl.config import AlgoConfig, RunConfig

ACTOR_LOSSES = ("flow_ppo", "weighted_flow", "nft", "self_imitation")


def check_config(config: RunConfig) -> None:
    """Check all options of a run.

    Raises:
        ValueError: a value out of range, or options that exclude each other.
    """
    algo, env = config.algo, config.env
    choices = {
        "env.name": (env.name, ("libero", "tabletop")),
        "algo.mode": (algo.mode, ("actor_only", "video_only", "alternate", "joint")),
        "model.action_mode": (config.model.action_mode, ACTION_MODES),
        "algo.video_frames": (algo.video_frames, ("live", "rendered")),
        "algo.reward": (algo.reward, ("both", "task", "rec")),
        "algo.advantage": (algo.advantage, ("group", "gae")),
        "algo.imagination": (algo.imagination, ("frozen", "ema", "live")),
        "algo.reward_space": (algo.reward_space, ("pixels", "latents")),
        "algo.actor_loss": (algo.actor_loss, ACTOR_LOSSES),
        "algo.rows": (algo.rows, ("executed", "prefix", "all")),
        "algo.row_reduction": (algo.row_reduction, ("sum", "mean", "token")),
        "algo.anchor": (algo.anchor, ("none", "velocity", "analytic")),
        "algo.weighting": (algo.weighting, ("positive", "exponential")),
        "algo.task_weights": (algo.task_weights, ("mixed", "failure", "uniform", "list")),
        "pretrain.execution": (config.pretrain.execution, ("auto", "eager", "graphs")),
        "collector.topology": (config.collector.topology, ("direct", "multi_async")),
        "demos.lerobot.gripper": (config.demos.lerobot.gripper, ("auto", "env", "opens")),
        "evaluation.protocol": (config.evaluation.protocol, ("held_out", "standard")),
    }
    for name, (value, known) in choices.items():
        if value not in known:
            raise ValueError(f"{name} must be one of {known}, got {value!r}")
    if algo.group_size < 2:
        raise ValueError(f"algo.group_size must be at least 2 (an advantage compares episodes), got {algo.group_size}")
    demos = config.demos
    offset, spread = list(demos.grasp_offset), demos.start_spread
    if env.name == "libero" and (any(offset) or spread or demos.aligned != ALIGNED):
        raise ValueError(
            f"demos.grasp_offset={offset}, demos.start_spread={spread:g} and demos.aligned={demos.aligned:g} are for "
            "env.name=tabletop: LIBERO's expert chooses its grasps by clearance and varies grasp and approach by "
            "demos.grasp_variation"
        )
    if config.demos.lerobot.path is not None and algo.curriculum.fraction:
        raise ValueError(
            "algo.curriculum.fraction > 0 starts from simulator states, which a LeRobot dataset does not hold: set it "
            "to 0, or make scripted demonstrations (demos.lerobot.path=null)"
        )
    if config.demos.lerobot.cameras is not None and len(config.demos.lerobot.cameras) != 2:
        raise ValueError(
            f"demos.lerobot.cameras must be [agent view, wrist view], got {list(config.demos.lerobot.cameras)}"
        )
    _check_task_weights(algo)
    _check_actor(config)
    _check_reward(algo)
    idm, share = config.model.action_mode == "idm", config.pretrain.action_idm_prob
    if config.model.policy is None and share == (0 if idm else 1):
        raise ValueError(
            f"model.action_mode={config.model.action_mode} with pretrain.action_idm_prob={share:g}: the policy would "
            f"never be trained in that mode; set pretrain.action_idm_prob {'above 0' if idm else 'below 1'}"
        )
    if config.pretrain.execution == "graphs" and share:
        raise ValueError(
            f"pretrain.execution=graphs with pretrain.action_idm_prob={share:g}: how many examples see their video "
            "varies from step to step, which no CUDA graph can; use pretrain.execution=auto or eager"
        )
    if algo.imagination_shift is not None and not algo.imagination_shift > 0:
        raise ValueError(f"algo.imagination_shift must be positive, got {algo.imagination_shift}")
    _check_frames(config)
    positive = {
        "env.num_envs": env.num_envs,
        "env.max_failures": env.max_failures,
        "algo.groups_per_iteration": algo.groups_per_iteration,
        "algo.epochs": algo.epochs,
        "algo.minibatch_size": algo.minibatch_size,
        "algo.critic.hidden": algo.critic.hidden,
        "algo.critic.epochs": algo.critic.epochs,
        "algo.critic.batch_size": algo.critic.batch_size,
        "algo.self_imitation.capacity": algo.self_imitation.capacity,
        "algo.self_imitation.batch_size": algo.self_imitation.batch_size,
        "algo.self_imitation.steps": 1 if algo.self_imitation.steps is None else algo.self_imitation.steps,
        "algo.video_every": algo.video_every,
        "collector.num_workers": config.collector.num_workers,
        "pretrain.steps": config.pretrain.steps,
        "pretrain.validations": config.pretrain.validations,
        "demos.episodes_per_task": config.demos.episodes_per_task,
        "pretrain.video_every": config.pretrain.video_every,
        "algo.video_min_episodes": algo.video_min_episodes,
        "algo.video_max_episodes": algo.video_max_episodes,
        "algo.video_steps": algo.video_steps,
        "algo.video_batch_size": algo.video_batch_size,
        "algo.imagination_steps": algo.imagination_steps,
        "evaluation.repeats": config.evaluation.repeats,
        "evaluation.episodes": 1 if config.evaluation.episodes is None else config.evaluation.episodes,
        "logger.checkpoints": config.logger.checkpoints,
        "diagnostics.window": config.diagnostics.window,
        "diagnostics.repeat_every": config.diagnostics.repeat_every,
    }
    for name, number in positive.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    evaluation = config.evaluation
    if evaluation.seed < 0 or evaluation.videos < 0:
        raise ValueError(
            f"evaluation.seed and evaluation.videos must not be negative, got {evaluation.seed}, {evaluation.videos}"
        )
    if evaluation.protocol == "standard" and (evaluation.repeats != 1 or evaluation.episodes is not None):
        raise ValueError(
            f"evaluation.protocol=standard runs every init state of every task once: set evaluation.repeats=1 and "
            f"evaluation.episodes=null, got {evaluation.repeats} and {evaluation.episodes}"
        )
    for name, (first, stop) in {"train": env.train_init_states, "eval": env.eval_init_states}.items():
        if not 0 <= first < stop:
            raise ValueError(f"env.{name}_init_states must be (from, to) with 0 <= from < to, got {(first, stop)}")
        if env.name == "libero" and stop > PLAIN_INIT_STATES:
            raise ValueError(f"env.{name}_init_states must end at {PLAIN_INIT_STATES}: LIBERO has no more, got {stop}")
        if algo.curriculum.fraction and stop > PLAIN_INIT_STATES:
            raise ValueError(
                f"env.{name}_init_states must end at {PLAIN_INIT_STATES} with a curriculum, whose start states have "
                f"the ids from there on; got {stop}"
            )
    if env.name == "libero" and tuple(env.image_size) != (224, 448):
        raise ValueError(f"env.image_size of LIBERO is [224, 448], got {list(env.image_size)}")
    if not 4 <= env.replan_steps <= 32:
        raise ValueError(f"env.replan_steps must lie in 4..32 (the chunk), got {env.replan_steps}")
    if len(algo.clip_epsilon) != 2:
        raise ValueError(f"algo.clip_epsilon must be [lower, upper], got {list(algo.clip_epsilon)}")
    shares = {
        "algo.demo_fraction": algo.demo_fraction,
        "algo.curriculum.fraction": algo.curriculum.fraction,
        "algo.imagination_decay": algo.imagination_decay,
        "algo.actor_average": algo.actor_average,
        "algo.self_imitation.discount": algo.self_imitation.discount,
        "algo.motion_weight": algo.motion_weight,
        "algo.critic.gamma": algo.critic.gamma,
        "algo.critic.lmbda": algo.critic.lmbda,
        "pretrain.action_idm_prob": config.pretrain.action_idm_prob,
        "pretrain.video_cond_noise_prob": config.pretrain.video_cond_noise_prob,
        "pretrain.validation": config.pretrain.validation,
    }
    for name, share in shares.items():
        if not 0 <= share <= 1:
            raise ValueError(f"{name} must lie in 0..1, got {share}")


def _check_frames(config: RunConfig) -> None:
    """Whether the frames that the run needs are there."""
    algo, env = config.algo, config.env
    if algo.video_frames == "rendered" and env.name != "libero":
        raise ValueError(
            f"algo.video_frames=rendered needs LIBERO's simulator; env.name={env.name} returns its frames live "
            "(algo.video_frames=live)"
        )
    if algo.reward_weights[1] and not env.future_frames:
        raise ValueError(
            f"the reconstruction reward (algo.weight_rec={algo.weight_rec:g}) needs env.future_frames=true; "
            "set algo.weight_rec=0 or algo.reward=task to do without"
        )
    if algo.mode == "actor_only" or algo.video_frames == "rendered":
        return
    others = "algo.video_frames=rendered (LIBERO) or algo.mode=actor_only"
    if not env.future_frames:
        raise ValueError(f"algo.video_frames=live needs env.future_frames=true; or use {others}")
    if env.replan_steps % VIDEO_STRIDE:
        raise ValueError(
            f"env.replan_steps must be a multiple of {VIDEO_STRIDE} while the video expert is trained on live frames "
            f"(it sees every {VIDEO_STRIDE}th), got {env.replan_steps}; use {others} for other values"
        )


def _check_reward(algo: AlgoConfig) -> None:
    if not any(algo.reward_weights) and algo.mode != "video_only":
        raise ValueError(
            f"algo.reward={algo.reward} with algo.weight_task={algo.weight_task:g} and "
            f"algo.weight_rec={algo.weight_rec:g} leaves no reward"
        )
    if algo.motion_weight and algo.reward_space != "pixels":
        raise ValueError(
            f"algo.motion_weight={algo.motion_weight:g} weights pixels: set it to 0 for algo.reward_space=latents"
        )
    if algo.advantage == "gae" and algo.normalize_advantage:
        raise ValueError(
            "algo.normalize_advantage is of groups (algo.advantage=group); with gae set algo.critic.normalize"
        )


def _check_actor(config: RunConfig) -> None:
    algo = config.algo
    if algo.anchor != "none" and algo.actor_loss != "flow_ppo":
        raise ValueError(
            f"algo.anchor={algo.anchor} is part of algo.actor_loss=flow_ppo, got {algo.actor_loss}: set it to none"
        )
    for name, number in (("temperature", algo.temperature), ("nft_beta", algo.nft_beta)):
        if not number > 0:
            raise ValueError(f"algo.{name} must be positive, got {number}")
    for name, number in (("anchor_weight", algo.anchor_weight), ("self_imitation.weight", algo.self_imitation.weight)):
        if not number >= 0:
            raise ValueError(f"algo.{name} must not be negative, got {number}")
    if algo.kl_target is not None and not algo.kl_target > 0:
        raise ValueError(f"algo.kl_target must be positive, or null to keep the rate, got {algo.kl_target}")
    if algo.actor_lr_final is not None and not (algo.actor_lr_final >= 0 and algo.kl_target is None):
        raise ValueError(
            f"algo.actor_lr_final must not be negative and excludes algo.kl_target, which sets the rate itself, got "
            f"{algo.actor_lr_final} and {algo.kl_target}"
        )
    if len(algo.lr_range) != 2 or not 0 < algo.lr_range[0] <= algo.lr_range[1]:
        raise ValueError(f"algo.lr_range must be [lowest, highest], both positive, got {list(algo.lr_range)}")
    if algo.kl_target is not None and not algo.lr_range[0] <= algo.actor_lr <= algo.lr_range[1]:
        raise ValueError(f"algo.actor_lr={algo.actor_lr:g} lies outside algo.lr_range={list(algo.lr_range)}")
    weights, steps = algo.step_loss_weights, config.sde.num_steps
    if weights is not None and (len(weights) != steps or min(weights) < 0 or not sum(weights) > 0):
        raise ValueError(
            f"algo.step_loss_weights must be sde.num_steps={steps} numbers that are not negative nor all 0, got "
            f"{list(weights)}"
        )


def _check_task_weights(algo: AlgoConfig) -> None:
    weights = algo.task_weight_list
    if (algo.task_weights == "list") != (weights is not None):
        raise ValueError(
            f"algo.task_weight_list belongs to algo.task_weights=list, got {weights} with {algo.task_weights!r}"
        )
    if weights is not None and not (all(0 <= w < math.inf for w in weights) and any(weights)):
        raise ValueError(f"algo.task_weight_list must hold numbers of 0 and more, not all 0, got {weights}")
    if not algo.task_weight_floor > 0:
        raise ValueError(f"algo.task_weight_floor must be above 0 to keep all tasks, got {algo.task_weight_floor}")
    if not algo.task_weight_gamma >= 0:
        raise ValueError(f"algo.task_weight_gamma must not be negative, got {algo.task_weight_gamma}")
