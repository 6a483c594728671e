"""What would not come back is refused before anything is written; and no model is half loaded."""

import contextlib
import copy
import json
import os
import resource
import sys
import warnings

import pytest
import torch
from torch import nn

from networks import chain
from pathprox import __version__
from pathprox.store import FORMAT, load, save

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "small.safetensors"


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}


class Packed(nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "packed"] = torch.ones(2)


class Special(nn.Parameter):
    pass


def holding(**tensors):
    """A model with these tensors in a layer."""
    layer = nn.Module()
    for name, t in tensors.items():
        (layer.register_parameter if isinstance(t, nn.Parameter) else layer.register_buffer)(name, t)
    return nn.Sequential(layer)


def quantised():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor.* deprecated")  # by torch 2.13 and later
        return torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)


WEIGHT = nn.Parameter(torch.randn(3, 4))
REFUSED = {
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), r"0\.weight belongs to a lazy layer .* Call the model once"),
    "quantised": (lambda: holding(a=quantised()), r"0\.a is quantised \(torch.qint8\).* Save before quantising"),
    "packed": (lambda: nn.Sequential(Packed(2, 2)), r"its state_dict has 0\.packed.* Use torch\.save"),
    "sparse": (lambda: holding(a=torch.eye(3).to_sparse()), r"0\.a is not dense \(torch.sparse_coo\).*to_dense"),
    "subclass": (lambda: holding(a=Special(torch.ones(2))), r"0\.a is a Special.* Replace it"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), "weight is on the meta device"),
    "complex128": (lambda: holding(a=torch.ones(2, dtype=torch.complex128)), r"0\.a is torch.complex128.* Convert it"),
    "extra state": (lambda: nn.Sequential(Extra(2, 2)), r"get_extra_state of 0 \(Extra\).* Keep it in buffers"),
    "transposed tie": (lambda: holding(a=WEIGHT, b=nn.Parameter(WEIGHT.detach().t())), r"0\.\w and 0\.\w share memory"),
    "part": (lambda: holding(a=WEIGHT, b=WEIGHT.detach()[1:]), r"0\.a and 0\.b share memory, in part.*clone"),
    "conjugate": (lambda: holding(a=(z := torch.ones(2, dtype=torch.complex64)), b=z.conj()), "share memory"),
    "compiled": (lambda: torch.compile(nn.Linear(2, 2)), r"wrapped in OptimizedModule.*model\._orig_mod"),
    "parallel": (lambda: nn.DataParallel(nn.Linear(2, 2)), r"wrapped in DataParallel.*model\.module"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_not_come_back_is_refused_and_the_old_file_kept(name, path):
    path.write_bytes(b"old")
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        save(make(), path)
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == [path.name]


def test_a_distributed_wrapper_is_refused(path):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        with pytest.raises(ValueError, match=r"wrapped in DistributedDataParallel.*model\.module"):
            save(wrapped, path)
        save(wrapped.module, path)
    finally:
        torch.distributed.destroy_process_group()


def test_only_modules_are_saved_and_only_factories_load(path):
    with pytest.raises(TypeError, match=r"has to be a torch.nn.Module, not dict"):
        save({}, path)
    save(nn.Linear(2, 2), path)
    with pytest.raises(TypeError, match=r"a function that builds the model.*load\(lambda"):
        load(nn.Linear(2, 2), path)
    with pytest.raises(TypeError, match=r"has to be a torch.nn.Module, not NoneType"):
        load(lambda: None, path)
    with pytest.raises(ValueError, match="wrapped in OptimizedModule"):
        load(lambda: torch.compile(nn.Linear(2, 2)), path)


def net(hidden=8):
    return chain(4, hidden, 2)


def rewrite(path, change) -> None:
    """The same tensors with another manifest."""
    with safetensors.safe_open(path, framework="pt") as file:
        manifest = json.loads(file.metadata()["pathprox"])
    path.write_bytes(safetensors.save(safetensors.load_file(path), {"pathprox": json.dumps(change(manifest))}))


def assert_refused(path, factory, message: str, error=ValueError) -> None:
    """Nothing of a model that exists already is changed."""
    model = factory()
    before = copy.deepcopy(model)
    with pytest.raises(error, match=message):
        load(lambda: model, path)
    assert repr(model) == repr(before)
    for a, b in zip(model.state_dict().values(), before.state_dict().values(), strict=True):
        assert torch.equal(a, b)


OTHERS = {
    "root": (lambda: nn.ModuleList(net()), "the model is Sequential in the file and ModuleList in the model"),
    "layer": (lambda: nn.Sequential(net()[0], nn.GELU(), net()[2]), "1 is ReLU in the file and GELU in the model"),
    "shorter": (lambda: net()[:2], "2 is Linear in the file and missing in the model"),
    "longer": (lambda: nn.Sequential(*net(), nn.ReLU()), "3 is missing in the file and ReLU in the model"),
    "no bias": (lambda: chain(4, 8, 2, bias=False), r"the model lacks 0\.bias, 2\.bias, which the file has"),
    "lazy": (
        lambda: nn.Sequential(nn.LazyLinear(8), *net()[1:]),
        r"lazy layers without weights \(0\.weight, 0\.bias\)",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_first_difference_from_the_factorys_model_is_named(name, path):
    save(net(), path)
    factory, message = OTHERS[name]
    with pytest.raises(ValueError, match=rf"does not fit the factory's model: .*{message}.* before it was shrunk"):
        load(factory, path)


def test_tensors_have_to_be_of_the_same_kinds_and_dimensions(path):
    def holder(t):
        return lambda: holding(a=t)

    save(holding(a=torch.ones(3)), path)
    assert_refused(path, holder(torch.ones(3, 1)), r"0\.a has 2 dimensions in the model and 1 in the file")
    assert_refused(path, holder(nn.Parameter(torch.ones(3))), r"0\.a is a parameter in the model only")
    assert_refused(path, lambda: holding(a=torch.ones(3), b=torch.ones(3)), r"the file lacks 0\.b")
    save(holding(a=nn.Parameter(torch.ones(3))), path)
    assert_refused(path, holder(torch.ones(3)), r"0\.a is a parameter in the file only")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.999])
def test_a_file_that_was_cut_short_is_refused(share, path):
    save(chain(40, 80, 2), path)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    assert_refused(path, net, r"not a complete safetensors file \(.*\)\. It was cut short.* save the model again")


@pytest.mark.parametrize("content", [b"PK\3\4", b"\0" * 100, b"Some text, certainly longer than a header's length."])
def test_other_files_are_refused(content, path):
    path.write_bytes(content)
    assert_refused(path, net, "not a complete safetensors file")


def test_a_file_that_is_not_there_is_not_found(path):
    assert_refused(path, net, "there is no file .*small", FileNotFoundError)
    assert_refused(path.parent, net, "there is no file", FileNotFoundError)


def test_safetensors_without_a_manifest_are_refused(path):
    for metadata in (None, {"format": "pt"}):
        path.write_bytes(safetensors.save(net().state_dict(), metadata))
        assert_refused(path, net, r"has no manifest: it was not written by pathprox.save.*load_state_dict")


def test_later_formats_are_refused_with_the_version_that_wrote_them(path):
    save(net(), path)
    rewrite(path, lambda found: {"format": FORMAT + 1, "pathprox": "9.9"})
    message = f"format {FORMAT + 1} .*pathprox 9.9; {__version__} reads formats up to {FORMAT}. Install a later"
    assert_refused(path, net, message)


DAMAGES = {
    "not a dict": lambda found: [1],
    "nothing": lambda found: {},
    "no format": lambda found: found | {"format": None},
    "a part missing": lambda found: {k: v for k, v in found.items() if k != "tied"},
    "a part of another kind": lambda found: found | {"modules": ["Linear"]},
    "a value of another kind": lambda found: found | {"requires_grad": {"0.weight": 1}},
    "tied to nothing": lambda found: found | {"tied": {"0.weight": "9.weight"}},
    "strides of nothing": lambda found: found | {"strides": {"9.weight": [1]}},
    "too few strides": lambda found: found | {"strides": {"0.weight": [1]}},
    "overlapping strides": lambda found: found | {"strides": {"0.weight": [0, 1]}},
    "strides with gaps": lambda found: found | {"strides": {"0.weight": [10**12, 1]}},
    "strides that are no numbers": lambda found: found | {"strides": {"0.weight": ["4", None]}},
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_manifest_is_refused(name, path):
    save(net(), path)
    rewrite(path, DAMAGES[name])
    assert_refused(path, net, r"has a damaged manifest \(.*\)\. Save the model again")


def test_a_manifest_that_is_not_json_is_refused(path):
    path.write_bytes(safetensors.save(net().state_dict(), {"pathprox": "{'single quotes'}"}))
    assert_refused(path, net, r"has a damaged manifest \(JSONDecodeError.*Save the model again")


@contextlib.contextmanager
def files_of_at_most(count: int):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_write_leaves_the_old_file_and_nothing_else(path):
    model = net()
    save(model, path)
    old = path.read_bytes()
    with files_of_at_most(1000), pytest.raises(OSError, match="File too large"):
        save(net(800), path)
    assert path.read_bytes() == old
    assert os.listdir(path.parent) == [path.name]


def test_an_interrupted_save_leaves_the_old_file_and_nothing_else(path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    path.write_bytes(b"old")
    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(net(), path)
    assert path.read_bytes() == b"old"
    assert os.listdir(path.parent) == [path.name]


def test_paths_are_text_links_or_refused(path):
    link = path.with_name("latest")
    link.symlink_to(path)
    save(net(), str(link))
    assert link.is_symlink()
    plain = path.with_name("plain")
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode
    assert repr(load(net, str(link))) == repr(net())
    with pytest.raises(ValueError, match="is not a file"):
        save(net(), path.parent)
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*none: create it first"):
        save(net(), path.parent / "none" / "small")


@pytest.mark.parametrize("package", ["safetensors.torch", "numpy"])
def test_without_safetensors_the_error_says_what_to_install(package, path, monkeypatch):
    save(net(), path)
    monkeypatch.setitem(sys.modules, package, None)
    for call in (lambda: save(net(), path), lambda: load(net, path)):
        with pytest.raises(ImportError, match="pip install safetensors"):
            call()
