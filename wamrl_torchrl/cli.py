"""What the command-line tools share: hydra on top, one readable line for a user's mistake at the bottom."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import hydra
from omegaconf import DictConfig
from rich.console import Console

from wamrl_torchrl.config import CONFIG_DIR, RunConfig, parse_config

#: Raised for bad options, files and environments, with messages that name them.
USER_ERRORS = (ValueError, KeyError, RuntimeError, FileNotFoundError, FileExistsError, ImportError)


@contextmanager
def user_errors(name: str) -> Iterator[None]:
    """Turn a user's mistake into one readable line and exit status 1; ``HYDRA_FULL_ERROR=1`` shows the whole of it."""
    try:
        yield
    except USER_ERRORS as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        # A KeyError's own text is the repr of its message; those of libraries may have several lines.
        message = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
        sys.exit(f"{name}: {' '.join(line.strip() for line in message.splitlines())}\n(HYDRA_FULL_ERROR=1 shows where)")


def command(name: str, run: Callable[[RunConfig, Console], None]) -> Callable[[], None]:
    """Make an entry point that composes the configuration from the command line and runs ``run`` on it."""

    @hydra.main(version_base="1.3", config_path=CONFIG_DIR, config_name="train")
    def entry(raw: DictConfig) -> None:
        with user_errors(name):
            run(parse_config(raw), Console())

    return entry
