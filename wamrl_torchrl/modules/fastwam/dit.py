"""Transformer blocks of both experts, with explicit key/value caches.

A pass runs an expert over some new tokens that attend to themselves and to the cached keys and values of earlier
passes. FastWAM's attention pattern (first frame sees itself, later frames see all frames, actions see video and
actions, nothing sees actions) is a sequence of such passes, so no attention mask is ever needed. Parameter names are
those of the released checkpoints (Wan 2.2 for the video expert).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wamrl_torchrl.modules.fastwam.config import ExpertConfig
from wamrl_torchrl.precision import FixedBuffers

ROPE_THETA = 10000.0


class KeyValue(NamedTuple):
    """Keys (after RMSNorm and RoPE) and values of one layer, each [B,S,heads*head_dim]."""

    key: Tensor
    value: Tensor


class Rope(NamedTuple):
    """Rotation tables of a pass, fp32 [S, head_dim/2] each."""

    cos: Tensor
    sin: Tensor


class RopeTable(FixedBuffers):
    """Rotation tables for integer ``positions`` [S, axes] whose axes own ``widths`` dims of a head each.

    Angles are taken in float64 and the tables rounded to fp32, as the reference rotates in double precision.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, positions: Tensor, widths: list[int]) -> None:
        super().__init__()
        angles = [
            positions[:, axis, None].double() * ROPE_THETA ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
            for axis, width in enumerate(widths)
        ]
        table = torch.cat(angles, -1)
        self.register_buffer("cos", table.cos().float(), persistent=False)
        self.register_buffer("sin", table.sin().float(), persistent=False)

    def forward(self, first: int, count: int) -> Rope:
        """Tables of ``count`` tokens from token ``first`` on."""
        return Rope(self.cos[first : first + count], self.sin[first : first + count])


def apply_rope(x: Tensor, rope: Rope, num_heads: int) -> Tensor:
    """Rotate interleaved pairs of every head of ``x`` [B,S,heads*head_dim], in fp32."""
    pairs = x.float().unflatten(-1, (num_heads, -1, 2))
    even, odd = pairs.unbind(-1)
    cos, sin = rope.cos[:, None], rope.sin[:, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-3).to(x.dtype)


class RMSNorm(nn.Module):
    """RMS normalisation over the last dim in fp32, cast back before the weight is applied."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start as the plain normalisation."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [..., dim]."""
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Projections of one attention; queries and keys are normalised over all heads at once."""

    def __init__(self, config: ExpertConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_dim, config.attention_dim
        self.num_heads = config.num_heads
        self.q = nn.Linear(hidden, inner)
        self.k = nn.Linear(hidden, inner)
        self.v = nn.Linear(hidden, inner)
        self.o = nn.Linear(inner, hidden)
        self.norm_q = RMSNorm(inner, config.eps)
        self.norm_k = RMSNorm(inner, config.eps)

    def attend(self, query: Tensor, kv: KeyValue) -> Tensor:
        """Attend from ``query`` [B,S,inner] to ``kv``; [B,S,hidden]."""
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (query, *kv))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def layer_norm(x: Tensor, eps: float) -> Tensor:
    """Layer normalisation without affine parameters."""
    return F.layer_norm(x, x.shape[-1:], eps=eps)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Adaptive layer-norm modulation."""
    return x * (1 + scale) + shift


class Block(nn.Module):
    """Self-attention, text cross-attention and MLP with adaptive layer norm."""

    def __init__(self, config: ExpertConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.self_attn = Attention(config)
        self.cross_attn = Attention(config)
        self.norm3 = nn.LayerNorm(config.hidden_dim, eps=config.eps)
        self.ffn = nn.Sequential(
            nn.Linear(config.hidden_dim, config.ffn_dim),
            nn.GELU(approximate="tanh"),
            nn.Linear(config.ffn_dim, config.hidden_dim),
        )
        self.modulation = nn.Parameter(torch.empty(1, 6, config.hidden_dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Start as an ordinary pre-norm transformer: gates at 1, shifts and scales at 0.

        With gates near 0 (as when fine-tuning) a model from scratch hardly learns to look at the picture.
        """
        self.modulation.zero_()
        self.modulation[:, [2, 5]] = 1

    def text_key_value(self, text: Tensor) -> KeyValue:
        """Cross-attention keys and values of ``text`` [B,L,hidden]; they do not depend on the time."""
        attention = self.cross_attn
        return KeyValue(attention.norm_k(attention.k(text)), attention.v(text))

    def key_value(self, x: Tensor, six: Tensor, rope: Rope) -> KeyValue:
        """Keys and values of the tokens alone: all that a last prefill layer has to give."""
        shift, scale = (six + self.modulation)[:, :2].unsqueeze(2).unbind(1)
        return self._key_value(modulate(layer_norm(x, self.eps), shift, scale), rope)

    def _key_value(self, h: Tensor, rope: Rope) -> KeyValue:
        attention = self.self_attn
        return KeyValue(apply_rope(attention.norm_k(attention.k(h)), rope, attention.num_heads), attention.v(h))

    def forward(
        self, x: Tensor, six: Tensor, rope: Rope, text: KeyValue, past: KeyValue | None
    ) -> tuple[Tensor, KeyValue]:
        """Run the block.

        Args:
            x: tokens [B,S,hidden].
            six: time projection [B,6,hidden]: shift, scale, gate of attention, then of the MLP.
            rope: rotation tables of the S tokens.
            text: cross-attention keys and values.
            past: keys and values of earlier tokens that these tokens attend to as well, or None.

        Returns:
            tokens [B,S,hidden], and the keys and values of these tokens (without ``past``).
        """
        modulation = (six + self.modulation).unsqueeze(2).unbind(1)
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = modulation
        attention = self.self_attn
        h = modulate(layer_norm(x, self.eps), shift, scale)
        query = apply_rope(attention.norm_q(attention.q(h)), rope, attention.num_heads)
        own = self._key_value(h, rope)
        seen = own if past is None else KeyValue(*(torch.cat(pair, 1) for pair in zip(past, own, strict=True)))
        x = x + gate * attention.attend(query, seen)
        cross = self.cross_attn
        x = x + cross.attend(cross.norm_q(cross.q(self.norm3(x))), text)
        x = x + mlp_gate * self.ffn(modulate(layer_norm(x, self.eps), mlp_shift, mlp_scale))
        return x, own


class Expert(nn.Module):
    """What both experts share: blocks, text MLP and time MLP."""

    def __init__(self, config: ExpertConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_dim
        self.text_embedding = nn.Sequential(
            nn.Linear(config.text_dim, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, hidden)
        )
        self.time_embedding = nn.Sequential(nn.Linear(config.freq_dim, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 6 * hidden))
        self.reset_parameters()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))

    def reset_parameters(self) -> None:
        """Small time modulation, so that a fresh block is near its own start whatever the time."""
        projection = cast("nn.Linear", self.time_projection[1])
        nn.init.normal_(projection.weight, std=0.02)
        nn.init.zeros_(projection.bias)

    @property
    def layers(self) -> Sequence[Block]:
        """The blocks, with their type."""
        return cast("Sequence[Block]", self.blocks)

    def embed_time(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """Embedding [B,hidden] and six modulation vectors [B,6,hidden] of times [B] in [0, 1000]."""
        half = self.config.freq_dim // 2
        steps = torch.arange(half, dtype=torch.float64, device=time.device)
        angles = time.double()[:, None] * 10000.0 ** (-steps / half)
        sinusoid = torch.cat((angles.cos(), angles.sin()), -1)
        embedding = self.time_embedding(sinusoid.to(self.layers[0].modulation.dtype))
        return embedding, self.time_projection(embedding).unflatten(-1, (6, -1))

    def text_cache(self, context: Tensor) -> list[KeyValue]:
        """Cross-attention keys and values of every layer for a context [B,L,text_dim]."""
        text = self.text_embedding(context)
        return [block.text_key_value(text) for block in self.layers]

    def run(
        self,
        x: Tensor,
        six: Tensor,
        rope: Rope,
        text: list[KeyValue],
        past: list[KeyValue] | None = None,
        *,
        only_cache: bool = False,
    ) -> tuple[Tensor, list[KeyValue]]:
        """Run all blocks over new tokens ``x`` [B,S,hidden]; see :meth:`Block.forward`.

        With ``only_cache`` the last layer stops at its keys and values and the returned tokens have no meaning.
        """
        cache: list[KeyValue] = []
        last = len(self.blocks) - 1
        for index, block in enumerate(self.layers):
            if only_cache and index == last:
                cache.append(block.key_value(x, six, rope))
                break
            x, own = block(x, six, rope, text[index], None if past is None else past[index])
            cache.append(own)
        return x, cache
