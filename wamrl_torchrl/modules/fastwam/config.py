"""Typed configurations of FastWAM and the named presets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from wamrl_torchrl import schema

ACTION_MODES = ("first_frame", "idm")


@dataclass(frozen=True)
class ExpertConfig:
    """Sizes of one expert. Both experts of a mixture share ``num_layers``, ``num_heads`` and ``head_dim``."""

    hidden_dim: int
    ffn_dim: int
    num_layers: int
    num_heads: int
    head_dim: int
    text_dim: int
    freq_dim: int = 256
    eps: float = 1e-6

    def __post_init__(self) -> None:
        # Each of the three RoPE axes rotates pairs, so its share of a head must be even.
        if self.head_dim % 2 or (self.head_dim // 3) % 2:
            raise ValueError(f"head_dim and head_dim // 3 must be even (such as 12, 24, 48, 128), got {self.head_dim}")
        if self.freq_dim % 2:
            raise ValueError(f"freq_dim must be even, got {self.freq_dim}")

    @property
    def attention_dim(self) -> int:
        """Width of the shared query, key and value space."""
        return self.num_heads * self.head_dim


@dataclass(frozen=True)
class FastWAMConfig:
    """A FastWAM model: two experts, the picture they see and the schedules they were trained with.

    The shifts and action modes belong to the weights: a wrong ``action_shift`` samples the same network on another time
    grid and costs success silently (released optional-IDM weights 1.0, older uncond weights 5.0), and actions that
    never saw a whole video in training cannot use one. ``action_modes`` says what the actions were trained to see:
    ``"first_frame"``, or all frames of the video in ``"idm"`` (inverse dynamics).
    """

    video: ExpertConfig
    action: ExpertConfig
    image_size: tuple[int, int] = (224, 448)
    context_length: int = 128
    latent_channels: int = 48
    action_dim: int = schema.ACTION_DIM
    proprio_dim: int = schema.STATE_DIM
    chunk: int = schema.CHUNK
    video_frames: int = schema.VIDEO_FRAMES
    action_shift: float = 1.0
    video_shift: float = 5.0
    action_modes: tuple[str, ...] = ("first_frame",)

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "head_dim", "text_dim"):
            video, action = getattr(self.video, name), getattr(self.action, name)
            if video != action:
                raise ValueError(f"the experts must share {name}, got video {video} and action {action}")
        if any(size % 32 for size in self.image_size):
            raise ValueError(f"image_size must be multiples of 32 (codec 16 x patch 2), got {self.image_size}")
        if not self.action_modes or set(self.action_modes) - set(ACTION_MODES):
            raise ValueError(f"action_modes must be some of {ACTION_MODES}, got {self.action_modes}")
        if not (self.action_shift > 0 and self.video_shift > 0):
            raise ValueError(f"shifts must be positive, got action {self.action_shift} and video {self.video_shift}")
        if self.video_frames % 4 != 1:
            raise ValueError(f"video_frames must be 1 + 4n, got {self.video_frames}")

    @property
    def latent_frames(self) -> int:
        """Latent frames of a full window: the first frame and one per four further frames."""
        return 1 + (self.video_frames - 1) // 4

    @property
    def latent_size(self) -> tuple[int, int]:
        """Height and width of a latent frame."""
        return self.image_size[0] // 16, self.image_size[1] // 16

    @property
    def tokens_per_frame(self) -> int:
        """Tokens of one latent frame after the 2x2 patches."""
        height, width = self.latent_size
        return (height // 2) * (width // 2)


def _tiny(image_size: tuple[int, int]) -> FastWAMConfig:
    shared = {"num_layers": 4, "num_heads": 4, "head_dim": 24, "text_dim": 32, "freq_dim": 32}
    return FastWAMConfig(
        video=ExpertConfig(hidden_dim=64, ffn_dim=192, **shared),
        action=ExpertConfig(hidden_dim=64, ffn_dim=192, **shared),
        image_size=image_size,
        context_length=24,
    )


def _small() -> FastWAMConfig:
    shared = {"num_layers": 6, "num_heads": 8, "head_dim": 48, "text_dim": 64, "freq_dim": 256}
    return FastWAMConfig(
        video=ExpertConfig(hidden_dim=384, ffn_dim=1536, **shared),
        action=ExpertConfig(hidden_dim=256, ffn_dim=1024, **shared),
        context_length=24,
    )


def _libero() -> FastWAMConfig:
    shared = {"num_layers": 30, "num_heads": 24, "head_dim": 128, "text_dim": 4096, "freq_dim": 256}
    return FastWAMConfig(
        video=ExpertConfig(hidden_dim=3072, ffn_dim=14336, **shared),
        action=ExpertConfig(hidden_dim=1024, ffn_dim=4096, **shared),
    )


#: Model presets by name: ``tiny`` runs on a CPU, ``small`` (24 M parameters) is for minutes of a GPU, and ``libero``
#: has the sizes of the released checkpoints.
PRESETS = {"tiny": _tiny((224, 448)), "small": _small(), "libero": _libero()}


def preset(name: str, *, image_size: tuple[int, int] | None = None) -> FastWAMConfig:
    """Return a preset, optionally for another picture size (height, width).

    Raises:
        ValueError: unknown name, or a size the codec and patches do not divide.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown model preset {name!r}; known presets: {sorted(PRESETS)}")
    config = PRESETS[name]
    return config if image_size is None else replace(config, image_size=image_size)
