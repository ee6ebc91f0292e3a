"""OpenGL of the simulators: backend, GPU, and environment variables."""

from __future__ import annotations

import pytest

from wamrl_torchrl.envs import libero, libero_gl
from wamrl_torchrl.envs.libero import LiberoEnv
from wamrl_torchrl.envs.libero_gl import choose_devices, choose_gl, render_threads, worker_environment


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """A machine with 4 GPUs that all render, and nothing set."""
    for name in ("CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID", "MUJOCO_GL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(libero_gl, "_count_gpus", lambda: 4)
    monkeypatch.setattr(libero_gl, "_probe_gl", lambda backend, device: (device < 4, f"GPU {device}"))


class TestDevices:
    @pytest.mark.parametrize(
        ("visible", "told", "expected"),
        [(None, None, 0), ("2,3", None, 2), (" 3 ,1", None, 3), ("2,3", "3", 3), ("", None, 0), ("-1", None, 0)],
    )
    def test_default(self, monkeypatch, visible, told, expected):
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        if told is not None:
            monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", told)
        assert choose_devices() == (expected,)

    def test_asked(self, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f0e")
        assert choose_devices([3, 1]) == (3, 1)

    @pytest.mark.parametrize("uuid", ["GPU-8f0e,GPU-1a2b", "MIG-8f0e"])
    def test_uuid(self, monkeypatch, uuid):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", uuid)
        with pytest.raises(ValueError, match=f"CUDA_VISIBLE_DEVICES={uuid} gives GPUs by UUID.*env.render_devices"):
            choose_devices()
        monkeypatch.setenv("MUJOCO_GL", "osmesa")
        assert choose_devices() == (0,)

    def test_uuid_of_the_only_gpu(self, monkeypatch):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f0e")
        monkeypatch.setattr(libero_gl, "_count_gpus", lambda: 1)
        assert choose_devices() == (0,)

    @pytest.mark.parametrize("devices", [[], [0, -1]])
    def test_refused(self, devices):
        with pytest.raises(ValueError, match="render_devices must be EGL device numbers from 0 on, at least one"):
            choose_devices(devices)

    def test_no_number(self, monkeypatch):
        monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "GPU-1")
        with pytest.raises(ValueError, match="MUJOCO_EGL_DEVICE_ID must be a number from 0 on, got 'GPU-1'"):
            choose_devices()


class TestBackend:
    def test_gpu(self, monkeypatch):
        assert choose_gl() == "egl"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")  # does not render
        assert choose_gl() == "osmesa"

    @pytest.mark.parametrize("hidden", ["", "-1", "-1,0"])
    def test_hidden_gpus(self, monkeypatch, hidden):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert choose_gl() == "osmesa"
        monkeypatch.setenv("MUJOCO_GL", "egl")
        assert choose_gl() == "egl"

    def test_that_needs_a_screen(self, monkeypatch):
        monkeypatch.setenv("MUJOCO_GL", "glfw")
        with pytest.raises(ValueError, match="MUJOCO_GL=glfw needs a screen; set it to egl"):
            choose_gl()

    def test_check_names_the_device(self):
        check = libero_gl.check_gl([0, 5])
        assert not check.ok
        assert check.detail.startswith("device 5: GPU 5; apt-get install")
        assert libero_gl.check_gl([0, 1]).ok


def test_worker_environment(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    names = ("MUJOCO_GL", "PYOPENGL_PLATFORM", "MUJOCO_EGL_DEVICE_ID", "CUDA_VISIBLE_DEVICES", "LP_NUM_THREADS")
    assert [worker_environment(2)[name] for name in names] == ["egl", "egl", "2", "2", "1"]
    assert worker_environment()["MUJOCO_EGL_DEVICE_ID"] == "1"
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    assert worker_environment(2)["CUDA_VISIBLE_DEVICES"] == "1,2"


@pytest.mark.parametrize(("cores", "processes", "threads"), [(2, 1, 2), (2, 2, 1), (2, 5, 1), (16, 1, 2), (16, 6, 2)])
def test_software_rendering_shares_the_cores(monkeypatch, cores, processes, threads):
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(cores)))
    assert render_threads(processes) == threads
    assert worker_environment(threads=threads)["LP_NUM_THREADS"] == str(threads)


@pytest.mark.libero
class TestLiberoEnv:
    def test_devices_are_dealt_in_turn(self, monkeypatch):
        class Started(Exception):
            pass

        def start(*args, environs, **options):
            raise Started([environ["MUJOCO_EGL_DEVICE_ID"] for environ in environs])

        monkeypatch.setattr(libero, "SimPool", start)
        with pytest.raises(Started) as started:
            LiberoEnv("libero_spatial", 5, render_devices=[2, 0])
        assert started.value.args[0] == ["2", "0", "2", "0", "2"]


@pytest.mark.libero
def test_no_opengl(monkeypatch):
    monkeypatch.undo()  # the true machine
    monkeypatch.setenv("MUJOCO_GL", "egl")
    with pytest.raises(RuntimeError, match=r"(?s)OpenGL \(egl\): device 99: .*apt-get install -y libosmesa6 libegl1"):
        LiberoEnv("libero_spatial", 1, render_devices=[99])
