"""Weights from and to other FastWAM code: ``wamrl-weights import``, ``export`` and ``show``."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from wamrl_torchrl.build import cached_contexts
from wamrl_torchrl.cli import user_errors
from wamrl_torchrl.data.stats import DatasetStats
from wamrl_torchrl.envs.libero_suites import instructions as libero_instructions
from wamrl_torchrl.envs.tabletop import TABLETOP_INSTRUCTIONS
from wamrl_torchrl.modules.checkpoint import CONFIG_FILE, TENSOR_FILE, load_policy, save_policy
from wamrl_torchrl.modules.fastwam.codec import TinyCodec, make_codec
from wamrl_torchrl.modules.fastwam.config import ACTION_MODES, PRESETS, FastWAMConfig, preset
from wamrl_torchrl.modules.fastwam.released import ForeignCheckpoint, load_checkpoint, read_checkpoint, save_released
from wamrl_torchrl.modules.policy import FlowPolicy, IDMConfig
from wamrl_torchrl.report import metric_table

TABLETOP = "tabletop"
#: Clips that the VAE codes at once: its time is linear in them, and each takes about 1 GB while it is decoded.
CLIPS = 8
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
NO_SHIFT = (
    "{path} does not tell its action shift, and a wrong one costs success silently: give --action-shift (1.0 for "
    "optional-IDM weights, 5.0 for the older uncond ones)"
)


def _config(checkpoint: ForeignCheckpoint, args: argparse.Namespace) -> FastWAMConfig:
    """The model's configuration: given options, and what the checkpoint tells where none is given.

    That the two agree is checked when the weights are loaded.
    """
    told = checkpoint.recipe
    shift = told.action_shift if args.action_shift is None and told is not None else args.action_shift
    modes = told.action_modes if args.action_modes is None and told is not None else args.action_modes
    if shift is None:
        raise ValueError(NO_SHIFT.format(path=checkpoint.path))
    return replace(
        preset(args.preset, image_size=tuple(args.image_size)),
        action_shift=shift,
        video_shift=args.video_shift,
        action_modes=("first_frame",) if modes is None else tuple(modes),
    )


def import_weights(args: argparse.Namespace, console: Console) -> None:
    """Turn a foreign checkpoint with its statistics, VAE and contexts into a policy directory."""
    if (args.out / CONFIG_FILE).exists() and not args.overwrite:
        raise FileExistsError(f"{args.out} holds a policy already; choose another --out, or --overwrite it")
    checkpoint = read_checkpoint(args.checkpoint)
    config = _config(checkpoint, args)
    stats = DatasetStats.from_json(args.stats)
    instructions = TABLETOP_INSTRUCTIONS if args.suite == TABLETOP else libero_instructions(args.suite)
    contexts = cached_contexts(args.contexts, instructions, config)
    codec = make_codec({"kind": "wan", "path": str(args.vae.absolute()), "dtype": args.dtype, "batch_size": CLIPS})
    with console.status(f"reading {checkpoint.path}"):
        model = load_checkpoint(checkpoint, config, codec, contexts, dtype=DTYPES[args.dtype])
    with console.status(f"writing {args.out}"):
        idm = None if "first_frame" in config.action_modes else IDMConfig()
        save_policy(FlowPolicy(model, stats, idm=idm), args.out)
    show_policy(args.out, console)


def export_weights(args: argparse.Namespace, console: Console) -> None:
    """Write a policy's weights in the released layout, adapters merged, and its statistics beside them."""
    stats = args.out.with_name(f"{args.out.stem}_dataset_stats.json")
    for path in (args.out, stats):
        if path.exists() and not args.overwrite:
            raise FileExistsError(f"{path} exists already; choose another --out, or --overwrite it")
    policy = load_policy(args.policy, codec=TinyCodec())  # no frames are coded
    with console.status(f"writing {args.out}"):
        save_released(policy.model, args.out)
        policy.stats.to_json(stats)
    console.print(f"weights {args.out}\nstatistics {stats}")


def show(args: argparse.Namespace, console: Console) -> None:
    """Describe a policy directory or a foreign checkpoint, without giving it memory."""
    if (args.path / TENSOR_FILE).exists():
        show_policy(args.path, console)
        return
    checkpoint = read_checkpoint(args.path)
    recipe = checkpoint.recipe
    console.print(
        metric_table(
            str(checkpoint.path),
            {
                "tensors": str(len(checkpoint.tensors)),
                "parameters": f"{sum(tensor.numel() for tensor in checkpoint.tensors.values()):,}",
                "dtypes": ", ".join(sorted({str(tensor.dtype) for tensor in checkpoint.tensors.values()})),
                "training step": str(checkpoint.step),
                "action shift": "not told" if recipe is None else str(recipe.action_shift),
                "action modes": "not told" if recipe is None else ", ".join(recipe.action_modes),
            },
        )
    )


def show_policy(directory: Path, console: Console) -> None:
    """Print what a policy directory holds."""
    config = json.loads((directory / CONFIG_FILE).read_text())
    model = config["model"]
    console.print(
        metric_table(
            str(directory),
            {
                "weights": f"{(directory / TENSOR_FILE).stat().st_size / 1e9:.2f} GB",
                "blocks": f"{model['video']['num_layers']}, video {model['video']['hidden_dim']} wide, "
                f"action {model['action']['hidden_dim']}",
                "action shift": model["action_shift"],
                "video shift": model["video_shift"],
                "action modes": ", ".join(model["action_modes"]),
                "codec": ", ".join(str(value) for value in config["codec"].values()),
                "tasks": len(config["instructions"] or ()),
                "video adapters": "none" if config["lora"] is None else f"rank {config['lora']['rank']}",
                "actor training": "all" if config["actor_training"] is None else config["actor_training"]["kind"],
            },
        )
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="wamrl-weights", description=__doc__.replace("``", ""))
    commands = parser.add_subparsers(required=True)
    imports = commands.add_parser("import", help="make a policy directory from a released or LeRobot checkpoint")
    imports.set_defaults(run=import_weights)
    paths = {
        "checkpoint": "released .pt file, or LeRobot's model.safetensors",
        "stats": "dataset_stats.json of the checkpoint",
        "vae": "Wan2.2_VAE.pth, or a diffusers directory of it",
        "contexts": "context cache, see wamrl-context build",
        "out": "policy directory to write",
    }
    for name, meaning in paths.items():
        imports.add_argument(f"--{name}", required=True, type=Path, metavar="PATH", help=meaning)
    imports.add_argument(
        "--suite", default="libero_spatial", metavar="SUITE", help=f"world of the policy: a LIBERO suite, or {TABLETOP}"
    )
    imports.add_argument(
        "--image-size", nargs=2, type=int, default=(224, 448), metavar=("H", "W"), help="of its pictures"
    )
    imports.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="of the weights and of the VAE")
    imports.add_argument("--preset", default="libero", choices=PRESETS, help="sizes of the model")
    imports.add_argument("--action-shift", type=float, help="needed only if the checkpoint does not tell")
    imports.add_argument("--video-shift", type=float, default=5.0, help="shift of imagined video; 5.0 in training")
    imports.add_argument("--action-modes", nargs="+", choices=ACTION_MODES, help="modes the weights were trained in")
    imports.add_argument("--overwrite", action="store_true", help="replace the policy in --out")
    export = commands.add_parser("export", help="write a policy's weights in the released layout, adapters merged")
    export.set_defaults(run=export_weights)
    export.add_argument("--policy", required=True, type=Path, metavar="PATH", help="policy directory")
    export.add_argument("--out", required=True, type=Path, metavar="FILE", help=".pt file to write")
    export.add_argument("--overwrite", action="store_true", help="replace what is at --out")
    shows = commands.add_parser("show", help="describe a policy directory or a checkpoint")
    shows.set_defaults(run=show)
    shows.add_argument("path", type=Path)
    return parser


def main() -> None:
    """Entry point of ``wamrl-weights``."""
    args = _parser().parse_args()
    with user_errors("wamrl-weights"):
        args.run(args, Console())


if __name__ == "__main__":
    main()
