"""Canonical names, ties, and what is refused at attach."""

import pytest
import torch

from adacheck_store.format.errors import (
    ModelMismatchError,
    NameRefusedError,
    OrderError,
    UnsupportedError,
)
from adacheck_store.trainer_hooks.layouts import bind
from adacheck_store.trainer_hooks.names import named_tensors

from .helpers import adamw, attach, bits, mlp, new_url, record_run, restored, same, train


class Tied(torch.nn.Module):
    """A head whose weight is the embedding's."""

    def __init__(self):
        super().__init__()
        self.emb = torch.nn.Linear(5, 7, bias=False)
        self.lm_head = torch.nn.Linear(5, 7, bias=False)
        self.lm_head.weight = self.emb.weight

    def forward(self, x):
        return self.lm_head(x) + self.emb(x)


def make_tied(seed=0):
    """A tied model and its optimizer."""
    torch.manual_seed(seed)
    model = Tied()
    return model, adamw(model)


def test_a9_tied_weights_are_stored_once_and_stay_tied():
    """A9: one slice with an alias; after restore both names are one tensor."""
    url, _, marks = record_run(make_tied, 4)
    with restored(make_tied, url) as (model, opt, _, _):
        same(marks[4], bits(model, opt))
        assert model.lm_head.weight is model.emb.weight
    (section,) = bind(*make_tied()).layout.sections
    assert [(s.name, s.aliases) for s in section.slices] == [("emb.weight", ("lm_head.weight",))]


def test_untied_models_do_not_fit():
    """A tie that is there on one side only is a mismatch."""
    url, _, _ = record_run(make_tied, 2)

    def untied(seed):
        model, _ = make_tied(seed)
        model.lm_head.weight = torch.nn.Parameter(torch.randn(7, 5))
        return model, adamw(model)

    with pytest.raises(ModelMismatchError, match="tied"), restored(untied, url):
        pass


def test_a10_compiled_and_wrapped_models_have_plain_names():
    """A10: saved from a compiled model, restored into the plain one, and back."""

    def compiled(seed=0):
        model = torch.compile(mlp(seed), backend="eager")
        return model, adamw(model)

    def plain(seed=0):
        model = mlp(seed)
        return model, adamw(model)

    for first, second in ((compiled, plain), (plain, compiled)):
        url, _, marks = record_run(first, 3)
        with restored(second, url) as (model, opt, _, _):
            found = {name.replace("_orig_mod.", ""): v for name, v in bits(model, opt).items()}
            wanted = {name.replace("_orig_mod.", ""): v for name, v in marks[3].items()}
            same(wanted, found)
    inner = mlp()
    outer = torch.nn.Sequential(torch.nn.DataParallel(torch.compile(inner, backend="eager")))
    names = [item.name for item in named_tensors(outer, adamw(outer))]
    assert names[:2] == ["0.0.weight", "0.0.bias"]


@pytest.mark.parametrize("fused", [True, False])
def test_a11_memory_formats_and_odd_strides(fused):
    """A11: channels_last and transposed parameters, and an expanded gradient."""

    def make(seed=0):
        torch.manual_seed(seed)
        model = torch.nn.Module()
        conv = torch.nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        model.conv = conv
        model.turned = torch.nn.Parameter(torch.randn(4, 6).t())
        model.register_buffer("wide", torch.randn(1, 3).expand(4, 3))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)

    def step(model, opt):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        if not fused:  # torch's fused kernel does not look at strides
            model.conv.bias.grad = torch.randn(1).expand(5)
        opt.step()

    url, _, marks = record_run(make, 4, step=step, base_every=3)
    with restored(make, url) as (model, opt, _, _):
        same(marks[4], bits(model, opt))
        weight = model.conv.weight
        assert weight.is_contiguous(memory_format=torch.channels_last)
        assert opt.state[weight]["exp_avg"].stride() == weight.stride()
        assert model.wide.stride() == (0, 1)


def test_gradients_with_other_strides_than_a_fused_parameter():
    """The fused kernel walks memory: what it then does is kept, whatever it is."""

    def make(seed=0):
        torch.manual_seed(seed)
        model = torch.nn.Conv2d(3, 8, 4).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def step(model, opt):
        for param in model.parameters():
            param.grad = torch.randn(param.shape)
        opt.step()

    url, _, marks = record_run(make, 3, step=step, base_every=2)
    with restored(make, url) as (model, opt, _, _):
        same(marks[3], bits(model, opt))


def test_d6_parameters_that_share_a_buffer():
    """D6: two parameters that are slices of one storage."""

    def make(seed=0):
        torch.manual_seed(seed)
        model = torch.nn.Module()
        flat = torch.randn(50)
        model.a = torch.nn.Parameter(flat[:20].view(4, 5))
        model.b = torch.nn.Parameter(flat[20:])
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(model, opt):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        opt.step()

    url, _, marks = record_run(make, 3, step=step)
    with restored(make, url) as (model, opt, _, _):
        same(marks[3], bits(model, opt))
        assert model.a.untyped_storage().data_ptr() == model.b.untyped_storage().data_ptr()


def test_d7_any_name_is_kept():
    """D7: names with spaces, slashes and other alphabets."""
    names = ["a b=c", "专家☃", "%2F", "a+b", "a/b", "a", "x" * 600, "zarr_json", "A"]

    def make(seed=0):
        torch.manual_seed(seed)
        model = torch.nn.ParameterDict({name: torch.randn(3) for name in names})
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, opt):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        opt.step()

    url, _, marks = record_run(make, 2, step=step)
    with restored(make, url) as (model, opt, _, _):
        same(marks[2], bits(model, opt))


def test_extra_tensors_by_names():
    """A parameter that is not in the model is refused by place, and taken with a name."""
    model = mlp()
    loose = torch.nn.Parameter(torch.zeros(3))
    opt = torch.optim.SGD([*model.parameters(), loose], lr=0.1)
    with pytest.raises(UnsupportedError, match=r"parameter 6 of group 0 \(shape \(3,\)\).*names="):
        attach(model, opt, new_url())
    with attach(model, opt, new_url(), names={"loose": loose}) as ckpt:
        ckpt.restore()
        train(model, opt)
    with pytest.raises(NameRefusedError, match="two tensors"):
        bind([mlp(), mlp()], opt)


def refused():
    """What is not supported, with a part of the refusal."""
    model = mlp()
    params = list(model.parameters())
    sparse = torch.nn.Embedding(4, 4, sparse=True)
    meta = torch.nn.Linear(3, 3, device="meta")
    lazy = torch.nn.LazyLinear(3)
    adam = torch.optim.Adam(params)
    yield "two", model, [adam, torch.optim.SGD(params, lr=0.1)], "by optimizers 0 and 1"
    yield "no-optimizer", model, torch.nn.Linear(1, 1), "Linear"
    yield "sparse", sparse, torch.optim.SGD(sparse.parameters(), lr=1), "sparse"
    yield "meta", meta, torch.optim.SGD(meta.parameters(), lr=1), "meta"
    yield "lazy", lazy, torch.optim.SGD(mlp().parameters(), lr=1), "not in the model"
    yield "no-model", 3, adam, "model of type int"


@pytest.mark.parametrize(("model", "optimizer", "text"), [
    pytest.param(*case[1:], id=case[0]) for case in refused()
])  # fmt: skip
def test_refusals_at_attach(model, optimizer, text, tmp_path):
    """Refused by name, and the store is not even made."""
    with pytest.raises(UnsupportedError, match=text):
        attach(model, optimizer, (tmp_path / "store").as_uri())
    assert not (tmp_path / "store").exists()


def changed_models():
    """F6: other models, with what the error must name on both sides."""

    def build(*layers, groups=None, kind=torch.optim.AdamW):
        model = torch.nn.Sequential(*layers)
        params = list(model.parameters())
        chosen = [{"params": params[:1]}, {"params": params[1:]}] if groups else params
        return model, kind(chosen, lr=1e-2)

    linear, norm = torch.nn.Linear, torch.nn.BatchNorm1d
    yield "shape", build(linear(5, 6), norm(6)), ["'0.weight'", "[7, 5]", "[6, 5]"]
    yield "missing", build(linear(5, 7)), ["'1.weight'", "of the chain is not in this model"]
    yield "added", build(linear(5, 7), norm(7), linear(7, 1)), ["'2.weight'", "not in the chain"]
    yield "dtype", build(linear(5, 7).double(), norm(7)), ["F32", "F64"]
    yield "groups", build(linear(5, 7), norm(7), groups=True), ["group", "has 0", "run 1"]
    yield (
        "class",
        build(linear(5, 7), norm(7), kind=torch.optim.Adam),
        ["optim.AdamW", "optim.Adam"],
    )


@pytest.mark.parametrize(("pair", "texts"), [
    pytest.param(*case[1:], id=case[0]) for case in changed_models()
])  # fmt: skip
def test_f6_another_model_is_refused_and_left_alone(pair, texts):
    """F6: both sides are named, and neither model nor optimizer is touched."""

    def make(seed=0):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    url, _, marks = record_run(make, 2)
    model, opt = pair
    before = bits(model, opt)
    with attach(model, opt, url) as ckpt, pytest.raises(ModelMismatchError) as caught:
        ckpt.restore()
    for text in texts:
        assert text in str(caught.value)
    same(before, bits(model, opt))
    with attach(model, opt, url) as ckpt:
        with pytest.raises(ModelMismatchError):
            ckpt.restore()
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        with pytest.raises(OrderError, match="did not succeed"):
            opt.step()
    same(before, bits(model, opt))
    with restored(make, url) as (model, opt, _, _):
        same(marks[2], bits(model, opt))
