"""A Llama of any width, for what `tests.ranks.worker` trains on; imports torch when asked."""

from __future__ import annotations


def build_llama(*, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int):
    """Embedding, blocks and head, one after another, with a parameter for each of a Llama's."""
    from torch import nn

    kv = hidden // heads * kv_heads
    blocks = (_block(hidden, kv, inner, heads) for _ in range(layers))
    return nn.Sequential(_embedding(vocab, hidden), *blocks, _head(hidden, vocab))


def _embedding(vocab: int, hidden: int):
    from torch import nn

    class Embedding(nn.Embedding):
        """Of numbers, as if each were a token."""

        def forward(self, batch):
            return super().forward((batch.abs() * vocab).long() % vocab)

    return Embedding(vocab, hidden)


def _block(hidden: int, kv: int, inner: int, heads: int):
    from torch import nn
    from torch.nn.functional import scaled_dot_product_attention, silu

    class Block(nn.Module):
        """Attention and a gated layer, both after a norm; positions are left out."""

        def __init__(self) -> None:
            super().__init__()
            self.input_norm, self.post_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
            sizes = {"q": (hidden, hidden), "k": (hidden, kv), "v": (hidden, kv)}
            sizes |= {"o": (hidden, hidden), "w1": (hidden, inner), "w3": (hidden, inner)}
            for name, (given, made) in (sizes | {"w2": (inner, hidden)}).items():
                self.add_module(name, nn.Linear(given, made, bias=False))

        def forward(self, found):
            normed = self.input_norm(found)
            q, k, v = (
                made(normed).unflatten(-1, (-1, hidden // heads)).transpose(1, 2)
                for made in (self.q, self.k, self.v)
            )
            attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            found = found + self.o(attended.transpose(1, 2).flatten(2))
            normed = self.post_norm(found)
            return found + self.w2(silu(self.w1(normed)) * self.w3(normed))

    return Block()


def _head(hidden: int, vocab: int):
    from torch import nn

    class Head(nn.Module):
        """One number for what all tokens say."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(hidden)
            self.lm_head = nn.Linear(hidden, vocab, bias=False)

        def forward(self, found):
            return self.lm_head(self.norm(found)).mean((1, 2))[:, None]

    return Head()
