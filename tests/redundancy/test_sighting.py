"""Digests of tensors: of every dtype and shape, and different for whatever is not a copy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adacheck_store.arrays import TORCH_DTYPES
from adacheck_store.format.layout import whole_box
from adacheck_store.redundancy.sighting import Identity, Piece, Sighting, fingerprint, sight


def see(tensor: torch.Tensor, name: str = "w", role: str = "param", scope: str = "") -> Sighting:
    """A whole tensor's sighting."""
    shape = tuple(tensor.shape)
    return sight(tensor, name=name, role=role, shape=shape, piece=Piece((whole_box(shape),)),
                 scope=scope)  # fmt: skip


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of arbitrary bytes."""
    size = torch.empty(0, dtype=dtype).element_size()
    count = torch.Size(shape).numel()
    flat = torch.arange(count * size, dtype=torch.int64).remainder(2).to(torch.uint8)
    return flat.view(dtype).reshape(shape)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", sorted(TORCH_DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (0, 4)])
def test_every_dtype_and_shape(name: str, shape: tuple[int, ...]) -> None:
    """Also 0-dim and empty ones; a bit of difference is seen, and dtypes differ by name alone."""
    tensor = some(TORCH_DTYPES[name], *shape)
    seen = see(tensor)
    assert not seen.trouble
    assert seen == see(tensor.clone())
    assert seen.identity.dtype == name
    assert len(seen.digest) == 16
    assert seen.identity.nbytes == tensor.numel() * tensor.element_size()
    if tensor.numel():
        other = tensor.clone()
        other.reshape(-1).view(torch.uint8)[-1] ^= 1
        assert see(other).digest != seen.digest
    twin = "U8" if name != "U8" else "I8"
    assert fingerprint(replace(seen.identity, dtype=twin), tensor) != seen.digest


def test_strides_are_not_content() -> None:
    """A transposed or strided view has the digest of its logical elements, as has a negated one."""
    base = torch.randn(6, 8)
    for view in (base.t(), base[::2, 1::3], base.expand(2, 6, 8)):
        assert see(view).digest == see(view.contiguous()).digest
    conjugate = torch.randn(4, dtype=torch.complex64).conj()
    assert see(conjugate).digest == see(conjugate.resolve_conj()).digest
    assert see(conjugate).digest != see(conjugate.conj()).digest
    assert see(torch.nn.Parameter(base)).digest == see(base).digest


def test_what_is_not_a_copy_differs() -> None:
    """Equal bytes under another scope, name, role, shape, box or flat range."""
    data = torch.ones(4, 4)
    whole = Piece((whole_box((4, 4)),))
    kinds = [
        {"name": "w", "role": "param", "shape": (4, 4), "piece": whole},
        {"name": "v", "role": "param", "shape": (4, 4), "piece": whole},
        {"name": "w", "role": "exp_avg", "shape": (4, 4), "piece": whole},
        {"name": "w", "role": "param", "shape": (4, 4), "piece": whole, "scope": "stage1"},
        {"name": "w", "role": "param", "shape": (8, 4), "piece": whole},
        {"name": "w", "role": "param", "shape": (8, 4), "piece": Piece((((4, 8), (0, 4)),))},
        {"name": "w", "role": "param", "shape": (8, 4), "piece": Piece(flat=(0, 16))},
        {"name": "w", "role": "param", "shape": (8, 4), "piece": Piece(flat=(16, 32))},
    ]
    digests = {sight(data, **kind).digest for kind in kinds}  # type: ignore[arg-type]
    assert len(digests) == len(kinds)
    assert b"" not in digests


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.zeros(2, dtype=torch.bits8) if hasattr(torch, "bits8") else torch.eye(2).to_sparse(),
    ],
)
def test_what_cannot_be_digested_is_said(tensor: torch.Tensor) -> None:
    """It is no error: the tensor will be saved, and the sighting says why."""
    seen = see(tensor)
    assert not seen.digest
    assert "cannot be digested" in seen.trouble


def test_a_piece_of_another_size_is_not_digested() -> None:
    """Whatever a placement says: what is there counts."""
    seen = sight(torch.ones(3), name="w", role="param", shape=(8,), piece=Piece(flat=(0, 4)))
    assert not seen.digest
    assert "3 elements where 4" in seen.trouble


@given(st.lists(st.text(max_size=4), min_size=4, max_size=4), st.integers(0, 3))
def test_no_two_identities_are_spelled_alike(words: list[str], at: int) -> None:
    """Text cannot move from one field into the next."""
    scope, name, role, more = words
    one = Identity(name=name, role=role, dtype="F32", shape=(1,), piece=Piece(flat=(0, 1)),
                   scope=scope)  # fmt: skip
    moved = [scope, name, role]
    moved[at % 3] += more or "x"
    other = replace(one, scope=moved[0], name=moved[1], role=moved[2])
    tensor = torch.zeros(1)
    assert fingerprint(one, tensor) != fingerprint(other, tensor)
