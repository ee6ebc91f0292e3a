"""LIBERO's suites, and what is said of an installation that cannot run them."""

from __future__ import annotations

import pytest

from wamrl_torchrl.envs import libero_suites
from wamrl_torchrl.envs.libero import LiberoEnv

pytestmark = pytest.mark.libero
OTHER = (2, 7, 5)


class TestSuites:
    @pytest.mark.parametrize(
        ("suite", "tasks", "width"),
        [
            ("libero_spatial", 10, 94),
            ("libero_object", 10, 112),
            ("libero_goal", 10, 81),
            ("libero_10", 10, 125),
            ("libero_90", 90, 125),
        ],
    )
    def test_contents(self, suite, tasks, width):
        loaded = libero_suites.load_suite(suite)
        assert len(libero_suites.instructions(suite)) == len(loaded) == tasks
        assert len(set(loaded.bddl_files)) == tasks
        assert loaded.sim_state_dim == width
        assert all(states.shape[0] == 50 for states in loaded.init_states)

    def test_instruction(self):
        expected = "pick up the black bowl from table center and place it on the plate"
        assert libero_suites.instructions("libero_spatial")[2] == expected

    def test_unknown(self):
        with pytest.raises(ValueError, match="unknown LIBERO suite 'libero_space'; known suites: libero_spatial, "):
            LiberoEnv("libero_space", 1)


class TestInstallation:
    def test_is_diagnosed(self):
        checks = libero_suites.check_libero()
        assert all(check.ok for check in checks), checks
        assert {"package libero", "package mujoco", "package robosuite", "assets"} < {check.check for check in checks}

    def test_missing_package(self, monkeypatch):
        monkeypatch.setattr(libero_suites.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ImportError, match=r"pip install 'wamrl_torchrl\[libero\]'"):
            libero_suites.require_libero()

    @pytest.mark.parametrize("package", ["mujoco", "robosuite"])
    def test_wrong_version(self, monkeypatch, package):
        monkeypatch.setitem(libero_suites.VERSIONS, package, "0.0.1")
        with pytest.raises(
            RuntimeError, match=rf"package {package}: needs 0.0.1, found .*pip install {package}==0.0.1"
        ):
            libero_suites.require_libero()

    def test_missing_assets(self, monkeypatch, tmp_path):
        (tmp_path / "config.yaml").write_text(f"assets: {tmp_path}\n")
        monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path))
        with pytest.raises(RuntimeError, match=rf"assets: no scenes in {tmp_path}: pip install"):
            libero_suites.require_libero()

    def test_backend_that_needs_a_screen(self, monkeypatch):
        monkeypatch.setenv("MUJOCO_GL", "glfw")
        with pytest.raises(ValueError, match="MUJOCO_GL=glfw needs a screen; set it to egl"):
            LiberoEnv("libero_spatial", 1)

    def test_no_opengl(self, monkeypatch):
        monkeypatch.setenv("MUJOCO_GL", "egl")
        monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "99")
        with pytest.raises(RuntimeError, match=r"(?s)OpenGL \(egl\): .*apt-get install -y libosmesa6 libegl1"):
            LiberoEnv("libero_spatial", 1)
