"""Which tasks of LIBERO the scripted expert does, and why it refuses the others."""

from __future__ import annotations

import numpy as np
import pytest

from wamrl_torchrl.config import EnvConfig
from wamrl_torchrl.demos import make_demo_env
from wamrl_torchrl.envs.libero_goals import expert_refusal, expert_tasks, read_goal, require_expert
from wamrl_torchrl.envs.libero_suites import LiberoSuite, load_suite

GOALS = (
    "(On black_bowl_2 plate_1)",
    "(On porcelain_mug_1 plate_1)",
    "(And (Open white_cabinet_1_top_region) (On black_bowl_1 plate_1))",
)


@pytest.fixture
def suite(tmp_path):
    for task, goal in enumerate(GOALS):
        (tmp_path / f"{task}.bddl").write_text(f"(define (problem P)\n  (:init (On a b))\n  (:goal\n    {goal}\n  )\n)")
    return LiberoSuite(
        name="my_suite",
        instructions=tuple(f"do task {task}" for task in range(len(GOALS))),
        bddl_files=tuple(str(tmp_path / f"{task}.bddl") for task in range(len(GOALS))),
        init_states=(np.zeros((50, 9)),) * len(GOALS),
        horizons=(100,) * len(GOALS),
        suites=("my_suite",) * len(GOALS),
    )


def refusal(tmp_path, goal: str) -> str | None:
    (tmp_path / "task.bddl").write_text(f"(define (:goal (And {goal})))")
    return expert_refusal(tmp_path / "task.bddl")


class TestReadGoal:
    def test_relation_and_arguments(self, suite):
        assert read_goal(suite.bddl_files[0]) == [("on", "black_bowl_2", "plate_1")]
        assert read_goal(suite.bddl_files[2]) == [
            ("open", "white_cabinet_1_top_region"),
            ("on", "black_bowl_1", "plate_1"),
        ]

    @pytest.mark.parametrize("text", ["(define (:init (On a b)))", "(define (:goal (And )))"])
    def test_none(self, tmp_path, text):
        (tmp_path / "task.bddl").write_text(text)
        with pytest.raises(ValueError, match="has no goal"):
            read_goal(tmp_path / "task.bddl")


class TestRefusal:
    @pytest.mark.parametrize(
        "goal",
        [
            "(On akita_black_bowl_1 plate_1)",
            "(On red_cream_cheese_1 bigger_akita_black_bowl_1)",
            "(On wine_bottle_1 wine_rack_1_top_region)",
            "(In yellow_milk_1 red_basket_1_contain_region)",
            "(On plate_1 main_table_stove_front_region)",
            "(Open wooden_cabinet_1_middle_region)",
            "(Turnon flat_stove_1)",
        ],
    )
    def test_can(self, tmp_path, goal):
        assert refusal(tmp_path, goal) is None

    @pytest.mark.parametrize(
        ("goal", "why"),
        [
            ("(On chefmate_8_frypan_1 plate_1)", "cannot take hold of chefmate_8_frypan_1"),
            ("(On plate_1 flat_stove_1_cook_region)", "cannot take hold of plate_1"),
            (
                "(In akita_black_bowl_1 wooden_cabinet_1_top_region)",
                "cannot put anything in wooden_cabinet_1_top_region",
            ),
            ("(In butter_1 microwave_1_heating_region)", "cannot put anything in microwave_1_heating_region"),
            ("(On butter_1 main_table_left_region)", "cannot put anything on main_table_left_region"),
            ("(Open microwave_1)", "cannot open microwave_1"),
            ("(Turnoff flat_stove_1)", r"no script for the goal \(turnoff flat_stove_1\)"),
            ("(On a b) (On c d)", r"its goal \(on a b\) and \(on c d\) asks for more than one thing"),
        ],
    )
    def test_cannot(self, tmp_path, goal, why):
        with pytest.raises(AssertionError, match=why):
            raise AssertionError(refusal(tmp_path, goal))

    def test_names_tasks_and_reasons(self, suite):
        assert expert_tasks(suite) == [0]
        require_expert(suite, [0, 0])
        with pytest.raises(ValueError, match="no scripted expert for tasks of my_suite") as error:
            require_expert(suite, [2, 0, 1])
        _, second, third, last = str(error.value).splitlines()
        assert "task 1 (do task 1): it cannot take hold of porcelain_mug_1" in second
        assert "task 2 (do task 2): its goal" in third
        assert last == "Tasks with one: [0]"


@pytest.mark.libero
class TestSuites:
    @pytest.mark.parametrize(
        ("name", "refused"), [("libero_spatial", []), ("libero_object_swap", []), ("libero_goal", [3])]
    )
    def test_tasks(self, name, refused):
        assert [task for task in range(10) if task not in expert_tasks(load_suite(name))] == refused

    def test_refused_before_anything_starts(self, monkeypatch):
        monkeypatch.setattr("wamrl_torchrl.demos.make_env", lambda config: pytest.fail("started"))
        with pytest.raises(ValueError, match=r"task 5 \(pick up the book"):
            make_demo_env(EnvConfig(suite="libero_10", task_ids=[5]))
