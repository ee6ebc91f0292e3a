"""The Wan2.2 VAE, which FastWAM was trained with, as a codec; needs the extra ``wan`` (diffusers)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import Self

from wamrl_torchrl.modules.fastwam.codec import Codec
from wamrl_torchrl.modules.fastwam.weights import fill
from wamrl_torchrl.tensor_files import read_tensors

if TYPE_CHECKING:
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan

# Statistics of the latents, by channel: `Wan2_2_VAE` in Wan2.2's wan/modules/vae2_2.py, and the same numbers in
# diffusers' scripts/convert_wan_to_diffusers.py. diffusers encodes to raw latents and leaves them to its caller.
LATENT_MEAN = (
    *(-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891),
    *(0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502),
    *(-0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723),
    *(-0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
)
LATENT_STD = (
    *(0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901),
    *(0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659),
    *(0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944),
    *(0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744),
)

#: Arguments of ``diffusers.AutoencoderKLWan`` for the Wan2.2 VAE (704,688,668 parameters).
WAN22_VAE = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
    "is_residual": True,
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
    "scale_factor_temporal": 4,
    "scale_factor_spatial": 16,
    "latents_mean": list(LATENT_MEAN),
    "latents_std": list(LATENT_STD),
}

DIRECTORY_CONFIG = "config.json"
DIRECTORY_TENSORS = "diffusion_pytorch_model.safetensors"

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# From the parameter names of diffusers to those of the original file, applied in this order. diffusers' own conversion
# covers Wan2.1 only, whose stages are flat: it maps several tensors of the nested 2.2 stages onto one name. A stage
# has two residual blocks and a resampler going down, three and a resampler going up.
_ORIGINAL_NAMES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\.norm1\.", ".residual.0."),
        (r"\.conv1\.", ".residual.2."),
        (r"\.norm2\.", ".residual.3."),
        (r"\.conv2\.", ".residual.6."),
        (r"\.conv_shortcut\.", ".shortcut."),
        (r"\.conv_in\.", ".conv1."),
        (r"\.norm_out\.", ".head.0."),
        (r"\.conv_out\.", ".head.2."),
        (r"\.mid_block\.resnets\.0\.", ".middle.0."),
        (r"\.mid_block\.attentions\.0\.", ".middle.1."),
        (r"\.mid_block\.resnets\.1\.", ".middle.2."),
        (r"\.down_blocks\.(\d)\.resnets\.", r".downsamples.\1.downsamples."),
        (r"\.down_blocks\.(\d)\.downsampler\.", r".downsamples.\1.downsamples.2."),
        (r"\.up_blocks\.(\d)\.resnets\.", r".upsamples.\1.upsamples."),
        (r"\.up_blocks\.(\d)\.upsampler\.", r".upsamples.\1.upsamples.3."),
        (r"^quant_conv\.", "conv1."),
        (r"^post_quant_conv\.", "conv2."),
    )
)


class WanCodec(Codec):
    """The frozen Wan2.2 VAE with the standardised latents that FastWAM denoises.

    The VAE stands outside the module tree: it has no part in ``parameters()`` and ``state_dict()`` of the codec and its
    owner, so that its 704 M weights are neither trained nor saved with every policy. It follows its owner to another
    device but keeps its own dtype when that is cast. It computes without gradient and outside autocast, and it keeps
    frames between the steps of a clip, so one codec serves one thread at a time.

    Args:
        vae: ``diffusers.AutoencoderKLWan`` with the strides of the Wan2.2 VAE; it is taken over, frozen and cast.

    Keyword Args:
        dtype: dtype of its weights and of the computation; float32, bfloat16 or float16.
        source: where the weights can be loaded from again, for :attr:`recipe`.
        channels_last: store the weights with channels innermost; the convolutions then run in that layout. Faster and
            smaller: in bfloat16, batch 8, 1 / 9 frames are encoded in 16.2 / 111.2 ms against 18.3 / 122.5, and 5 / 9
            decoded in 217.9 / 380.5 against 219.7 / 395.2, with a peak of 10.3 GB against 11.2; float32 likewise
            (``benchmarks/results/full_size_h200.json``).
        batch_size: code at most so many clips at once, to bound memory; all together if None. Within rounding it does
            not change the result.

    Raises:
        ValueError: a VAE of other strides or channels, another dtype, or a batch size below 1.
    """

    latent_mean: Tensor
    latent_std: Tensor

    def __init__(
        self,
        vae: AutoencoderKLWan,
        *,
        dtype: torch.dtype = torch.bfloat16,
        source: str | Path | None = None,
        channels_last: bool = True,
        batch_size: int | None = None,
    ) -> None:
        super().__init__()
        _check_strides(vae.config)
        if dtype not in _DTYPES:
            raise ValueError(f"the dtype of the VAE must be one of {_DTYPES}, found {dtype}")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, or None for no limit, found {batch_size}")
        self.dtype = dtype
        self.source = None if source is None else str(source)
        self.channels_last = channels_last
        self.batch_size = batch_size
        layouts = {4: torch.channels_last, 5: torch.channels_last_3d} if channels_last else {}
        vae.requires_grad_(False).eval()
        vae._apply(lambda weight: weight.to(dtype, memory_format=layouts.get(weight.ndim, torch.preserve_format)))
        self._outside = (vae,)  # in a tuple, which nn.Module does not look into
        for name, values in (("latent_mean", LATENT_MEAN), ("latent_std", LATENT_STD)):
            column = torch.tensor(values, device=vae.device)[:, None, None, None]
            self.register_buffer(name, column, persistent=False)

    @classmethod
    def from_file(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        channels_last: bool = True,
        batch_size: int | None = None,
    ) -> WanCodec:
        """Load the VAE from a local file or directory; nothing is downloaded.

        Args:
            path: the original ``Wan2.2_VAE.pth``; a ``.safetensors`` file under the original names or those of
                diffusers; or a directory written by diffusers (``config.json`` and
                ``diffusion_pytorch_model.safetensors``). Files of a narrower VAE of the same layout load too.

        Keyword Args:
            dtype: as the class says; the file may hold another.
            device: where the weights are put; each is read, cast and moved by itself.
            channels_last: as the class says.
            batch_size: as the class says.

        Raises:
            ImportError: diffusers is not installed.
            FileNotFoundError: no such file, or a directory without one of its two files.
            ValueError: another kind of file, damaged, a pickle that would run code, the configuration of another VAE,
                or tensors that are missing, unexpected or of another shape or dtype; the first few are named.
        """
        # Not resolved: caches link `Wan2.2_VAE.pth` to a file whose name has no suffix.
        path = Path(path).absolute()
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; it should be the Wan2.2 VAE, a file or a directory")
        file, config = _directory(path) if path.is_dir() else (path, None)
        tensors = read_tensors(file)
        vae = _build(_single_file_config(tensors) if config is None else config)
        names = {name: original_name(name) for name in vae.state_dict()} if _has_original_names(tensors) else None
        fill(vae, tensors, source=file, what="the Wan2.2 VAE", names=names, device=device, dtype=dtype)
        return cls(vae, dtype=dtype, source=path, channels_last=channels_last, batch_size=batch_size)

    @property
    def vae(self) -> AutoencoderKLWan:
        """The VAE itself; its latents are not standardised."""
        return self._outside[0]

    @property
    def recipe(self) -> dict[str, Any]:
        """Path of the weights and the options; the weights are not part of it.

        Raises:
            ValueError: the codec was made without a ``source``.
        """
        if self.source is None:
            raise ValueError(
                "this WanCodec cannot be described: it was made from a VAE in memory; make it with WanCodec.from_file, "
                "or give `source`"
            )
        return {
            "kind": "wan",
            "path": self.source,
            "dtype": str(self.dtype).removeprefix("torch."),
            "channels_last": self.channels_last,
            "batch_size": self.batch_size,
        }

    def extra_repr(self) -> str:
        """The options, as printed with the module."""
        return f"dtype={self.dtype}, channels_last={self.channels_last}, batch_size={self.batch_size}, {self.source!r}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def move(tensor: Tensor) -> Tensor:
            # Only the device follows: asked of an empty tensor, as the weights are large and neither cast nor emptied.
            return tensor.to(fn(tensor.new_empty(0)).device)

        self.vae._apply(move, recurse)
        return super()._apply(move, recurse)

    def _encode(self, frames: Tensor) -> Tensor:
        return self._in_parts(self._encode_part, frames)

    def _decode(self, latents: Tensor) -> Tensor:
        return self._in_parts(self._decode_part, latents)

    @torch.no_grad()
    def _in_parts(self, function: Callable[[Tensor], Tensor], clips: Tensor) -> Tensor:
        with torch.autocast("cuda" if clips.is_cuda else "cpu", enabled=False):
            if not len(clips):
                # The attention cannot reshape an empty batch, so the shape of the result is that of a blank clip.
                return function(clips.new_zeros(1, *clips.shape[1:]))[:0]
            if self.batch_size is None or len(clips) <= self.batch_size:
                return function(clips)
            return torch.cat([function(part) for part in clips.split(self.batch_size)])

    def _encode_part(self, frames: Tensor) -> Tensor:
        pixels = frames.float().div_(127.5).sub_(1) if frames.dtype == torch.uint8 else frames
        raw = self.vae.encode(pixels.to(self.dtype)).latent_dist.mode().float()
        return (raw - self.latent_mean) / self.latent_std

    def _decode_part(self, latents: Tensor) -> Tensor:
        raw = latents.float() * self.latent_std + self.latent_mean
        return self.vae.decode(raw.to(self.dtype)).sample.float()  # the VAE clamps


def _check_strides(config: Any) -> None:
    resampled = len(config.dim_mult) - 1
    found = (
        config.z_dim,
        (config.patch_size or 1) * 2**resampled,
        2 ** sum(config.temperal_downsample[:resampled]),
    )
    expected = (Codec.latent_channels, Codec.spatial_stride, Codec.temporal_stride)
    if found != expected:
        raise ValueError(
            f"this VAE has {found[0]} latent channels and strides {found[1]} in space and {found[2]} in time; "
            f"the Wan2.2 VAE has {expected[0]}, {expected[1]} and {expected[2]} (Wan2.1's has 16, 8 and 4)"
        )


def _build(config: Mapping[str, Any]) -> AutoencoderKLWan:
    """VAE without weights."""
    try:
        from diffusers import AutoencoderKLWan
    except ImportError as error:
        raise ImportError(
            "the Wan2.2 VAE needs diffusers; install it with `pip install 'wamrl_torchrl[wan]'`"
        ) from error
    with torch.device("meta"):
        return AutoencoderKLWan.from_config(dict(config))


def _directory(path: Path) -> tuple[Path, dict[str, Any]]:
    """Tensor file and configuration of a directory that diffusers wrote."""
    for name in (DIRECTORY_CONFIG, DIRECTORY_TENSORS):
        if not (path / name).is_file():
            raise FileNotFoundError(
                f"{path} holds no {name}; pass the VAE's own directory as diffusers writes it (often `vae`), or a file"
            )
    file = path / DIRECTORY_CONFIG
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"cannot read {file}: {error}") from error
    if not isinstance(config, dict) or config.get("_class_name") != "AutoencoderKLWan":
        found = config.get("_class_name") if isinstance(config, dict) else config
        raise ValueError(f"{file} describes no AutoencoderKLWan, found {found!r}")
    for name in ("latents_mean", "latents_std"):
        if name in config and config[name] != WAN22_VAE[name]:
            raise ValueError(f"{file} has other {name} than the Wan2.2 VAE; FastWAM was not trained on such latents")
    return path / DIRECTORY_TENSORS, config


def _has_original_names(tensors: Mapping[str, Tensor]) -> bool:
    return any(name.startswith(("encoder.downsamples.", "decoder.upsamples.")) for name in tensors)


def original_name(name: str) -> str:
    """Name in ``Wan2.2_VAE.pth`` of a parameter of diffusers' module."""
    for pattern, replacement in _ORIGINAL_NAMES:
        name = pattern.sub(replacement, name)
    return name


def _single_file_config(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Configuration of a file without one: Wan2.2's, with the widths that the first convolutions have."""
    config: dict[str, Any] = dict(WAN22_VAE)
    name = "conv1" if _has_original_names(tensors) else "conv_in"
    for part, option, multiple in (("encoder", "base_dim", 1), ("decoder", "decoder_base_dim", config["dim_mult"][-1])):
        weight = tensors.get(f"{part}.{name}.weight")
        if weight is not None and weight.ndim == 5 and len(weight) >= multiple:
            config[option] = len(weight) // multiple
    return config
