"""The parts of the hooks one by one: halves, extras, generators, blocks."""

import collections
import io
import random

import numpy as np
import pytest
import torch

from adacheck_store import kernels
from adacheck_store.arrays import byte_view
from adacheck_store.boundary import Link
from adacheck_store.fingerprint import block_sum, blocks_at
from adacheck_store.format.bodies import decode_extra
from adacheck_store.format.errors import MalformedError, UnsupportedError
from adacheck_store.format.ids import BLOCK_BYTES, block_count, iter_blocks
from adacheck_store.trainer_hooks import blocks as blocks_module
from adacheck_store.trainer_hooks.blocks import BlockWatch
from adacheck_store.trainer_hooks.capture_base import existing_arrays, fill_area
from adacheck_store.trainer_hooks.extras import extra_record, freeze, resolve, thaw
from adacheck_store.trainer_hooks.halves import Scales, encode, usable_scale
from adacheck_store.trainer_hooks.layouts import bind
from adacheck_store.trainer_hooks.pending import sort_out
from adacheck_store.trainer_hooks.rng import rng_state, set_rng_state
from adacheck_store.trainer_hooks.stager import HostBuffer, StateArea

LINK = Link(
    run="r", term="t000001-" + "0" * 16, part="p000000", rank="r000000", parent="0" * 64,
    manifest="1" * 64, layout="2" * 64,
)  # fmt: skip


def decode(form, out):
    """What a fold makes of an encoded gradient."""
    half = out.view(torch.bfloat16 if form.encoding == "bf16" else torch.float16).float()
    return half if form.scale is None else half * form.scale


def spread(count, seed=0):
    """Numbers over many binades."""
    torch.manual_seed(seed)
    return torch.randn(count) * torch.exp(torch.randn(count) * 3) * 1e-3


@pytest.mark.parametrize("count", [1, 7, 64, 5000, 100_003])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [("bf16", "bf16"), ("fp16", "fp16"), ("clipped", "bf16"), ("zeros", "bf16"), ("raw", "raw")],
)
def test_the_smallest_form_gives_every_bit_back(kind, expected, count):
    """Each kind of gradient is recognised, and decoded to the same bits."""
    values = {
        "bf16": spread(count).bfloat16().float(),
        "fp16": torch.randn(count).half().float(),
        "clipped": spread(count).bfloat16().float() * 0.3712345,
        "zeros": torch.zeros(count) * -1,
        "raw": spread(count),
    }[kind]
    out = torch.empty(count, dtype=torch.int16)
    form = encode(values, Scales(), out)
    if count > 64:
        assert form.encoding == expected
        assert (form.scale is not None) == (kind == "clipped")
    if form.encoding != "raw":
        assert torch.equal(decode(form, out).view(torch.int32), values.view(torch.int32))


def test_scales_are_found_whatever_they_are():
    """Forty coefficients, mostly zeros included, and one element that spoils it."""
    out = torch.empty(20_000, dtype=torch.int16)
    torch.manual_seed(0)
    base = spread(20_000).bfloat16().float()
    base[:15_000] = 0.0
    for number in range(40):
        scale = float(torch.rand(()) * 0.98 + 0.01)
        values = base * scale
        form = encode(values, Scales(), out)
        assert form.encoding == "bf16", (number, scale)
        assert torch.equal(decode(form, out).view(torch.int32), values.view(torch.int32))
    values[17_001] = torch.nextafter(values[17_001], torch.tensor(9.0))
    assert encode(values, Scales(), out).encoding == "raw"


def test_nan_payloads_and_signed_zeros_are_bits():
    """Equality is of bits: NaN payloads and -0.0 either survive or the form is raw."""
    words = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000, 0x7FC10000], dtype=torch.int64)
    values = words.to(torch.int32).view(torch.float32)
    out = torch.empty(4, dtype=torch.int16)
    assert encode(values, Scales(), out).encoding == "raw"
    form = encode(values[2:], Scales(), out[:2])
    assert form.encoding == "bf16"
    assert torch.equal(decode(form, out[:2]).view(torch.int32), values[2:].view(torch.int32))


def test_observed_coefficients_that_change_nothing_are_not_tried():
    """One, zero and NaN are no scales."""
    assert usable_scale(0.25) == 0.25
    assert [usable_scale(value) for value in (1.0, 0.0, float("nan"), float("inf"))] == [None] * 4


TREES = [
    {"a": [1, 2.5, None, True, "x", b"\x00"], "b": (1, (2,)), 3: {"$f": -0.0}},
    collections.Counter({3: 2}),
    collections.OrderedDict(b=1, a=2),
    collections.deque([1, 2], maxlen=4),
    {"s": {1, 2}, "f": frozenset("ab")},
    [complex(1, -2), 2**70, float("inf")],
    np.arange(6, dtype=np.uint16).reshape(2, 3),
    np.float32(1.5),
    torch.Size([1, 2]),
]


def through_a_record(tree):
    """Freeze, write as an extra, read back, thaw."""
    record = extra_record(LINK, 3, {"t": freeze(tree, "t")})
    body = decode_extra(record.sealed.head)
    arrays = {
        info.name: torch.frombuffer(bytearray(record.arrays[info.name]), dtype=torch.uint8)
        for info in record.sealed.head.arrays
        if info.nbytes
    }
    typed = {
        info.name: arrays[info.name].view(_dtype(info.dtype)) for info in record.sealed.head.arrays
    }
    return thaw(resolve(body.tree["t"], typed))


def _dtype(name):
    from adacheck_store.arrays import torch_dtype

    return torch_dtype(name)


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: type(tree).__name__)
def test_trees_come_back_with_their_types(tree):
    """Every spelled type survives a record."""
    found = through_a_record(tree)
    assert type(found) is type(tree)
    if isinstance(tree, np.ndarray):
        assert found.dtype == tree.dtype
        assert np.array_equal(found, tree)
    else:
        assert found == tree


def test_tensors_and_streams_in_trees():
    """Tensors of any dtype and shape, and BytesIO; later changes do not reach the tree."""
    live = torch.arange(6).view(2, 3)
    frozen = freeze({"t": live, "half": torch.ones(3).bfloat16(), "s": torch.tensor(2.0)}, "x")
    live.zero_()
    assert frozen["t"].tolist() == [[0, 1, 2], [3, 4, 5]]
    found = through_a_record(frozen)
    assert found["half"].dtype == torch.bfloat16
    assert found["s"].shape == ()
    assert through_a_record(io.BytesIO(b"abc")).getvalue() == b"abc"


def test_what_has_no_spelling_is_refused_with_its_path():
    """Objects, functions, subclasses and depth."""
    deep = []
    for _ in range(30):
        deep = [deep]
    point = collections.namedtuple("Point", "x")
    for value, text in [
        ({"a": [object()]}, r"t\.a\[0\] is a builtins.object"),
        ({"f": len}, r"t\.f"),
        (deep, "nested deeper"),
        (point(1), "Point"),
        ({"adacheck.type": 1}, "rename"),
        (torch.ones(2).to_sparse(), "not plain"),
    ]:
        with pytest.raises(UnsupportedError, match=text):
            freeze(value, "t")
    with pytest.raises(MalformedError):
        thaw({"adacheck.type": "eval", "value": 1})


def test_generators_go_back():
    """Python's, numpy's and torch's generators, normal deviates in hand included."""
    random.seed(3)
    random.gauss(0, 1)
    np.random.seed(4)
    np.random.randn()
    torch.manual_seed(5)
    state = through_a_record(rng_state())

    def draw():
        return random.gauss(0, 1), random.random(), np.random.randn(3).tolist(), torch.randn(3)

    first = draw()
    set_rng_state(state)
    second = draw()
    assert first[:3] == second[:3]
    assert torch.equal(first[3], second[3])
    with pytest.raises(MalformedError):
        set_rng_state({"python": 1})


@pytest.mark.parametrize("compiled", [True, False])
def test_staged_blocks_are_those_of_the_state(monkeypatch, compiled):
    """What is summed up or copied at a boundary sums to what the whole arrays do, at every turn."""
    if not compiled:
        monkeypatch.setattr(blocks_module, "piece_sum", lambda data, first: None)
    torch.manual_seed(0)
    sizes = (700_003, 1, 64, 900_001, 0, 5_000, 3_000_000)
    model = torch.nn.ParameterList(torch.randn(size) for size in sizes)
    opt = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    for index, param in enumerate(model.parameters()):
        param.grad = torch.randn_like(param) if index != 3 else None
    opt.step()
    binding = bind(model, opt)
    watch = BlockWatch(binding)
    area = StateArea(binding, pinned=False)
    fill_area(binding, area)
    buffer = HostBuffer(binding, "lossless", watch.area_bytes, pinned=False)
    names = existing_arrays(binding)
    assert len(names) == 3
    seen = {name: set() for name in names}
    for step in range(1, 17):
        watch.stage(step, buffer)
        assert any(buffer.sums.values()) is (compiled and kernels.block_sum(b"") is not None)
        for item in watch.sums(step, buffer, set(names)):
            blocks = list(iter_blocks(byte_view(area.arrays[item.array])))
            wanted = {
                index: block_sum(blocks[index]) for index in blocks_at(step, len(blocks), 10_000)
            }
            assert item.blocks() == wanted
            seen[item.array] |= wanted.keys()
    for name, blocks in seen.items():
        flat = area.arrays[name]
        assert blocks == set(range(block_count(flat.numel() * 4)))
    assert watch.area_bytes % BLOCK_BYTES == 0


def test_gradients_that_are_zeros_are_named_and_not_kept():
    """Of a device's gradients only the writer's thread can tell; negative zeros are no zeros."""
    grads = {"zeros": torch.zeros(3), "ones": torch.ones(2), "minus": torch.tensor([-0.0])}
    found = sort_out({"held": ["before"], "grads": grads, "other": 1})
    assert found["held"] == ["before", "zeros"]
    assert list(found["grads"]) == ["ones", "minus"]
    assert found["other"] == 1
    assert sort_out(found) is found
    assert sort_out({"other": 1}) == {"other": 1}
