"""Text contexts for training: ``wamrl-context build`` encodes instructions, ``wamrl-context show`` lists a file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from wamrl_torchrl.build import choose_device
from wamrl_torchrl.cli import user_errors
from wamrl_torchrl.envs.libero_suites import SUITES
from wamrl_torchrl.envs.libero_suites import instructions as libero_instructions
from wamrl_torchrl.envs.tabletop import TABLETOP_INSTRUCTIONS
from wamrl_torchrl.modules.fastwam import text
from wamrl_torchrl.modules.fastwam.context_cache import (
    ContextCache,
    contexts_hash,
    file_hashes,
    read_context_cache,
    write_context_cache,
)
from wamrl_torchrl.report import progress_bar

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in text.DTYPES}
# Libraries that the encoding depends on, up to rounding.
_LIBRARIES = ("torch", "transformers", "tokenizers")


def build_context_cache(
    instructions: Sequence[str],
    out: str | Path,
    *,
    text_encoder: str | Path,
    tokenizer: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    length: int = text.CONTEXT_LENGTH,
    overwrite: bool = False,
    console: Console | None = None,
) -> ContextCache:
    """Encode instructions into the file ``out``; those that it has already are not encoded again.

    The text encoder is loaded only if there is something to encode.

    Args:
        instructions: bare, without a prompt template; repeated ones are encoded once.
        out: the file; made, extended, or left alone if it holds all of them.

    Keyword Args:
        text_encoder: file or directory, see :func:`wamrl_torchrl.modules.fastwam.text.load_text_encoder`.
        tokenizer: directory, see :func:`wamrl_torchrl.modules.fastwam.text.load_tokenizer`.
        device: where the encoder runs.
        dtype: of the encoder and of the file.
        length: positions of a context.
        overwrite: write a new file whatever ``out`` holds.
        console: where progress is shown.

    Returns:
        what ``out`` holds now.

    Raises:
        FileNotFoundError: text encoder or tokenizer are not there.
        ValueError: no instruction or an empty one; ``out`` is a directory; it is damaged, or was made by another
            encoder or tokenizer or with another template, length or dtype, and ``overwrite`` is not set; or what
            loading and encoding raise.
        ImportError: transformers is not installed.
    """
    out, console = Path(out), console or Console()
    wanted = tuple(dict.fromkeys(instructions))
    if not wanted or not all(instruction.strip() for instruction in wanted):
        raise ValueError(f"instructions must not be empty, got {list(wanted)}")
    if out.is_dir():
        raise ValueError(f"{out} is a directory; name a file, such as {out / 'contexts.safetensors'}")
    console.print("hashing text encoder and tokenizer")
    encoder_hashes = file_hashes(text.encoder_files(text_encoder))
    tokenizer_hashes = file_hashes(text.tokenizer_files(tokenizer))
    old = read_context_cache(out) if out.exists() and not overwrite else None
    if old is not None:
        checks = {
            "text encoder": _same_files(old.encoder, encoder_hashes),
            "tokenizer": _same_files(old.tokenizer, tokenizer_hashes),
            "template": old.template == text.TEMPLATE,
            "length": old.length == length,
            "dtype": old.contexts.dtype == dtype,
        }
        others = [name for name, same in checks.items() if not same]
        if others:
            raise ValueError(
                f"{out} was made with another {' and another '.join(others)}: pass --overwrite to replace it, or write "
                "to another file with --out"
            )
    new = list(wanted) if old is None else old.missing(wanted)
    if old is not None and not new:
        console.print(f"{out} is up to date: {len(old.instructions)} contexts", soft_wrap=True, highlight=False)
        return old

    console.print("loading the text encoder")
    words = text.load_tokenizer(tokenizer)
    encoder = text.load_text_encoder(text_encoder, device=device, dtype=dtype)
    prompts = [text.TEMPLATE.format(task=instruction) for instruction in new]
    with progress_bar(console, "text contexts", len(new)) as progress:
        contexts = text.encode_prompts(encoder, words, prompts, length=length, progress=progress)
    versions: dict[str, Sequence[str]] = {name: [metadata.version(name)] for name in _LIBRARIES}
    if old is not None:
        contexts = torch.cat((old.contexts, contexts))
        versions = {name: sorted({*old.versions.get(name, ()), *now}) for name, now in versions.items()}
    cache = ContextCache(
        contexts=contexts,
        instructions=(*(old.instructions if old is not None else ()), *new),
        template=text.TEMPLATE,
        encoder=encoder_hashes,
        tokenizer=tokenizer_hashes,
        versions=versions,
    )
    write_context_cache(cache, out)
    console.print(f"{out}: {len(cache.instructions)} contexts, {len(new)} of them new", soft_wrap=True, highlight=False)
    return cache


def _same_files(old: Mapping[str, str], new: Mapping[str, str]) -> bool:
    """Whether the contents agree; a file may have another name."""
    return sorted(old.values()) == sorted(new.values())


def show_context_cache(path: str | Path, console: Console) -> None:
    """Print what a context cache holds; raises as :func:`read_context_cache`."""
    cache = read_context_cache(path)
    count, length, width = cache.contexts.shape
    facts = {
        "contexts": f"{count} of {length} x {width}, {str(cache.contexts.dtype).removeprefix('torch.')}",
        "size": f"{Path(path).stat().st_size / 1e6:.2f} MB",
        "template": cache.template,
        **{f"encoder {name}": digest for name, digest in cache.encoder.items()},
        **{f"tokenizer {name}": digest for name, digest in cache.tokenizer.items()},
        "sha256 of contexts": contexts_hash(cache.contexts),
        **{name: ", ".join(versions) for name, versions in cache.versions.items()},
    }
    table = Table(title=escape(str(path)), title_justify="left", show_header=False)
    table.add_column()
    table.add_column(overflow="fold")  # a hash is of no use in part
    for name, value in facts.items():
        table.add_row(escape(name), escape(value))
    console.print(table)
    table = Table()
    for column in ("row", "tokens", "instruction"):
        table.add_column(column)
    tokens = (cache.contexts != 0).any(-1).sum(-1).tolist()
    for row, instruction in enumerate(cache.instructions):
        table.add_row(str(row), str(tokens[row]), escape(instruction))
    console.print(table)


def _build(args: argparse.Namespace, console: Console) -> None:
    instructions = [instruction for suite in args.suite for instruction in libero_instructions(suite)]
    instructions += [*(TABLETOP_INSTRUCTIONS if args.tabletop else ()), *args.instruction]
    if not instructions:
        raise ValueError("nothing to encode: pass --suite, --tabletop or --instruction")
    build_context_cache(
        instructions,
        args.out,
        text_encoder=args.text_encoder,
        tokenizer=args.tokenizer,
        device=choose_device(args.device),
        dtype=DTYPES[args.dtype],
        length=args.length,
        overwrite=args.overwrite,
        console=console,
    )


def _show(args: argparse.Namespace, console: Console) -> None:
    show_context_cache(args.file, console)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="wamrl-context", description=__doc__.replace("``", ""))
    commands = parser.add_subparsers(required=True)
    build = commands.add_parser(
        "build",
        help="encode instructions into a file, or add them to it",
        description="Encode instructions into a file. Those that the file has are kept and not encoded again.",
    )
    build.set_defaults(run=_build)
    paths = {
        "text-encoder": f"Wan's {text.WAN_FILE}, or a Hugging Face directory",
        "tokenizer": "Wan's directory google/umt5-xxl",
        "out": "safetensors file to make or to extend",
    }
    for name, meaning in paths.items():
        build.add_argument(f"--{name}", required=True, type=Path, metavar="PATH", help=meaning)
    what = build.add_argument_group("instructions, of which at least one is needed")
    what.add_argument(
        "--suite",
        nargs="+",
        action="extend",
        default=[],
        metavar="SUITE",
        help=f"LIBERO suites: {', '.join(SUITES)}, or what else env.suite takes",
    )
    what.add_argument("--tabletop", action="store_true", help="tasks of the table-top world")
    what.add_argument("--instruction", nargs="+", action="extend", default=[], metavar="TEXT", help="any sentences")
    build.add_argument("--device", default="auto", help="auto (the GPU if there is one), cpu, cuda:1, ...")
    build.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of the encoder and of the file")
    build.add_argument("--length", type=int, default=text.CONTEXT_LENGTH, help="positions of a context")
    build.add_argument("--overwrite", action="store_true", help="write a new file whatever --out holds")
    show = commands.add_parser("show", help="list what a file holds")
    show.set_defaults(run=_show)
    show.add_argument("file", type=Path, metavar="FILE")
    return parser


def main() -> None:
    """Entry point of ``wamrl-context``."""
    args = _parser().parse_args()
    with user_errors("wamrl-context"):
        args.run(args, Console())


if __name__ == "__main__":
    main()
