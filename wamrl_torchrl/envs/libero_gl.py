"""OpenGL of the simulator processes: which backend, which GPU, and the environment variables that say so."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from wamrl_torchrl.envs.libero_install import Check

APT = (
    "apt-get install -y libosmesa6 libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri libgles2 libopengl0 libglib2.0-0"
)  # fmt: skip
#: As far as measured: a second thread makes a picture a third cheaper.
MAX_RENDER_THREADS = 2
GL_PROBE = (
    "import mujoco; context = mujoco.GLContext(64, 64); context.make_current(); "
    "from OpenGL import GL; print(GL.glGetString(GL.GL_RENDERER).decode())"
)


# ---- which GPU ------------------------------------------------------------------------------------------------------
def _visible_gpus() -> list[str] | None:
    """Entries of ``CUDA_VISIBLE_DEVICES``, none of them if it hides all GPUs; None if it is not set."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    entries = [entry.strip() for entry in value.split(",")]
    # As CUDA reads it: what follows an invalid entry is hidden too.
    hidden = next((i for i, entry in enumerate(entries) if entry in ("", "-1")), len(entries))
    return entries[:hidden]


def choose_devices(devices: Sequence[int] | None = None) -> tuple[int, ...]:
    """EGL numbers of the GPUs to render on; slot ``i`` of an environment takes the ``i``-th of them, cyclically.

    EGL numbers all GPUs that the process can open (in a container, those that were given to it) and knows nothing of
    ``CUDA_VISIBLE_DEVICES``, whose numbers mean the same GPUs, ``cuda:0`` being the first one listed.

    Args:
        devices: EGL numbers. Without them ``MUJOCO_EGL_DEVICE_ID`` decides, then the first entry of
            ``CUDA_VISIBLE_DEVICES``, then it is GPU 0.

    Raises:
        ValueError: a number is negative or there is none, or the visible GPUs are given by UUID and there are several.
    """
    if devices is not None:
        if not devices or any(device < 0 for device in devices):
            raise ValueError(f"render_devices must be EGL device numbers from 0 on, at least one, got {list(devices)}")
        return tuple(devices)
    device = _default_device()
    if device is None and choose_gl() == "egl":
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} gives GPUs by UUID, which EGL cannot look up; "
            "say which to render on by number, with render_devices (env.render_devices) or MUJOCO_EGL_DEVICE_ID"
        )
    return (device or 0,)


def _default_device() -> int | None:
    """What :func:`choose_devices` takes if it is not told; None if that is given by its UUID, among several."""
    told = os.environ.get("MUJOCO_EGL_DEVICE_ID")
    if told is not None:
        if not told.isdigit():
            raise ValueError(f"MUJOCO_EGL_DEVICE_ID must be a number from 0 on, got {told!r}")
        return int(told)
    first = (_visible_gpus() or ["0"])[0]
    if first.isdigit():
        return int(first)
    return 0 if _count_gpus() == 1 else None


def _count_gpus() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


# ---- which backend --------------------------------------------------------------------------------------------------
def choose_gl() -> str:
    """The OpenGL backend: ``MUJOCO_GL`` if set, else ``egl`` where a GPU renders, else ``osmesa`` (software).

    A GPU does not render by default where ``CUDA_VISIBLE_DEVICES`` hides all of them.

    Raises:
        ValueError: ``MUJOCO_GL`` names a backend that needs a screen.
    """
    asked = os.environ.get("MUJOCO_GL", "").lower()
    if asked in ("egl", "osmesa"):
        return asked
    if asked:
        raise ValueError(f"MUJOCO_GL={asked} needs a screen; set it to egl (GPU) or osmesa (software), or unset it")
    has_gpu = _count_gpus() > 0 or any(Path("/dev/dri").glob("renderD*"))
    if not has_gpu or _visible_gpus() == []:
        return "osmesa"
    return "egl" if _probe_gl("egl", _default_device() or 0)[0] else "osmesa"


def _gl_variables(backend: str, device: int) -> dict[str, str]:
    variables = {"MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend}
    if backend == "egl":
        # robosuite takes CUDA_VISIBLE_DEVICES for EGL's device number unless told, and wants the two to agree. A
        # simulator computes nothing with CUDA, so it loses nothing.
        variables |= {"MUJOCO_EGL_DEVICE_ID": str(device), "CUDA_VISIBLE_DEVICES": str(device)}
    return variables


@functools.cache
def _probe_gl(backend: str, device: int) -> tuple[bool, str]:
    """Create an OpenGL context in a process of its own: a broken driver may crash, and a context is for ever."""
    environ = {**os.environ, **_gl_variables(backend, device)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", GL_PROBE], env=environ, capture_output=True, text=True, timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        return False, "no OpenGL context within 60 s"
    if done.returncode == 0:
        return True, done.stdout.strip()
    return False, (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]


def check_gl(devices: Sequence[int] | None = None) -> Check:
    """Whether the chosen OpenGL backend makes a context on every one of ``devices``, and with which renderer."""
    backend = choose_gl()
    for device in choose_devices(devices):
        ok, detail = _probe_gl(backend, device)
        if not ok:
            where = f"device {device}: " if backend == "egl" else ""
            return Check(f"OpenGL ({backend})", False, f"{where}{detail}; {APT}")
    return Check(f"OpenGL ({backend})", True, detail)


def render_threads(processes: int) -> int:
    """Threads of software rendering in each of ``processes`` simulators: they share the cores."""
    return max(1, min(MAX_RENDER_THREADS, len(os.sched_getaffinity(0)) // processes))


def worker_environment(device: int | None = None, *, threads: int = 1) -> dict[str, str]:
    """Environment variables of a simulator process: backend, device, and one thread for everything but rendering.

    Args:
        device: EGL number of the GPU to render on; the first of :func:`choose_devices` by default.

    Keyword Args:
        threads: of software rendering.
    """
    package_root = str(Path(__file__).parents[2])
    search = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        **_gl_variables(choose_gl(), choose_devices()[0] if device is None else device),
        "PYTHONPATH": os.pathsep.join(search),
        "LP_NUM_THREADS": str(threads),
        # Processes are the parallelism: no thread pools of BLAS or numba.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
        # The GL driver otherwise spins, and takes cores from the trainer.
        "__GL_YIELD": "USLEEP",
    }
