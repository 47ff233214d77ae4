"""The golden records: decoded they are what was meant, and the encoder still makes them."""

import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load

from adacheck_store.format.bodies import BaseBody, DeltaBody
from adacheck_store.format.check import check_base, check_delta
from adacheck_store.format.head import KINDS
from adacheck_store.format.record import array_offsets, decode_header, record_bytes
from tests.format.forge import NAMES, golden_bytes, read
from tests.golden.make_v1 import FOLDER, LAYOUT, golden

GOLDEN = golden()


def test_every_kind_has_a_golden_record() -> None:
    """Files and values correspond, and no kind is left out."""
    assert set(NAMES) == GOLDEN.keys()
    assert {item.record.sealed.head.kind for item in GOLDEN.values()} == set(KINDS)


@pytest.mark.parametrize("name", NAMES)
def test_golden_record_decodes(name: str) -> None:
    """A file gives back the values it was made of, its arrays and its head."""
    record, value = read(golden_bytes(name))
    expected = GOLDEN[name]
    assert value == expected.value
    assert record.sealed == expected.record.sealed
    assert record.arrays == expected.record.arrays
    if isinstance(value, DeltaBody):
        check_delta(record.sealed.head, value, LAYOUT)
    if isinstance(value, BaseBody):
        check_base(record.sealed.head, value, LAYOUT)


@pytest.mark.parametrize("name", NAMES)
def test_encoder_still_gives_the_same_bytes(name: str) -> None:
    """The encoder has not changed since the files were made."""
    assert b"".join(GOLDEN[name].record.buffers()) == golden_bytes(name)


@pytest.mark.parametrize("name", NAMES)
def test_safetensors_opens_golden_record(name: str) -> None:
    """The library of the container reads every record: metadata, names, dtypes and bytes."""
    record = GOLDEN[name].record
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["adacheck"].encode() == record.sealed.raw
    assert (metadata["id"], metadata["info"]) == (record.sealed.id, record.sealed.info)
    tensors = load(golden_bytes(name))
    assert tensors.keys() == record.arrays.keys()
    for key, tensor in tensors.items():
        assert bytes(tensor.view(torch.uint8).flatten().tolist()) == record.arrays[key]


@pytest.mark.parametrize("name", NAMES)
def test_arrays_lie_aligned(name: str) -> None:
    """Every array begins at a multiple of its element's size, in the file as in memory."""
    sealed = GOLDEN[name].record.sealed
    data = golden_bytes(name)
    assert record_bytes(sealed) == len(data)
    (length,) = struct.unpack_from("<Q", data)
    assert length % 8 == 0
    for info in sealed.head.arrays:
        assert array_offsets(sealed)[info.name] % (info.nbytes // max(info.elements, 1) or 1) == 0


def test_a_field_of_a_newer_writer_is_kept() -> None:
    """An unknown field of a head is covered by the id and written again."""
    sealed = decode_header(golden_bytes("extra"))
    assert sealed.head.other == {"note": "a field of a newer writer"}
    assert sealed.head.encode() == sealed.raw
