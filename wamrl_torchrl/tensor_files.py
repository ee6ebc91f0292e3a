"""Files of tensors, read without running code that they may hold and checked before anything is done with them."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from wamrl_torchrl.messages import first_few

#: Suffixes of what torch.save wrote.
PICKLES = (".pth", ".pt", ".bin")


def read_safetensors(path: str | Path) -> dict[str, Tensor]:
    """Map a safetensors file into memory: CPU tensors by name, which read from the file for as long as they live.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged or no safetensors file.
    """
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"cannot read {path}: it is damaged, incomplete or no safetensors file ({error})") from error


def read_pickle(path: str | Path) -> Any:
    """Read what torch.save wrote, on the CPU; no code in it is run. Tensors are mapped, not read, where the format can.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds more than tensors and plain containers, is damaged, or was not written by torch.save.
    """
    try:
        # Only the zip format can be mapped; files older than torch 1.6 are read.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        # Torch's own advice, which comes first, is to run the code.
        reason = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0].partition(". ")[0]
        raise ValueError(
            f"cannot read {path}: it is damaged, or holds more than plain tensors, so that reading it would run code "
            f"({reason}); save the tensors alone where you trust the file"
        ) from error
    except Exception as error:  # a damaged pickle fails with whatever its bytes happen to ask for
        if isinstance(error, OSError) and error.filename is not None:  # it cannot be opened
            raise
        reason = f"{type(error).__name__}: {str(error).partition('. ')[0]}"
        raise ValueError(f"cannot read {path}: it is damaged, incomplete or no torch file ({reason})") from error


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """Read tensors by name from a safetensors file or from what torch.save wrote, told apart by the suffix.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: another suffix, content that is no flat dict of tensors, or what the two readers raise.
    """
    suffix = Path(path).suffix
    if suffix == ".safetensors":
        return read_safetensors(path)
    if suffix not in PICKLES:
        raise ValueError(f"cannot read {path}: its suffix is neither .safetensors nor one of {', '.join(PICKLES)}")
    return named_tensors(read_pickle(path), path)


def named_tensors(content: Any, source: str | Path) -> dict[str, Tensor]:
    """Return ``content`` as what it has to be: a flat dict of tensors by name.

    Raises:
        ValueError: it is something else; ``source`` is named.
    """
    if not isinstance(content, dict):
        raise ValueError(f"{source} must hold tensors by name, found {type(content).__name__}")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ValueError(f"{source} must hold tensors by name, found {type(value).__name__} under {name!r}")
    return content


def check_tensors(
    expected: Mapping[str, Tensor | Sequence[int]],
    found: Mapping[str, Tensor],
    source: str | Path,
    *,
    what: str = "the model",
    names: Mapping[str, str] | None = None,
) -> None:
    """Compare names, shapes and kinds: floating point of 16 bits or more goes for any other, and so do integers.

    Args:
        expected: tensors by name, or the shapes of floating-point ones.
        found: tensors by name.
        source: where they come from, for the message.

    Keyword Args:
        what: what they are for, for the message.
        names: from names in ``expected`` to those in ``found``, where they differ; two may share one.

    Raises:
        ValueError: they differ; the first few tensors are named, as in ``found``, with what was found and expected.
    """
    wanted = {(names or {}).get(name, name): value for name, value in expected.items()}
    pairs = [(name, found[name], value) for name, value in wanted.items() if name in found]
    problems = [f"{name} is missing" for name in wanted if name not in found]
    problems += [f"{name} is unexpected" for name in found if name not in wanted]
    for name, have, want in pairs:
        shape = tuple(want.shape if isinstance(want, Tensor) else want)
        if tuple(have.shape) != shape:
            problems.append(f"{name} has shape {tuple(have.shape)}, expected {shape}")
        kind = want.dtype if isinstance(want, Tensor) and not want.is_floating_point() else None
        floating = have.is_floating_point()
        if (not floating or have.element_size() < 2) if kind is None else floating:
            problems.append(f"{name} has dtype {have.dtype}, expected {kind or 'unquantised floating point'}")
    refuse(problems, source, what=what)


def refuse(problems: Sequence[str], source: str | Path, *, what: str) -> None:
    """Raise a ValueError that names the first few ``problems`` for which ``source`` does not fit ``what``, if any."""
    if problems:
        raise ValueError(f"{source} does not fit {what}: {first_few(problems)}")
