"""Does it learn? WAM-RL on the table top from a short pre-training, several seeds, held-out success before and after.

    python benchmarks/tabletop_learning.py --seeds 0 1 2 --jobs 1 --threads 2

Runs `wamrl-train preset=tabletop` once per seed and prints a table and, as its last line, one JSON object. A seed that
did not finish is reported as such.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from wamrl_torchrl.data.analysis import Rate


def run(seed: int, options: argparse.Namespace) -> dict:
    """Train with one seed in a process of its own; returns its summary."""
    directory = Path(options.directory) / f"seed{seed}"
    command = [sys.executable, "-m", "wamrl_torchrl.train", "preset=tabletop", "device=cpu", f"seed={seed}"]
    command += [f"logger.directory={directory}", "logger.tensorboard=false", *options.overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    began = time.perf_counter()
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "log.txt").open("w") as log:
        done = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    minutes = (time.perf_counter() - began) / 60
    if done.returncode:
        return {"seed": seed, "failed": done.returncode, "minutes": round(minutes, 1)}
    held_out = json.loads((directory / "summary.json").read_text())["held_out"]
    return {"seed": seed, "minutes": round(minutes, 1), **{name: held_out[name][:2] for name in ("start", "end")}}


def main() -> None:
    """Run all seeds and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="seeds that run side by side")
    parser.add_argument("--threads", type=int, default=2, help="torch threads of a run")
    parser.add_argument("--directory", default="runs/benchmark_tabletop")
    parser.add_argument("overrides", nargs="*", help="further options of wamrl-train")
    options = parser.parse_args()
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda seed: run(seed, options), options.seeds))
    print("| seed | minutes | held-out start | held-out end |\n|---|---|---|---|")
    finished = [result for result in results if "end" in result]
    for result in results:
        rates = [str(Rate(*result[name])) if name in result else "failed" for name in ("start", "end")]
        print(f"| {result['seed']} | {result['minutes']} | {rates[0]} | {rates[1]} |")
    figures = {
        "start": [result["start"][0] / result["start"][1] for result in finished],
        "final": [result["end"][0] / result["end"][1] for result in finished],
        "n": [result["end"][1] for result in finished],
        "intervals_start": [Rate(*result["start"]).interval() for result in finished],
        "intervals_final": [Rate(*result["end"]).interval() for result in finished],
        "seeds": [result["seed"] for result in results],
        "minutes": [result["minutes"] for result in results],
        "failed": len(results) - len(finished),
        "overrides": options.overrides,
        "threads": options.threads,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    print(json.dumps({"name": "tabletop_learning", "figures": figures}))


if __name__ == "__main__":
    main()
