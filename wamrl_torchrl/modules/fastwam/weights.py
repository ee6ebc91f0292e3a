"""Parameters of models too big to hold twice: built without memory, then filled once where they are to live."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from wamrl_torchrl.modules.fastwam.codec import Codec
from wamrl_torchrl.modules.fastwam.config import FastWAMConfig
from wamrl_torchrl.modules.fastwam.context import ContextBank
from wamrl_torchrl.modules.fastwam.model import FastWAM
from wamrl_torchrl.tensor_files import check_tensors


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

    Raises:
        ValueError: the model has adapters, whose start is not that of a layer; add them afterwards.
    """
    if any(".lora_" in name for name, _ in model.named_parameters()):
        raise ValueError("give a model random weights before it gets adapters, not after")
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
    source: str | Path,
    what: str = "the model",
    names: Mapping[str, str] | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    copy: bool = True,
) -> None:
    """Give ``module`` the parameters and buffers in ``tensors``; names, shapes and kinds must match exactly.

    Each tensor is cast and copied to ``device`` by itself. With memory-mapped ``tensors`` no second copy of the weights
    exists at any time.

    Args:
        module: the module; its parameters may be on the meta device. What required gradients still does.
        tensors: tensors by name.

    Keyword Args:
        source: where they come from, for error messages.
        what: what ``module`` is, for error messages.
        names: from names in ``module`` to those in ``tensors``, where they differ; two that share one share memory.
        device: where the module is to live.
        dtype: dtype of the parameters; as in ``tensors`` if None. Buffers keep theirs.
        copy: copy also what has its device and dtype already. Otherwise it stays the tensor given, which if mapped
            reads from the file for as long as it lives.

    Raises:
        ValueError: as :func:`~wamrl_torchrl.tensor_files.check_tensors`. The module is then as it was.
    """
    blank = module.state_dict()
    check_tensors(blank, tensors, source, what=what, names=names)
    keys = {name: (names or {}).get(name, name) for name in blank}
    parameters = {keys[name] for name, _ in module.named_parameters()}
    moved = {
        key: tensor.to(device=device, dtype=dtype if key in parameters else None, copy=copy)
        for key, tensor in tensors.items()
    }
    module.load_state_dict({name: moved[key] for name, key in keys.items()}, strict=True, assign=True)
    module.to(device)  # buffers that are not saved
