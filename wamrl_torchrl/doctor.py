"""Is everything there? ``wamrl-doctor`` tells, and says what to do about what is not."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

import torch
from rich.console import Console
from rich.table import Table

from wamrl_torchrl.envs.libero_gl import check_gl
from wamrl_torchrl.envs.libero_install import Check, check_installation

PACKAGES = ("torch", "torchrl", "tensordict", "hydra-core", "peft", "safetensors", "av")


def check_system() -> list[Check]:
    """Python, packages and accelerator."""
    checks = [Check("python", (3, 10) <= sys.version_info[:2] <= (3, 13), platform.python_version())]
    checks += [Check(f"package {name}", True, metadata.version(name)) for name in PACKAGES]
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none (the tiny preset needs none)"
    return [*checks, Check("GPU", True, gpu)]


def check_libero() -> list[Check]:
    """The simulator: packages, versions, assets and, if there is one, OpenGL. Takes a second or two."""
    checks = check_installation()
    return [*checks, check_gl()] if checks[0].ok else checks


def main() -> None:
    """Entry point of ``wamrl-doctor``; exits with 1 if something is wrong."""
    checks = [*check_system(), *check_libero()]
    table = Table(title="wamrl_torchrl", title_justify="left")
    for column in ("check", "", "found"):
        table.add_column(column)
    for check in checks:
        table.add_row(check.check, "ok" if check.ok else "[red]WRONG[/red]", check.detail)
    Console().print(table)
    sys.exit(0 if all(check.ok for check in checks) else 1)


if __name__ == "__main__":
    main()
