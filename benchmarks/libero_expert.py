"""How often the scripted expert of LIBERO succeeds, per task. Physics only, nothing is rendered.

    python benchmarks/libero_expert.py                       # spatial, object and goal, 20 episodes per task
    python benchmarks/libero_expert.py --suites libero_goal --episodes 50 --noise 0.2

Init states are spread over all of a task's, and every episode has an env seed, a grasp variation and a noise of its
own. Prints a table and, as its last line, one JSON object; `--save` also writes it to benchmarks/results,
beside the suites that are there already with the same options.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from wamrl_torchrl import schema
from wamrl_torchrl.data.analysis import Rate
from wamrl_torchrl.envs.libero import LiberoEnv
from wamrl_torchrl.envs.libero_goals import expert_refusal, expert_tasks

RESULT = Path(__file__).parent / "results" / "libero_expert.json"
GOOD = 0.9


def run(suite: str, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one suite."""
    env = LiberoEnv(suite, options.processes, sim_states=False)
    tasks, count = expert_tasks(env.suite), options.episodes
    task = torch.tensor(tasks).repeat_interleave(count)
    index = torch.arange(len(task))
    trial = index % count
    episodes = torch.stack((task, trial * schema.PLAIN_INIT_STATES // count, options.seed + index, index, index), 1)
    demonstrations = env.iter_demonstrations(
        episodes, noise=options.noise, grasp_variation=options.variation, seed=options.seed, render=False
    )
    lengths = defaultdict(list)
    done: dict[int, int] = dict.fromkeys(tasks, 0)
    for row, demonstration in demonstrations:
        task_id = int(episodes[row, 0])
        done[task_id] += 1
        if demonstration.get(schema.SUCCESS):
            lengths[task_id].append(len(demonstration.get("actions")))
        if done[task_id] == count:
            rate, steps = Rate(len(lengths[task_id]), count), statistics.median(lengths[task_id] or [0])
            print(f"| {suite} {task_id} | {env.instructions[task_id]} | {rate} | {steps:g} |", flush=True)
    env.close()
    rates = {task_id: Rate(len(lengths[task_id]), count) for task_id in tasks}
    every = Rate(sum(rate.k for rate in rates.values()), count * len(tasks))
    good = sum(rate.value >= GOOD for rate in rates.values())
    print(f"| {suite} | {good} of {len(tasks)} tasks at {GOOD:.0%} or more | {every} | |", flush=True)
    return {
        "success": every.value,
        "interval": every.interval(),
        "n": every.n,
        "tasks": len(tasks),
        "tasks_at_90_percent": good,
        "per_task": {task_id: list(rate) for task_id, rate in rates.items()},
        "intervals": {task_id: rate.interval() for task_id, rate in rates.items()},
        "median_steps": {task_id: statistics.median(lengths[task_id] or [0]) for task_id in tasks},
        "refused": {i: why for i, file in enumerate(env.suite.bddl_files) if (why := expert_refusal(file))},
    }


def main() -> None:
    """Run the suites and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suites", nargs="+", default=["libero_spatial", "libero_object", "libero_goal"])
    parser.add_argument("--episodes", type=int, default=20, help="per task")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--variation", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    began = time.perf_counter()
    print("| task | instruction | success | median steps |\n|---|---|---|---|", flush=True)
    figures = {suite: run(suite, options) for suite in options.suites}
    result = {
        "name": "libero_expert",
        "command": f"python benchmarks/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".strip(),
        "figures": figures,
        "options": {"episodes": options.episodes, "noise": options.noise, "variation": options.variation},
        "versions": {name: importlib.metadata.version(name) for name in ("mujoco", "robosuite", "numpy", "torch")},
        "machine": f"physics only, {options.processes} processes, {time.perf_counter() - began:.0f} s",
    }
    if options.save:
        if RESULT.exists():  # suites may be run one at a time
            before = json.loads(RESULT.read_text())
            if all(before[key] == result[key] for key in ("options", "versions")):
                result["figures"] = before["figures"] | figures
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
