"""Goals of LIBERO tasks, read from their description files, and which of them the scripted expert can reach.

Needs neither LIBERO nor a simulator, and decides by what a goal says, not by the suite's name: the perturbed suites
have the expert where the standard ones have it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wamrl_torchrl.envs.libero_suites import LiberoSuite

#: What the expert can do: relation, what is moved, where to. Names end so, in whatever colour or size they come.
ITEMS = (
    *("bowl", "cream_cheese", "butter", "chocolate_pudding", "alphabet_soup", "tomato_sauce", "bbq_sauce", "ketchup"),
    *("salad_dressing", "milk", "orange_juice", "bottle"),
)
DRAWERS = ("cabinet_top_region", "cabinet_middle_region")
PLACES = {
    "on": ("plate", "bowl", "stove_cook_region", "cabinet_top_side", "rack_top_region"),
    "in": ("basket_contain_region",),  # an open drawer would stand in the hand's way to the object
}


def read_goal(bddl_file: str | Path) -> list[tuple[str, ...]]:
    """The predicates of a task's goal, all of which must hold: the relation, in small letters, and its arguments.

    Raises:
        ValueError: the file has no goal.
    """
    _, found, goal = Path(bddl_file).read_text(encoding="utf-8").partition("(:goal")
    predicates = [text.split() for text in re.findall(r"(?i)\((?!and\b)([^()]+)\)", goal)]
    if not found or not predicates:
        raise ValueError(f"{bddl_file} has no goal")
    return [(relation.lower(), *arguments) for relation, *arguments in predicates]


def expert_refusal(bddl_file: str | Path) -> str | None:
    """Why the scripted expert cannot do a task, or None if it can."""
    goal = read_goal(bddl_file)
    text = " and ".join(f"({' '.join(predicate)})" for predicate in goal)
    if len(goal) > 1:
        return f"its goal {text} asks for more than one thing"
    relation, *arguments = goal[0]
    kinds = [re.sub(r"_\d+(?=_|$)", "", argument) for argument in arguments]
    if relation == "turnon" and _is_one_of(kinds[0], ("stove",)):
        return None
    if relation == "open":
        return None if _is_one_of(kinds[0], DRAWERS) else f"it cannot open {arguments[0]}"
    if relation not in PLACES:
        return f"it has no script for the goal {text}"
    item, place = kinds
    if relation == "on" and _is_one_of(item, ("plate",)) and place.startswith("main_table"):
        return None
    if not _is_one_of(item, ITEMS):
        return f"it cannot take hold of {arguments[0]}"
    if not _is_one_of(place, PLACES[relation]):
        return f"it cannot put anything {relation} {arguments[1]}"
    return None


def _is_one_of(name: str, kinds: Iterable[str]) -> bool:
    return name.endswith(tuple(kinds))


def expert_tasks(suite: LiberoSuite) -> list[int]:
    """Ids of the tasks of ``suite`` that have a scripted expert."""
    return [task for task, bddl_file in enumerate(suite.bddl_files) if expert_refusal(bddl_file) is None]


def require_expert(suite: LiberoSuite, tasks: Iterable[int]) -> None:
    """Refuse tasks that have no scripted expert.

    Raises:
        ValueError: the message names each such task and why, and the tasks that have one.
    """
    refusals = {task: expert_refusal(suite.bddl_files[task]) for task in sorted(set(tasks))}
    lines = [f"  task {task} ({suite.instructions[task]}): {why}" for task, why in refusals.items() if why]
    if lines:
        able = f"Tasks with one: {expert_tasks(suite) or 'none'}"
        raise ValueError("\n".join([f"no scripted expert for tasks of {suite.name}:", *lines, able]))
