"""Text contexts on disk: one safetensors file, which holds what a text encoder said and says which encoder it was.

The tensor ``contexts`` [N,L,D] has a row per instruction; the metadata name the instructions, the prompt template and
the sha256 of every file that the rows depend on. Nothing here needs the encoder, nor transformers.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from wamrl_torchrl.files import replace_file
from wamrl_torchrl.messages import first_few

FORMAT = "1"
# Metadata key of the format's version; its presence tells a context cache from any other safetensors file.
_FORMAT_KEY = "wamrl_contexts"
_TENSOR = "contexts"
_JSON_FIELDS = ("instructions", "encoder_sha256", "tokenizer_sha256", "versions")


@dataclass(frozen=True, eq=False)
class ContextCache:
    """Contexts of instructions and where they come from.

    Attributes:
        contexts: floating point ``[N,L,D]``, padding positions zero; row ``i`` belongs to ``instructions[i]``.
        instructions: bare, without the template, no two equal.
        template: the prompt that was encoded, with ``{task}`` where the instruction stood.
        encoder: sha256 of the files of the text encoder, by file name.
        tokenizer: sha256 of the files of the tokenizer, by file name.
        versions: versions of the libraries that made the rows, by name; several if the file was extended later.

    Raises:
        ValueError: ``contexts`` has another shape or dtype, or an instruction occurs twice.
    """

    contexts: Tensor
    instructions: tuple[str, ...]
    template: str
    encoder: Mapping[str, str]
    tokenizer: Mapping[str, str]
    versions: Mapping[str, Sequence[str]]

    def __post_init__(self) -> None:
        shape = tuple(self.contexts.shape)
        if len(shape) != 3 or shape[0] != len(self.instructions) or not self.contexts.is_floating_point():
            raise ValueError(
                f"contexts must be floating point [N,L,D] with a row for each of the {len(self.instructions)} "
                f"instructions, found {self.contexts.dtype} {shape}"
            )
        if len(set(self.instructions)) != len(self.instructions):
            twice = sorted({text for text in self.instructions if self.instructions.count(text) > 1})
            raise ValueError(f"instructions must differ, found twice: {twice}")

    @property
    def length(self) -> int:
        """Positions L of a context."""
        return self.contexts.shape[1]

    def missing(self, instructions: Iterable[str]) -> list[str]:
        """Those of ``instructions`` that have no row, each once, in their order."""
        return [text for text in dict.fromkeys(instructions) if text not in self.instructions]

    def select(self, instructions: Sequence[str]) -> Tensor:
        """Copy the rows of ``instructions``, in their order, which may repeat: ``[len(instructions),L,D]``.

        Raises:
            KeyError: an instruction has no row.
        """
        missing = self.missing(instructions)
        if missing:
            raise KeyError(f"no context for {quote_some(missing)}")
        row = {text: i for i, text in enumerate(self.instructions)}
        return self.contexts.index_select(0, torch.tensor([row[text] for text in instructions], dtype=torch.int64))


def quote_some(texts: Sequence[str]) -> str:
    """The first three texts, quoted, and how many more there are; for messages."""
    return first_few(map(repr, texts), most=3, separator=", ")


def build_command(path: str | Path, instructions: Sequence[str] = ()) -> str:
    """Shell command that adds ``instructions`` to the cache ``path``; the first three stand for a longer list."""
    words = ["wamrl-context", "build", "--text-encoder", "PATH", "--tokenizer", "PATH", "--out", str(path)]
    words += ["--instruction", *instructions[:3]] if instructions else []
    return shlex.join(words) + (" ..." if len(instructions) > 3 or not instructions else "")


def file_hashes(files: Iterable[Path]) -> dict[str, str]:
    """sha256 of files by their names, in hexadecimal; read in parts, as an encoder has 11 GB."""
    hashes = {}
    for path in files:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while part := file.read(1 << 22):
                digest.update(part)
        hashes[path.name] = digest.hexdigest()
    return hashes


def contexts_hash(contexts: Tensor) -> str:
    """sha256 of the bytes of a CPU tensor, in hexadecimal."""
    return hashlib.sha256(contexts.contiguous().view(torch.uint8).numpy().data).hexdigest()


def write_context_cache(cache: ContextCache, path: str | Path) -> Path:
    """Write a cache; a file that is there is replaced only when the new one is complete.

    Returns:
        the path.
    """
    contexts = cache.contexts.detach().cpu().contiguous()
    fields = {
        "instructions": cache.instructions,
        "encoder_sha256": dict(cache.encoder),
        "tokenizer_sha256": dict(cache.tokenizer),
        "versions": {name: list(versions) for name, versions in cache.versions.items()},
    }
    metadata = {
        _FORMAT_KEY: FORMAT,
        "template": cache.template,
        "length": str(cache.length),
        "contexts_sha256": contexts_hash(contexts),
        **{name: json.dumps(value) for name, value in fields.items()},
    }
    return replace_file(path, lambda temporary: save_file({_TENSOR: contexts}, temporary, metadata=metadata))


def read_context_cache(path: str | Path) -> ContextCache:
    """Read a cache and check that it is whole.

    Raises:
        FileNotFoundError: there is no such file; the message has the command that makes it.
        ValueError: the file is damaged, is no context cache, or has a format that this version does not read.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no context cache {path}; make it with: {build_command(path)}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if _FORMAT_KEY not in metadata:
                raise ValueError(f"{path} is a safetensors file but no context cache: its metadata lack {_FORMAT_KEY}")
            if metadata[_FORMAT_KEY] != FORMAT:
                raise ValueError(f"{path} has format {metadata[_FORMAT_KEY]!r}, this version reads {FORMAT!r}")
            contexts = file.get_tensor(_TENSOR)
    except SafetensorError as error:
        raise ValueError(f"cannot read the context cache {path}: {error}") from error
    try:
        fields = {name: json.loads(metadata[name]) for name in _JSON_FIELDS}
        template, length, expected = metadata["template"], int(metadata["length"]), metadata["contexts_sha256"]
    except (KeyError, ValueError) as error:
        raise ValueError(f"the metadata of the context cache {path} are damaged: {error!r}") from error
    found = contexts_hash(contexts)
    if found != expected:
        raise ValueError(
            f"the contexts in {path} are damaged: their sha256 is {found}, the file says {expected}; "
            "build it again with --overwrite"
        )
    try:
        cache = ContextCache(
            contexts=contexts,
            instructions=tuple(fields["instructions"]),
            template=template,
            encoder=fields["encoder_sha256"],
            tokenizer=fields["tokenizer_sha256"],
            versions=fields["versions"],
        )
    except ValueError as error:
        raise ValueError(f"the context cache {path} is damaged: {error}") from error
    if cache.length != length:
        raise ValueError(f"the context cache {path} is damaged: {cache.length} positions, the file says {length}")
    return cache
