"""Text contexts by task id: strings stay out of hot data, and no text encoder is needed while training."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from wamrl_torchrl import schema
from wamrl_torchrl.modules.fastwam.context_cache import build_command, quote_some, read_context_cache


def _hashed_vector(name: str, size: int) -> Tensor:
    """Fixed draw from N(0, 1) for a name, the same in every process; float32 [size]."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


class ContextBank(nn.Module):
    """Context of every task, looked up by ``task_id``.

    The contexts are a buffer, so they move and are saved with the policy. There is no mask: FastWAM attends to all
    positions and zero-pads short instructions.

    Args:
        contexts: floating point ``[num_tasks, L, text_dim]``, row ``i`` belonging to ``task_id`` ``i``.

    Keyword Args:
        instructions: the bare instruction of every task, by which a policy is checked against the world it is run in;
            None if it is not known.

    Raises:
        ValueError: ``contexts`` is not floating point, or not of that shape with at least one task, or there is not one
            instruction per task.
    """

    contexts: Tensor

    def __init__(self, contexts: Tensor, *, instructions: Sequence[str] | None = None) -> None:
        super().__init__()
        if contexts.ndim != 3 or len(contexts) == 0 or not contexts.is_floating_point():
            raise ValueError(
                "contexts must be floating point [num_tasks, L, text_dim] with at least one task, "
                f"found {contexts.dtype} {tuple(contexts.shape)}"
            )
        if instructions is not None and len(instructions) != len(contexts):
            raise ValueError(f"{len(contexts)} contexts need as many instructions, found {len(instructions)}")
        self.instructions = None if instructions is None else list(instructions)
        self.register_buffer("contexts", contexts)

    @classmethod
    def hashed(cls, instructions: Sequence[str], *, length: int, text_dim: int) -> ContextBank:
        """Make contexts that tell instructions apart without a text encoder.

        Word ``i`` of an instruction gives position ``i`` the vector ``(w + p) / sqrt(2)``: ``w`` is a fixed Gaussian
        vector of the lower-case word and ``p`` one of the position, both from a hash. The position must be in the
        vector, as cross-attention sees its context as a set. Entries have unit variance; the rest is zero padding.

        Args:
            instructions: one per task, in the order of ``task_id``; bare, without a prompt template.

        Keyword Args:
            length: positions L of a context.
            text_dim: width of a context.

        Raises:
            ValueError: an instruction is empty or has more than ``length`` words.
        """
        contexts = torch.zeros(len(instructions), length, text_dim)
        for task, instruction in enumerate(instructions):
            words = instruction.lower().split()
            if not 1 <= len(words) <= length:
                raise ValueError(
                    f"instruction {instruction!r} of task {task} has {len(words)} words; "
                    f"a context holds 1 to length={length}"
                )
            for position, word in enumerate(words):
                vector = _hashed_vector(f"word {word}", text_dim) + _hashed_vector(f"position {position}", text_dim)
                contexts[task, position] = vector / math.sqrt(2)
        return cls(contexts, instructions=instructions)

    @classmethod
    def from_cache(cls, path: str | Path, instructions: Sequence[str]) -> ContextBank:
        """Take contexts from a file of ``wamrl-context build``; no text encoder is loaded.

        Args:
            path: the file.
            instructions: one per task, in the order of ``task_id``; bare, without a prompt template.

        Returns:
            a bank in the dtype of the file, bfloat16 unless it was built otherwise.

        Raises:
            KeyError: the file lacks an instruction; the message has the command that adds it.
            FileNotFoundError: there is no such file.
            ValueError: the file is damaged or no context cache, or there are no instructions.
        """
        cache = read_context_cache(path)
        missing = cache.missing(instructions)
        if missing:
            raise KeyError(
                f"the context cache {path} has no {quote_some(missing)}; add with: {build_command(path, missing)}"
            )
        return cls(cache.select(instructions), instructions=instructions)

    @property
    def num_tasks(self) -> int:
        """Number of tasks."""
        return len(self.contexts)

    def forward(self, task_id: Tensor) -> Tensor:
        """Look up contexts.

        Args:
            task_id: int64 ``[B]`` or ``[B,1]``; :data:`wamrl_torchrl.schema.PARKED` marks a slot without an episode
                and gives a zero context.

        Returns:
            ``[B, L, text_dim]`` in the dtype of the bank.

        Raises:
            ValueError: ``task_id`` is not int64 or has another shape.
            KeyError: an id that the bank does not hold. On a GPU this is the device's own index error, since looking at
                the ids would wait for the device.
        """
        if task_id.dtype != torch.int64 or task_id.ndim not in (1, 2) or (task_id.ndim == 2 and task_id.shape[1] != 1):
            raise ValueError(f"task_id must be int64 [B] or [B,1], found {task_id.dtype} {tuple(task_id.shape)}")
        ids = task_id.reshape(-1)
        parked = ids == schema.PARKED
        rows = ids.masked_fill(parked, 0)
        if rows.device.type == "cpu":
            unknown = (rows < 0) | (rows >= self.num_tasks)
            if bool(unknown.any()):
                raise KeyError(
                    f"task_id {ids[unknown].unique().tolist()} not in this context bank of {self.num_tasks} tasks "
                    f"(0..{self.num_tasks - 1}); build it from the instructions of the suite that is run"
                )
        return self.contexts.index_select(0, rows).masked_fill(parked[:, None, None], 0)
