"""Parameters of models too big to hold twice: built without memory, then filled once where they are to live."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from wamrl_torchrl.modules.fastwam.codec import Codec
from wamrl_torchrl.modules.fastwam.config import FastWAMConfig
from wamrl_torchrl.modules.fastwam.context import ContextBank
from wamrl_torchrl.modules.fastwam.model import FastWAM

#: Mismatches named in an error; the rest is counted.
NAMED = 5


def build_empty(config: FastWAMConfig, codec: Codec, contexts: ContextBank) -> FastWAM:
    """Build a model whose parameters take no memory (meta device); its buffers are real.

    Give it weights with :func:`fill` or :func:`materialize`.
    """
    with init_empty_weights(include_buffers=False):
        return FastWAM(config, codec, contexts)


def materialize(
    model: FastWAM, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0
) -> FastWAM:
    """Give a model from :func:`build_empty` random weights on ``device``, in place; seconds at full size on a GPU.

    The weights follow the model's own initialisation, drawn on ``device`` in ``dtype``: they differ between devices.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            fresh = torch.empty_like(parameter, device=device, dtype=dtype)
            setattr(module, name, nn.Parameter(fresh, requires_grad=parameter.requires_grad))
    model.to(device)  # the buffers
    torch.manual_seed(seed)
    for module in reversed(list(model.modules())):  # an owner's own rule comes after those of its children
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    return model


def fill(
    module: nn.Module,
    tensors: Mapping[str, Tensor],
    *,
    source: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> None:
    """Give ``module`` the parameters and buffers in ``tensors``; names, shapes and kinds must match exactly.

    Each tensor is copied once, to ``device``. With memory-mapped ``tensors`` no second copy of the weights exists at
    any time.

    Args:
        module: the module; its parameters may be on the meta device. What required gradients still does.
        tensors: tensors by name.

    Keyword Args:
        source: where they come from, for error messages.
        device: where the module is to live.
        dtype: dtype of the parameters; as in ``tensors`` if None. Buffers keep theirs.

    Raises:
        ValueError: missing or unexpected names, another shape, or integers for floats; the first few are named. The
            module is then as it was.
    """
    check_tensors(module.state_dict(), tensors, source)
    parameters = {name for name, _ in module.named_parameters()}
    own = {
        name: tensors[name].to(device=device, dtype=dtype if name in parameters else None, copy=True)
        for name in module.state_dict()
    }
    module.load_state_dict(own, strict=True, assign=True)
    module.to(device)  # buffers that are not saved


def check_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], source: str) -> None:
    """Compare names, shapes and kinds (floating point or not).

    Raises:
        ValueError: they differ; the first few tensors are named with what was found and expected.
    """
    problems = [
        f"{key} has shape {tuple(found[key].shape)}, expected {tuple(value.shape)}"
        for key, value in expected.items()
        if key in found and found[key].shape != value.shape
    ]
    problems += [
        f"{key} is {found[key].dtype}, expected {value.dtype}"
        for key, value in expected.items()
        if key in found and found[key].is_floating_point() != value.is_floating_point()
    ]
    problems += [f"{key} is missing" for key in expected if key not in found]
    problems += [f"{key} is unexpected" for key in found if key not in expected]
    if problems:
        more = f" and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
        raise ValueError(f"{source} does not fit the model: {'; '.join(problems[:NAMED])}{more}")
