"""Does it learn? WAM-RL on LIBERO's simulator, from a policy of 24 million parameters cloned from demonstrations.

    python benchmarks/learning/libero.py --seeds 0 --minutes 9 --save

Three tasks of LIBERO-Spatial; trained on init states 0 to 24, held-out success on 25 to 49 of every task. Needs a GPU
and 16 cores for the times that PLAN.md names. experiment.py has the machinery.
"""

from __future__ import annotations

from experiment import Experiment, main

PPO = (
    "algo.actor_loss=flow_ppo",
    "algo.groups_per_iteration=12",
    "algo.group_size=8",
    "sde.noise_level=0.7",
    "algo.minibatch_size=512",
    "algo.epochs=2",
    "algo.actor_lr=1e-5",
    "algo.actor_average=0",
    "algo.kl_target=0.03",
    "algo.target_kl=0.1",
    "algo.normalize_steps=false",
)
#: Overrides of ``preset=small``, whose own options are the variant ``main``.
VARIANTS: dict[str, tuple[str, ...]] = {
    "main": (),
    "rate_0": ("algo.actor_lr=0", "algo.iterations=2"),
    "shuffled": ("algo.shuffle_advantages=true",),
    "ppo_all_steps": (*PPO, "sde.stochastic_steps=all"),
    "ppo_one_step": (*PPO, "sde.stochastic_steps=one_random"),
    "weighted_flow": ("algo.actor_loss=weighted_flow", "algo.group_size=8", "algo.groups_per_iteration=12"),
}

EXPERIMENT = Experiment(
    name="learning_libero",
    world=("preset=small",),
    variants=VARIANTS,
    cloning={"more_cloning": ("pretrain.steps=4000",)},
    names=("before", "after"),
)

if __name__ == "__main__":
    main(EXPERIMENT, __doc__ or "")
