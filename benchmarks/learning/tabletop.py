"""Does it learn? WAM-RL on the table top from a deliberately weak start: losses, modes, rewards, controls, sensitivity.

    python benchmarks/learning/tabletop.py --seeds 0 1 2 3 4 --save
    python benchmarks/learning/tabletop.py --variants all --seeds 0 1 2 --jobs 2 --threads 1 --save

Every seed is pre-trained once, on demonstrations of its own, too briefly to be good; every variant starts from there.
Held-out success is that of the deterministic policy on 200 episodes, 100 layouts that nothing was trained on. What is
compared was written down beforehand in PLAN.md; everything that ran is in the result. experiment.py has the machinery.
"""

from __future__ import annotations

from experiment import Experiment, main

WEIGHTED = ("algo.actor_loss=weighted_flow", "algo.self_imitation.weight=0")
PPO = (
    "algo.actor_loss=flow_ppo",
    "sde.stochastic_steps=all",
    "sde.noise_level=0.7",
    "algo.minibatch_size=512",
    "algo.epochs=2",
    "algo.actor_lr=1e-4",
    "algo.actor_lr_final=null",
    "algo.kl_target=0.03",
    "algo.target_kl=0.1",
    "algo.normalize_steps=false",
)
#: Overrides of ``preset=tabletop``, whose own options are the variant ``main``.
VARIANTS: dict[str, tuple[str, ...]] = {
    "main": (),
    # controls
    "rate_0": ("algo.actor_lr=0", "algo.iterations=3"),
    "shuffled": ("algo.shuffle_advantages=true",),
    # losses
    "ppo_all_steps": PPO,
    "ppo_one_step": (*PPO, "sde.stochastic_steps=one_random"),
    "ppo_and_imitation": (*PPO, "algo.self_imitation.weight=1"),
    "weighted_flow": WEIGHTED,
    "weighted_flow_and_imitation": (*WEIGHTED[:1], "algo.self_imitation.weight=1"),
    "nft": ("algo.actor_loss=nft", "algo.actor_lr=1e-4", "algo.self_imitation.weight=0"),
    # modes and rewards
    "alternate": ("algo.mode=alternate", "env.future_frames=true"),
    "ppo_reward_both": (*PPO, "env.future_frames=true", "algo.weight_rec=0.1"),
    "ppo_reward_rec": (*PPO, "env.future_frames=true", "algo.weight_task=0", "algo.weight_rec=1"),
    "ppo_alternate_both": (*PPO, "env.future_frames=true", "algo.weight_rec=0.1", "algo.mode=alternate"),
    # sensitivity of flow-PPO
    "ppo_noise_0.3": (*PPO, "sde.noise_level=0.3"),
    "ppo_noise_1.0": (*PPO, "sde.noise_level=1.0"),
    "ppo_K_3": (*PPO, "sde.num_steps=3"),
    "ppo_K_10": (*PPO, "sde.num_steps=10"),
    "ppo_kl_0.01": (*PPO, "algo.kl_target=0.01"),
    "ppo_kl_0.1": (*PPO, "algo.kl_target=0.1", "algo.target_kl=0.4"),
    "ppo_normalized": (*PPO, "algo.normalize_steps=true"),
    # sensitivity of self-imitation
    "imitation_rate_half": ("algo.actor_lr=2.5e-4",),
    "imitation_rate_double": ("algo.actor_lr=1e-3",),
    "imitation_noise_0.5": ("sde.noise_level=0.5",),
}

EXPERIMENT = Experiment(
    name="learning_tabletop",
    world=("preset=tabletop",),
    variants=VARIANTS,
    cloning={"more_cloning": ("pretrain.steps=7500",)},
    names=("start", "final"),
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__ or "")
