"""LIBERO's suites: standard, perturbed, folders of tasks, and mixes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.envs._libero import act, random_actions, request
from wamrl_torchrl.envs import libero_suites
from wamrl_torchrl.envs.libero import LiberoEnv
from wamrl_torchrl.envs.libero_suites import base_suite, load_suite

pytestmark = pytest.mark.libero


class TestStandardSuites:
    @pytest.mark.parametrize(
        ("suite", "tasks", "width", "horizon"),
        [
            ("libero_spatial", 10, 195, 240),
            ("libero_object", 10, 231, 280),
            ("libero_goal", 10, 169, 320),
            ("libero_10", 10, 257, 520),
            ("libero_90", 90, 257, 520),
        ],
    )
    def test_contents(self, suite, tasks, width, horizon):
        loaded = load_suite(suite)
        assert len(libero_suites.instructions(suite)) == len(loaded) == tasks
        assert len(set(loaded.bddl_files)) == tasks
        assert loaded.sim_state_dim == width
        assert all(states.shape[0] == 50 and states.dtype == np.float64 for states in loaded.init_states)
        assert loaded.horizons == (horizon,) * tasks
        assert loaded.suites == (suite,) * tasks

    def test_instruction(self):
        expected = "pick up the black bowl from table center and place it on the plate"
        assert libero_suites.instructions("libero_spatial")[2] == expected

    def test_unknown(self):
        message = (
            "unknown LIBERO suite 'libero_goal_swop'; did you mean libero_goal_swap, .*standard suites are libero_sp"
        )
        with pytest.raises(ValueError, match=message):
            LiberoEnv("libero_goal_swop", 1)
        with pytest.raises(ValueError, match="unknown LIBERO suite 'libero_100'"):
            load_suite("libero_100")  # registered by the provider, without tasks


class TestPerturbedSuites:
    @pytest.mark.parametrize("base", ["libero_spatial", "libero_object", "libero_goal", "libero_10"])
    @pytest.mark.parametrize("kind", ["swap", "object", "lan", "task", "with_mug"])
    def test_contents(self, base, kind):
        loaded = load_suite(f"{base}_{kind}")
        assert len(loaded) == 10
        assert loaded.horizons == load_suite(base).horizons
        assert all(len(states) == 50 for states in loaded.init_states)
        assert set(loaded.bddl_files).isdisjoint(load_suite(base).bddl_files)

    def test_same_words_are_the_instruction_that_a_policy_knows(self):
        for suite in ("libero_spatial", "libero_object", "libero_goal", "libero_10"):
            known = libero_suites.instructions(suite)
            assert libero_suites.instructions(f"{suite}_swap") == known
            assert libero_suites.instructions(f"{suite}_object") == known
            assert set(libero_suites.instructions(f"{suite}_with_mug")) <= set(known)

    def test_perturbed_words_are_said(self):
        assert libero_suites.instructions("libero_goal_lan")[1] == "place the bowl on the stove"
        # Another task of the base suite, in the words that belong to it.
        assert libero_suites.instructions("libero_object_task")[0] == libero_suites.instructions("libero_object")[1]
        known = libero_suites.instructions("libero_spatial")
        assert not set(libero_suites.instructions("libero_spatial_lan")) & set(known)

    def test_folder_that_the_provider_does_not_list(self):
        loaded = load_suite("libero_object_temp_x0.1")
        assert sorted(loaded.instructions) == sorted(libero_suites.instructions("libero_object"))

    @pytest.mark.parametrize(
        ("suite", "message"),
        [
            ("libero_goal_env", "10 of the 10 tasks of LIBERO suite libero_goal_env cannot run: no description in "),
            (
                "libero_goal_with_green_mug",
                "no object model .*libero_mug_green.xml, which its authors have not published",
            ),
            ("libero_object_triggered_episode", "1 of the 11 tasks .*red_sticker.xml.*can be named by a pattern"),
        ],
    )
    def test_incomplete(self, suite, message):
        with pytest.raises(FileNotFoundError, match=message):
            load_suite(suite)

    def test_without_init_states(self):
        with pytest.raises(ValueError, match=r"FLOOR_SCENE1_put_both.*\.npz holds no init states"):
            load_suite("libero_10_with_milk")

    def test_fewer_init_states(self):
        with pytest.raises(ValueError, match=r"init_state_id 10 is out of range.*has 10 init states.*: ids 0 to 9$"):
            LiberoEnv("libero_goal_with_milk", 1)

    @pytest.mark.parametrize(
        ("suite", "base"),
        [
            ("libero_10", "libero_10"),
            ("libero_100", None),
            ("libero_10_with_milk", "libero_10"),
            ("libero_mine", None),
            ("/data/bddl_files/libero_goal/*_add_*.bddl", "libero_goal"),
        ],
    )
    def test_base(self, suite, base):
        assert base_suite(suite) == base


class TestMixes:
    MIX = "libero_goal+libero_spatial_swap"

    def test_tasks_follow_each_other(self):
        mix, first, second = load_suite(self.MIX), load_suite("libero_goal"), load_suite("libero_spatial_swap")
        assert mix.name == self.MIX
        for field in ("instructions", "bddl_files", "horizons", "suites"):
            assert getattr(mix, field) == getattr(first, field) + getattr(second, field)
        assert all(map(np.array_equal, mix.init_states, first.init_states + second.init_states))
        assert mix.horizons == (320,) * 10 + (240,) * 10
        assert mix.sim_state_dim == second.sim_state_dim

    def test_unknown_part(self):
        with pytest.raises(ValueError, match="unknown LIBERO suite ''"):
            load_suite("libero_goal+")

    def test_limits_must_fit(self):
        with pytest.raises(ValueError, match="one for each of the 20 tasks, got 2"):
            LiberoEnv(self.MIX, 1, max_episode_steps=[10, 20])


def test_perturbed_task_of_a_mix_runs():
    """The one test here that starts a simulator: an added object, 10 init states, a limit of its own."""
    suite, task = "libero_spatial+libero_goal_with_milk", 15
    limits = [20] * 10 + [3] * 10
    env = LiberoEnv(
        suite, 1, task_ids=[task], init_state_ids=range(10), settle_steps=0, max_episode_steps=limits, frame_offsets=()
    )
    try:
        observation = env.reset(request((task, 7, 0)))
        assert observation["observation", "image"].float().std() > 30
        outcome = act(env, observation, random_actions(10))
        init_state = torch.from_numpy(env.suite.init_states[task][7])
        torch.testing.assert_close(outcome["sim_states"][0, 0, : len(init_state)], init_state, rtol=0, atol=0)
        assert outcome["executed_mask"].sum() == 3
        assert bool(outcome["truncated"])
    finally:
        env.close()
