"""The umT5 encoder whose text contexts FastWAM was trained with; used once, to build a context cache.

It has 5.68 B parameters (11.4 GB in bfloat16) and runs once per instruction, so training reads
:mod:`wamrl_torchrl.modules.fastwam.context_cache` instead. Needs the extra ``wan``; transformers is imported by the
functions that use it. Everything is read from local files.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from wamrl_torchrl.modules.fastwam.weights import fill
from wamrl_torchrl.tensor_files import read_tensors, refuse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

#: Prompt of every released FastWAM checkpoint.
TEMPLATE = "A video recorded from a robot's point of view executing the following instruction: {task}"
#: Positions of a context in every released FastWAM checkpoint.
CONTEXT_LENGTH = 128
#: The feed-forward layers of T5 overflow in float16.
DTYPES = (torch.bfloat16, torch.float32)

WAN_FILE = "models_t5_umt5-xxl-enc-bf16.pth (or .safetensors)"
_WHAT = "a umT5 encoder"
# What a tokenizer is read from; Wan also ships spiece.model, which holds the same vocabulary and is not read.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")

# Modules of a block, in the names of Wan's own t5.py and of transformers' UMT5EncoderModel.
_WAN_BLOCK = {
    "norm1": "layer.0.layer_norm",
    "attn.q": "layer.0.SelfAttention.q",
    "attn.k": "layer.0.SelfAttention.k",
    "attn.v": "layer.0.SelfAttention.v",
    "attn.o": "layer.0.SelfAttention.o",
    "pos_embedding.embedding": "layer.0.SelfAttention.relative_attention_bias",
    "norm2": "layer.1.layer_norm",
    "ffn.gate.0": "layer.1.DenseReluDense.wi_0",
    "ffn.fc1": "layer.1.DenseReluDense.wi_1",
    "ffn.fc2": "layer.1.DenseReluDense.wo",
}


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"the text encoder needs transformers ({error}): pip install 'wamrl_torchrl[wan]'") from error
    return transformers


# ---- files ----------------------------------------------------------------------------------------------------------
def encoder_files(path: str | Path) -> list[Path]:
    """Files that a text encoder is read from: ``path`` itself, or the configuration and weights of a directory.

    Raises:
        FileNotFoundError: ``path`` does not exist, or is a directory without configuration or weights.
    """
    path = Path(path)
    expected = f"pass Wan's {WAN_FILE}, or a Hugging Face directory with a umT5 encoder"
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"there is no text encoder {path}; {expected}")
    weights = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin"))
    if not weights or not (path / "config.json").is_file():
        lacks = "*.safetensors" if (path / "config.json").is_file() else "config.json"
        raise FileNotFoundError(f"the directory {path} has no {lacks}; {expected}")
    return [path / "config.json", *sorted(path.glob("*.index.json")), *weights]


def tokenizer_files(path: str | Path) -> list[Path]:
    """Files that a tokenizer is read from.

    Raises:
        FileNotFoundError: ``tokenizer.json`` is not in the directory ``path``.
    """
    files = [Path(path) / name for name in _TOKENIZER_FILES]
    if not files[0].is_file():
        raise FileNotFoundError(f"there is no {files[0]}; pass the directory google/umt5-xxl that comes with Wan")
    return [file for file in files if file.is_file()]


# ---- encoder --------------------------------------------------------------------------------------------------------
def load_text_encoder(
    path: str | Path, *, device: torch.device | str, dtype: torch.dtype = torch.bfloat16
) -> UMT5EncoderModel:
    """Load a umT5 encoder, frozen and in evaluation mode; the weights are in memory once.

    Args:
        path: a Hugging Face directory of a ``UMT5EncoderModel`` or of a whole umT5, or one file in the naming of Wan's
            own code, written by torch.save (``models_t5_umt5-xxl-enc-bf16.pth``) or in safetensors. The sizes are taken
            from the tensors.

    Keyword Args:
        device: where the encoder runs.
        dtype: bfloat16 or float32.

    Raises:
        FileNotFoundError: nothing there, or an incomplete directory.
        ValueError: another dtype; a damaged file; one whose pickle would run code; another model; tensors that are
            missing, unexpected, quantised or of another shape, of which the first few are named.
        ImportError: transformers is not installed.
    """
    if dtype not in DTYPES:
        raise ValueError(f"the text encoder runs in {' or '.join(map(str, DTYPES))}, got {dtype}")
    path = Path(path)
    encoder_files(path)
    load = _load_directory if path.is_dir() else _load_wan_file
    return load(path, torch.device(device), dtype).requires_grad_(False).eval()


def _load_directory(path: Path, device: torch.device, dtype: torch.dtype) -> UMT5EncoderModel:
    try:
        model_type = json.loads((path / "config.json").read_text()).get("model_type")
    except (json.JSONDecodeError, AttributeError) as error:
        raise ValueError(f"{path / 'config.json'} is not the configuration of a model: {error}") from error
    if model_type != "umt5":
        raise ValueError(
            f"{path / 'config.json'} has model_type {model_type!r}, expected 'umt5'; pass Wan's {WAN_FILE}"
        )
    transformers = _transformers()
    try:
        encoder, info = transformers.UMT5EncoderModel.from_pretrained(
            path,
            local_files_only=True,
            dtype=dtype,
            device_map={"": device},
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, like the rest
        )
    except (SafetensorError, OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"cannot read the text encoder {path}: {error}") from error
    # The decoder of a whole umT5 is left out.
    extra = [key for key in info["unexpected_keys"] if not key.startswith(("decoder.", "lm_head."))]
    problems = [f"{key} is missing" for key in sorted(info["missing_keys"])]
    problems += [f"{key} is unexpected" for key in sorted(extra)]
    problems += [f"{key} has shape {tuple(had)}, expected {tuple(to)}" for key, had, to in info["mismatched_keys"]]
    refuse(problems, path, what=_WHAT)
    return encoder


def _load_wan_file(path: Path, device: torch.device, dtype: torch.dtype) -> UMT5EncoderModel:
    tensors = read_tensors(path)
    config = wan_encoder_config(tensors, source=path)
    with torch.device("meta"):
        encoder = _transformers().UMT5EncoderModel(config)
    names = {own: wan for wan, own in wan_names(config.num_layers).items()}
    names["encoder.embed_tokens.weight"] = names["shared.weight"]
    fill(encoder, tensors, source=path, what=_WHAT, names=names, device=device, dtype=dtype, copy=False)
    encoder.tie_weights()
    return encoder


def wan_names(num_layers: int) -> dict[str, str]:
    """Names of an encoder's tensors: in Wan's own code, to those in transformers' ``UMT5EncoderModel``."""
    names = {"token_embedding.weight": "shared.weight", "norm.weight": "encoder.final_layer_norm.weight"}
    for i in range(num_layers):
        for wan, own in _WAN_BLOCK.items():
            names[f"blocks.{i}.{wan}.weight"] = f"encoder.block.{i}.{own}.weight"
    return names


def wan_encoder_config(tensors: Mapping[str, Tensor], *, source: str | Path) -> UMT5Config:
    """Read the sizes of an encoder off its tensors in Wan's naming.

    Raises:
        ValueError: the tensors that tell the sizes are missing or not matrices; ``source`` is named.
        ImportError: transformers is not installed.
    """
    telling = {
        "embedding": "token_embedding.weight",
        "bias": "blocks.0.pos_embedding.embedding.weight",
        "query": "blocks.0.attn.q.weight",
        "up": "blocks.0.ffn.fc1.weight",
    }
    lacks = [name for name in telling.values() if name not in tensors or tensors[name].ndim != 2]
    if lacks:
        raise ValueError(
            f"{source} is no umT5 encoder in Wan's naming: {lacks[0]} is missing or not a matrix; "
            f"it holds {sorted(tensors)[:3]}, ..."
        )
    sizes = {what: tuple(tensors[name].shape) for what, name in telling.items()}
    buckets, heads = sizes["bias"]
    blocks = [int(found[1]) for name in tensors if (found := re.match(r"blocks\.(\d+)\.", name))]
    return _transformers().UMT5Config(
        vocab_size=sizes["embedding"][0],
        d_model=sizes["embedding"][1],
        d_ff=sizes["up"][0],
        d_kv=sizes["query"][0] // heads,
        num_heads=heads,
        num_layers=1 + max(blocks),
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=128,
        feed_forward_proj="gated-gelu",  # the tanh approximation
        is_encoder_decoder=False,
        use_cache=False,
    )


# ---- prompts --------------------------------------------------------------------------------------------------------
def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    """Load a tokenizer from the ``tokenizer.json`` of a local directory.

    The file is used as it is. ``AutoTokenizer`` would follow the class that Wan's files name, T5Tokenizer, and in
    transformers 5 this builds a tokenizer anew that knows neither umT5's byte fallback nor its id for unknown tokens.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or no padding token is named.
        ImportError: transformers is not installed.
    """
    tokenizer_files(path)
    transformers = _transformers()
    try:
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(Path(path), local_files_only=True)
    except Exception as error:  # tokenizers raises plain Exception for a damaged file
        raise ValueError(f"cannot read the tokenizer in {path}: {error}") from error
    if tokenizer.pad_token_id is None:
        raise ValueError(f"the tokenizer in {path} has no padding token: tokenizer_config.json must name its pad_token")
    return tokenizer


@torch.no_grad()
def encode_prompts(
    encoder: UMT5EncoderModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[str],
    *,
    length: int = CONTEXT_LENGTH,
    batch_size: int = 16,
    progress: Callable[[int, str], None] | None = None,
) -> Tensor:
    """Encode prompts as FastWAM was trained: padded to ``length``, attention to real tokens only, padding zeroed.

    White space is collapsed first, as by Wan's tokenizer.

    Args:
        encoder: from :func:`load_text_encoder`.
        tokenizer: from :func:`load_tokenizer`.
        prompts: N of them, with the template.

    Keyword Args:
        length: positions L of a context.
        batch_size: prompts that are encoded at once.
        progress: called after every batch with the number of its prompts and a note.

    Returns:
        ``[N,L,d_model]`` on the CPU, in the dtype of the encoder.

    Raises:
        ValueError: no prompts, a prompt has more than ``length`` tokens, the tokenizer has tokens that the encoder does
            not know, or an encoding is not finite.
    """
    if not prompts:
        raise ValueError("there are no prompts to encode")
    tokens = tokenizer([" ".join(prompt.split()) for prompt in prompts], padding=False, truncation=False)
    for prompt, ids in zip(prompts, tokens["input_ids"], strict=True):
        if len(ids) > length:
            raise ValueError(f"prompt {prompt!r} has {len(ids)} tokens, a context holds length={length}")
    tokens = tokenizer.pad(tokens, padding="max_length", max_length=length, padding_side="right", return_tensors="pt")
    ids, mask = tokens["input_ids"], tokens["attention_mask"]
    if int(ids.max()) >= encoder.config.vocab_size:
        raise ValueError(
            f"the tokenizer has a token {int(ids.max())}, the encoder only knows {encoder.config.vocab_size}: "
            "they do not belong together"
        )
    contexts = torch.empty(len(prompts), length, encoder.config.d_model, dtype=encoder.dtype)
    for start in range(0, len(prompts), batch_size):
        rows = slice(start, start + batch_size)
        batch = {"input_ids": ids[rows].to(encoder.device), "attention_mask": mask[rows].to(encoder.device)}
        hidden = encoder(**batch).last_hidden_state
        contexts[rows] = hidden.masked_fill(batch["attention_mask"][..., None] == 0, 0)
        if progress is not None:
            progress(len(hidden), "")
    broken = (~contexts.isfinite().flatten(1).all(1)).nonzero().flatten().tolist()
    if broken:
        raise ValueError(
            f"the encoding of {prompts[broken[0]]!r} is not finite: the weights of the encoder are damaged"
        )
    return contexts
