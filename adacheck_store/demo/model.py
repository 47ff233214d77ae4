"""What the demo trains: a byte-level GPT of about 10 M parameters, on the standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

VOCABULARY = 256
CONTEXT = 128
WIDTH = 384
LAYERS = 6
HEAD_WIDTH = 64
DROPOUT = 0.1
TEXT_BYTES = 8 << 20


class Layer(nn.Module):
    """One transformer layer: causal attention and a feed-forward network, pre-norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) -> the same shape."""
        batch, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, -1, HEAD_WIDTH)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        dropout = DROPOUT if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self._drop(self.proj(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self._drop(self.down(functional.gelu(self.up(self.norm_2(x)))))

    def _drop(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, DROPOUT, self.training)


class ByteGPT(nn.Module):
    """A GPT over bytes, its output layer tied to its embedding; ``width`` is a multiple of 64."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, VOCABULARY, bias=False)
        self.output.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, bytes_in: torch.Tensor, bytes_out: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy, in nats per byte; both arguments are (batch, length)."""
        places = torch.arange(bytes_in.shape[1], device=bytes_in.device)
        x = self.tokens(bytes_in) + self.positions(places)
        for layer in self.layers:
            x = layer(x)
        logits = self.output(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), bytes_out.flatten())


class LibraryText(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows of the Python standard library's own source, as (input, next byte) pairs."""

    def __init__(self) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        text = bytearray()
        for path in sorted(root.glob("*.py")):
            text += path.read_bytes()
        for path in sorted(root.glob("*/*.py")):
            if len(text) > TEXT_BYTES:
                break
            if "site-packages" not in path.parts:
                text += path.read_bytes()
        self._text = torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self._text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self._text[index * CONTEXT : (index + 1) * CONTEXT + 1].long()
        return piece[:-1], piece[1:]
