"""Task files on disk, of the user's own or of LIBERO-Plus."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from wamrl_torchrl.envs.libero_suites import load_suite
from wamrl_torchrl.envs.libero_tasks import find_init_states, read_description, read_init_states

STATES = np.linspace(-1, 1, 3 * 92).reshape(3, 92)


class TestInitStates:
    @pytest.mark.parametrize("store", ["npz", "named", "torch"])
    def test_formats(self, tmp_path, store):
        path = tmp_path / ("a.npz" if store in ("npz", "named") else "a.pruned_init")
        if store == "npz":
            np.savez(path, STATES)
        elif store == "named":
            np.savez_compressed(path, other=np.zeros(1), states=STATES)
        else:
            torch.save(STATES, path)
        states = read_init_states(path)
        assert states.dtype == np.float64
        np.testing.assert_array_equal(states, STATES)

    def test_single_state_of_libero_plus(self, tmp_path):
        torch.save(STATES[0], tmp_path / "a.pruned_init")
        np.testing.assert_array_equal(read_init_states(tmp_path / "a.pruned_init"), STATES[:1])

    @pytest.mark.parametrize("save", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
    def test_code_is_not_run(self, tmp_path, save):
        marker = tmp_path / "it ran"
        save(_Evil(marker), tmp_path / "a.pruned_init")
        with pytest.raises(ValueError, match=r"a.pruned_init is not a stored array, or holds more.*numpy\.savez"):
            read_init_states(tmp_path / "a.pruned_init")
        assert not marker.exists()

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (np.zeros((51, 92)), "holds 51 init states; at most 50"),
            (np.zeros((0,)), "holds no init states"),
            (np.zeros((2, 3, 4)), r"must hold float \[n,D\], found float64 \[2, 3, 4\]"),
            (np.zeros((2, 3), dtype=np.int64), r"found int64 \[2, 3\]"),
        ],
    )
    def test_refused(self, tmp_path, value, message):
        np.savez(tmp_path / "a.npz", value)
        with pytest.raises(ValueError, match=message):
            read_init_states(tmp_path / "a.npz")

    def test_no_array(self, tmp_path):
        torch.save({"a": 1}, tmp_path / "a.init")
        with pytest.raises(ValueError, match="must hold a numpy array, found dict"):
            read_init_states(tmp_path / "a.init")
        np.savez(tmp_path / "a.npz", a=STATES, b=STATES)
        with pytest.raises(ValueError, match=r"one array, or one named 'states'; it has \['a', 'b'\]"):
            read_init_states(tmp_path / "a.npz")

    @pytest.mark.parametrize(
        "place",
        ["{suite}/t.npz", "{suite}/init_files/t.init", "init_files/s/t.init", "init_files/libero_newobj/s/t.init"],
    )
    def test_places(self, tmp_path, place):
        suite = tmp_path / "bddl_files" / "s"
        path = tmp_path / place.format(suite=suite)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        assert find_init_states(suite / "t.bddl") == path
        assert find_init_states(suite / "t_language_3.bddl") == path
        assert find_init_states(suite / "t_light_3.bddl") is None


class _Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_description(tmp_path):
    path = tmp_path / "a.bddl"
    path.write_text(
        "(define (problem LIBERO_Floor_Manipulation) ; (:language not this)\n(:domain robosuite)\n"
        "(:language Pick  the Milk)\n(:objects milk_1 milk_2 - milk\n basket_1 - basket)\n)"
    )
    assert read_description(path) == ("libero_floor_manipulation", "pick the milk", {"milk", "basket"})
    path.write_text("(define (problem a))")
    with pytest.raises(ValueError, match=r"a.bddl is no task description: it needs .*:language"):
        read_description(path)


@pytest.mark.libero
class TestFolders:
    @pytest.fixture
    def plus(self, tmp_path):
        """Files laid out as in LIBERO-Plus: a task of libero_spatial, reworded, and with a layout of its own."""
        spatial = load_suite("libero_spatial")
        task = Path(spatial.bddl_files[2])
        folder, states = tmp_path / "bddl_files" / "libero_spatial", tmp_path / "init_files" / "libero_spatial"
        layout = tmp_path / "init_files" / "libero_newobj" / "libero_spatial"
        for each in (folder, states, layout):
            each.mkdir(parents=True)
        shutil.copy(task, folder)
        shutil.copy(task, folder / f"{task.stem}_add_1.bddl")
        words = task.read_text().replace("Pick the akita black bowl", "Fetch me the bowl")
        (folder / f"{task.stem}_language_4.bddl").write_text(words)
        torch.save(spatial.init_states[2], states / f"{task.stem}.pruned_init")
        torch.save(spatial.init_states[2][7], layout / f"{task.stem}_add_1.pruned_init")
        return folder, task.stem

    def test_contents(self, plus):
        folder, name = plus
        suite, spatial = load_suite(str(folder)), load_suite("libero_spatial")
        # In alphabetical order: the task itself, _add_1, _language_4.
        assert [Path(path).stem for path in suite.bddl_files] == [name, f"{name}_add_1", f"{name}_language_4"]
        known = spatial.instructions[2]
        assert suite.instructions[:2] == (known, known)
        assert suite.instructions[2].startswith("fetch me the bowl from table center")
        assert suite.horizons == (240, 240, 240)
        assert [len(states) for states in suite.init_states] == [50, 1, 50]
        np.testing.assert_array_equal(suite.init_states[1], spatial.init_states[2][7:8])

    def test_pattern_and_mix(self, plus):
        folder, name = plus
        mix = load_suite(f"{folder}/*_language_*.bddl+libero_goal")
        assert len(mix) == 11
        assert Path(mix.bddl_files[0]).stem == f"{name}_language_4"

    @pytest.mark.parametrize(
        ("ending", "reason"),
        [
            ("light_45", "its light is made by the engine of LIBERO-Plus"),
            ("table_3", "its background texture is"),
            ("tb_3", "its background texture is"),
            ("language_4_view_0_0_100_0_0_initstate_0", "its camera, robot pose or sensor noise is"),
            ("view_0_0_100_2_352_initstate_5_noise_7", "its camera, robot pose or sensor noise is"),
        ],
    )
    def test_what_needs_another_engine(self, plus, ending, reason):
        folder, name = plus
        shutil.copy(folder / f"{name}.bddl", folder / f"{name}_{ending}.bddl")
        message = rf"1 of the 4 tasks .* cannot run: {reason}.*{name}_{ending}.*by a pattern"
        with pytest.raises(FileNotFoundError, match=message):
            load_suite(str(folder))

    @pytest.mark.parametrize(
        ("old", "new", "reason"),
        [
            (
                "LIBERO_Tabletop_Manipulation",
                "LIBERO_Tabletop_Manipulation_table_7",
                "scene .*_table_7 is not in LIBERO",
            ),
            ("- plate", "- golden_plate", "object types golden_plate are not in LIBERO"),
        ],
    )
    def test_what_libero_does_not_have(self, plus, old, new, reason):
        folder, name = plus
        path = folder / f"{name}_add_1.bddl"
        path.write_text(path.read_text().replace(old, new))
        with pytest.raises(FileNotFoundError, match=reason):
            load_suite(str(folder))

    def test_no_init_states(self, plus):
        folder, name = plus
        shutil.rmtree(folder.parents[1] / "init_files" / "libero_newobj")
        with pytest.raises(FileNotFoundError, match=rf"no init states .*\({name}_add_1\)"):
            load_suite(str(folder))

    def test_nothing_there(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"no task descriptions \(\*.bddl\) in "):
            load_suite(str(tmp_path))
