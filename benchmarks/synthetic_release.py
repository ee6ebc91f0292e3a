"""Stand-ins for the released files, with random weights under the same names, in the same layouts and sizes.

    python benchmarks/synthetic_release.py --out release              # 25 GB, seconds to minutes with a GPU
    python benchmarks/synthetic_release.py --out release --preset tiny

With them every command of docs/released_weights.md can be tried without the public files. They know nothing.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from wamrl_torchrl.envs.tabletop import TABLETOP_INSTRUCTIONS
from wamrl_torchrl.modules.fastwam.codec import TinyCodec
from wamrl_torchrl.modules.fastwam.config import ACTION_MODES, FastWAMConfig, preset
from wamrl_torchrl.modules.fastwam.context import ContextBank
from wamrl_torchrl.modules.fastwam.text import TEMPLATE, wan_names
from wamrl_torchrl.modules.fastwam.wan_codec import WAN22_VAE, original_name
from wamrl_torchrl.modules.fastwam.weights import build_empty, materialize

CHECKPOINT = "libero_optional_idm_2cam224.pt"
STATS = "libero_optional_idm_2cam224_dataset_stats.json"
VAE = "Wan2.2_VAE.pth"
TEXT_ENCODER = "models_t5_umt5-xxl-enc-bf16.pth"
TOKENIZER = "umt5-xxl"


def write_checkpoint(directory: Path, config: FastWAMConfig, device: torch.device) -> None:
    """FastWAM's own weights, with the four fields of the released payload only."""
    contexts = ContextBank(torch.zeros(1, config.context_length, config.video.text_dim))
    config = replace(config, action_modes=ACTION_MODES)
    model = materialize(build_empty(config, TinyCodec(), contexts), device=device, dtype=torch.bfloat16)
    payload = {
        name: {key: value.detach().cpu() for key, value in getattr(model, name).state_dict().items()}
        for name in ("mot", "proprio_encoder")
    }
    torch.save({**payload, "step": 20000, "torch_dtype": "torch.bfloat16"}, directory / CHECKPOINT)


def write_stats(directory: Path) -> None:
    """Statistics in the released layout, the stepwise ones left out (nothing reads them)."""

    def fields(size: int, low: float, high: float) -> dict[str, list[float]]:
        values = {"min": low, "max": high, "mean": 0.0, "std": 0.5, "q01": 0.9 * low, "q99": 0.9 * high}
        return {f"global_{name}": [value] * size for name, value in values.items()}

    action = fields(7, -0.9375, 0.9375)
    action["global_min"][-1], action["global_max"][-1] = 0.0, 1.0
    content = {"state": {"default": fields(8, -2.0, 2.0)}, "action": {"default": action}}
    (directory / STATS).write_text(json.dumps({**content, "num_episodes": 1693, "num_transition": 273465}))


def write_vae(directory: Path, *, tiny: bool, device: torch.device) -> None:
    """The VAE under the names of the original file."""
    narrow = {"base_dim": 8, "decoder_base_dim": 8} if tiny else {}
    with device:
        vae = AutoencoderKLWan(**{**WAN22_VAE, **narrow})
    tensors = {original_name(name): value.bfloat16().cpu() for name, value in vae.state_dict().items()}
    torch.save(tensors, directory / VAE)


def write_text_encoder(directory: Path, *, text_dim: int, tiny: bool, device: torch.device) -> None:
    """The text encoder under the names of Wan's own code, and a tokenizer that knows the words of the prompts."""
    sizes = {"d_ff": 64, "num_heads": 4, "d_kv": 8, "num_layers": 2, "vocab_size": 512}
    if not tiny:
        sizes = {"d_ff": 10240, "num_heads": 64, "d_kv": 64, "num_layers": 24, "vocab_size": 256384}
    config = UMT5Config(d_model=text_dim, feed_forward_proj="gated-gelu", **sizes)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with device:
        encoder = UMT5EncoderModel(config)
    torch.set_default_dtype(default)
    state = encoder.state_dict()
    names = wan_names(config.num_layers)
    torch.save({wan: state[own].bfloat16().cpu() for wan, own in names.items()}, directory / TEXT_ENCODER)

    sentences = (TEMPLATE.replace("{task}", ""), *TABLETOP_INSTRUCTIONS)
    words = dict.fromkeys(word for sentence in sentences for word in sentence.split())
    backend = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["<pad>", "</s>", "<s>", "<unk>", *words])}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **special).save_pretrained(directory / TOKENIZER)


def write_release(directory: Path, *, preset_name: str = "libero", device: torch.device | None = None) -> None:
    """Write all files into ``directory``."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
    directory.mkdir(parents=True, exist_ok=True)
    config, tiny = preset(preset_name), preset_name == "tiny"
    torch.manual_seed(0)
    write_stats(directory)
    write_checkpoint(directory, config, device)
    write_vae(directory, tiny=tiny, device=device)
    write_text_encoder(directory, text_dim=config.video.text_dim, tiny=tiny, device=device)


def main() -> None:
    """Write the files and list them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--preset", default="libero", choices=("libero", "tiny"))
    options = parser.parse_args()
    write_release(options.out, preset_name=options.preset)
    for path in sorted(options.out.rglob("*")):
        if path.is_file():
            print(f"{path.stat().st_size:>15,}  {path}")


if __name__ == "__main__":
    main()
