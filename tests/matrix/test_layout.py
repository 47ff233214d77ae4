"""Layout changes during a run: a new layout, a captured base, and steps before and after."""

from contextlib import closing
from pathlib import Path

import pytest
import torch

from adacheck_store.format.bodies import decode_base
from adacheck_store.format.errors import ModelMismatchError, UnsupportedError
from adacheck_store.format.keys import parse_key
from adacheck_store.store import open_store
from adacheck_store.tools.findings import Finding
from adacheck_store.tools.fsck import fsck
from tests.hooks.helpers import attach, bits, new_url, same
from tests.matrix import cases_layout as cases
from tests.matrix.kit import compare, run


def _prove(folder: Path, case: type, steps: tuple[int, ...], **gaps: str) -> None:
    """Restored to each of the steps in a process built for it, the run goes on the same."""
    name = f"{case.__module__}:{case.__name__}"
    reference = {row["step"]: row for row in run(folder, name, "reference")}
    store = (folder / "store").as_uri()
    compare(run(folder, name, "captured", store), reference)
    with open_store(store) as opened:
        assert not [f for f in fsck(opened) if isinstance(f, Finding)]
        found = {}
        for key in map(parse_key, opened.far.list("m/")):
            if key.kind == "base":
                gap = decode_base(opened.far.head(str(key)).head).gap
                if gap:
                    assert gap["from"] == key.step
                    found[f"at{key.step}"] = gap["reason"]
    assert found.keys() == gaps.keys(), found
    for step, words in gaps.items():
        assert words in found[step]
    for at in steps:
        rows = run(folder, name, "resumed", store, at)
        assert rows[0]["restored"] == at
        assert rows[0]["certificate"].count("exact")
        assert (rows[-1]["error"], rows[-1]["gap"]) == ("", "")
        compare(rows, reference)


@pytest.mark.parametrize("case", [cases.Growing, cases.GrowingRounded])
def test_b6_groups_added_and_layers_thawed(tmp_path, case):
    """B6: steps 4, 6 and 9 have the parameters, counters and rates of their time."""
    words = "parameters or groups have changed"
    _prove(tmp_path, case, (9, 6, 4, 8, 5), at5=words, at8=words)


def test_a_replaced_head_of_another_width(tmp_path):
    """The chain before has the old shape, the chain after the new one."""
    _prove(tmp_path, cases.Replaced, (7, 4, 5), at5="groups have changed")


def test_a_replaced_head_of_the_same_shape(tmp_path):
    """Nothing of the layout changes, and the chain starts anew all the same."""
    _prove(tmp_path, cases.Reset, (7, 4, 5), at5="groups have changed")


def test_flags_that_change_what_state_there_is(tmp_path):
    """Momentum switched on is a new layout; switched off it leaves the buffers behind."""
    _prove(tmp_path, cases.Flags, (2, 4, 6, 7, 9), at3="what state the optimizer keeps")


def test_tensors_outside_the_optimizer_are_found_at_the_next_round_step(tmp_path):
    """They are no part of the chain until then."""
    _prove(tmp_path, cases.NewBuffer, (4, 7), at4="tensors have changed")


def test_b6_a_freshly_built_optimizer_is_told_which_groups_differ():
    """B6: the error names the groups, what is in them, and leaves everything as it was."""
    url, grown = new_url(), cases.Growing()
    with attach(grown.model, grown.optimizers, url, base_every=4, keep=9) as ckpt:
        ckpt.restore()
        for number in range(1, 10):
            grown.step(number)
    fresh = cases.Growing()
    before = bits(fresh.model, fresh.optimizers[0])
    words = (
        "parameter groups: the chain has 3, this run 1 .only the chain has group 1: mid.0.weight, "
        "mid.0.bias; group 2: body.0.weight.*trained of 'body.0.weight': the chain has True"
    )
    with attach(fresh.model, fresh.optimizers, url) as ckpt:
        with pytest.raises(ModelMismatchError, match=words):
            ckpt.restore()
        same(before, bits(fresh.model, fresh.optimizers[0]))
    late = cases.Growing(at=9)
    with (
        attach(late.model, late.optimizers, url) as ckpt,
        pytest.raises(ModelMismatchError, match="only this run has group 1"),
    ):
        ckpt.restore(4)


def test_an_optimizer_that_keeps_a_parameter_the_model_has_lost():
    """Replaced in the model alone: later on that does not stop training, and no step is kept."""
    case, url = cases.Growing(), new_url()
    with closing(attach(case.model, case.optimizers, url, strict=False)) as ckpt:
        ckpt.restore()
        case.step(1)
        case.model["head"][0].bias = torch.nn.Parameter(torch.zeros(3))
        case.step(2)
        with pytest.raises(UnsupportedError, match=r"parameter 1 of group 0.*not in the model"):
            ckpt.flush()
