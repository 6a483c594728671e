"""Saving a model that has become smaller, and loading it into its own class: safetensors and a manifest, no pickle.

The file holds every parameter and buffer under its name, so ``safetensors.torch.load_file`` reads it as a plain state
dict. What tensors cannot say is in the manifest, JSON in the file's metadata: the class of every module and its whole
numbers (``out_channels``, ``groups``), which names are one tensor, what is trained, the order in memory.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import pathprox
from pathprox.copies import inner_name
from pathprox.slices import slot
from pathprox.text import shortened

FORMAT = 1
"""Version of the manifest. Files of a later one are refused."""


@dataclass(frozen=True)
class _Manifest:
    """What the tensors of the file do not say."""

    modules: dict[str, str]
    """The class of every module, by its path."""
    numbers: dict[str, dict[str, Any]]
    """The whole numbers (and tuples of them) among every module's attributes, by its path."""
    requires_grad: dict[str, bool]
    """Of every parameter; what is not named here is a buffer."""
    tied: dict[str, str]
    """Names that are the same tensor as another name, which is the one in the file."""
    strides: dict[str, list[int]]
    """Of tensors that do not lie in memory in the order of their dimensions, like channels_last."""


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model, shrunk or not, to one safetensors file.

    Parameters, all buffers and the whole numbers among the modules' attributes are kept; other attributes will be those
    of the factory given to `load`. The file appears complete or not at all, and an old one is replaced only then.
    """
    safetensors = _safetensors()
    _refuse_wrapped(model)
    modules, tensors = _modules(model), _tensors(model)
    if obstacle := next(_obstacles(model, tensors, safetensors), None):
        raise ValueError(f"the model cannot be saved: {obstacle}.")
    tied = _tied(tensors)
    stored = {name: t for name, t in tensors.items() if name not in tied}
    manifest = _Manifest(
        modules={name: type(module).__name__ for name, module in modules.items()},
        numbers={name: _numbers(module) for name, module in modules.items()},
        requires_grad={name: p.requires_grad for name, p in model.named_parameters(remove_duplicate=False)},
        tied=tied,
        strides={name: list(_stride(t)) for name, t in stored.items() if _stride(t) != _plain_stride(t)},
    )
    text = json.dumps({"format": FORMAT, "pathprox": pathprox.__version__, **vars(manifest)})
    plain = {name: t.detach().resolve_conj().resolve_neg().contiguous() for name, t in stored.items()}
    # One entry of metadata only: safetensors writes several in a random order.
    _write(Path(path).resolve(), safetensors.save(plain, {"pathprox": text}))


def load(model_factory: Callable[[], nn.Module], path: str | os.PathLike[str]) -> nn.Module:
    """The model that was saved: ``model_factory`` builds it at its original size, the file makes it what it was.

    Tensors come back in the file's dtype, on the device where the factory has them (on the CPU for the meta device).
    The model is in the mode, training or evaluation, that the factory leaves it in.
    """
    if isinstance(model_factory, nn.Module):
        raise TypeError("load takes a function that builds the model, not a model: load(lambda: MyNet(), path)")
    manifest, stored = _read(Path(path), _safetensors())
    model = model_factory()
    _refuse_wrapped(model)
    if difference := next(_differences(model, manifest, stored), None):
        cure = "The factory must build the model as it was before it was shrunk."
        raise ValueError(f"{path} does not fit the factory's model: {difference}. {cure}")
    for name, tensor in _rebuild(_tensors(model), manifest, stored).items():
        module, leaf = slot(model, name)
        if name in manifest.requires_grad:
            setattr(module, leaf, tensor)
        else:
            module._buffers[leaf] = tensor.detach() if isinstance(tensor, nn.Parameter) else tensor
    for name, module in _modules(model).items():
        _restore_numbers(module, manifest.numbers.get(name, {}))
    return model


def _safetensors() -> Any:
    try:
        importlib.import_module("numpy")  # safetensors writes through it, and does not ask for it
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError(f"a package is missing ({error}): pip install safetensors numpy") from error


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module under every path it has."""
    return dict(model.named_modules(remove_duplicate=False))


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer under every name it has."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def _refuse_wrapped(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model has to be a torch.nn.Module, not {type(model).__name__}")
    inner = inner_name(model)
    if inner is not None:
        raise ValueError(f"the model is wrapped in {type(model).__name__}. Pass the model inside: model.{inner}")


def _obstacles(model: nn.Module, tensors: Mapping[str, Tensor], safetensors: Any) -> Iterator[str]:
    """Why the model would not come back as it is, and what to do."""
    for name, t in tensors.items():
        if is_lazy(t):
            yield f"{name} belongs to a lazy layer and has no shape yet. Call the model once on an example"
        elif t.is_quantized:
            yield f"{name} is quantised ({t.dtype}), which safetensors cannot hold. Save before quantising"
        elif t.layout is not torch.strided or t.is_nested:
            yield f"{name} is not dense ({t.layout}), which safetensors cannot hold. Replace it by its to_dense()"
        elif type(t) not in (Tensor, nn.Parameter):
            yield f"{name} is a {type(t).__name__}, which would come back as a plain tensor. Replace it by a plain one"
        elif t.is_meta:
            yield f"{name} is on the meta device and has no values. Load or initialise the model first"
        elif not _holds(safetensors, t.dtype):
            yield f"{name} is {t.dtype}, which safetensors cannot hold. Convert it to another dtype"
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            where = f"{name or 'the model'} ({type(module).__name__})"
            yield f"what get_extra_state of {where} gives would be lost. Keep it in buffers, or use torch.save"
    if others := sorted(model.state_dict().keys() - tensors.keys()):
        yield f"its state_dict has {shortened(others)}, not a tensor of the model, which would be lost. Use torch.save"
    tied = _tied(tensors)
    dense = [(name, t) for name, t in tensors.items() if name not in tied and t.numel() and t.stride() == _stride(t)]
    spans = sorted((str(t.device), t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in dense)
    for (device, _, end, name), (other_device, start, _, other) in itertools.pairwise(spans):
        if device == other_device and start < end:
            yield f"{name} and {other} share memory, in part or in another shape. Make one of them a clone()"


def _holds(safetensors: Any, dtype: torch.dtype) -> bool:
    """Whether a tensor of that dtype comes back from safetensors."""
    try:
        return bool(safetensors.load(safetensors.save({"x": torch.empty(1, dtype=dtype)}))["x"].dtype == dtype)
    except Exception:
        return False


def _tied(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The names of a tensor after its first: the same object, or another one in exactly the same memory."""
    first: dict[Any, str] = {}
    tied = {}
    for name, t in tensors.items():
        view = (t.dtype, t.shape, t.stride(), t.is_conj(), t.is_neg())
        memory = (t.device, t.data_ptr(), *view) if t.numel() else id(t)
        if first.setdefault(memory, name) != name:
            tied[name] = first[memory]
    return tied


def _stride(t: Tensor) -> tuple[int, ...]:
    """The strides of a copy in the same memory order: the tensor's own, unless it has gaps or overlaps itself."""
    return torch.empty_like(t, device="meta").stride()


def _plain_stride(t: Tensor) -> tuple[int, ...]:
    return torch.empty(t.shape, device="meta").stride()


def _numbers(module: nn.Module) -> dict[str, Any]:
    """The public attributes that are a whole number or a tuple of them."""

    def fits(v: Any) -> bool:
        return type(v) is int or (type(v) in (tuple, torch.Size) and all(type(n) is int for n in v))

    return {key: value for key, value in vars(module).items() if not key.startswith("_") and fits(value)}


def _restore_numbers(module: nn.Module, numbers: Mapping[str, Any]) -> None:
    """Those that the module has as well, in the same type."""
    for key, now in _numbers(module).items():
        value = numbers.get(key)
        if type(value) is (int if type(now) is int else list):
            vars(module)[key] = type(now)(value)


def _write(path: Path, data: bytes) -> None:
    """Under another name first, so that nobody sees half a file."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a file: give the path of a file to write")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}: create it first")
    temporary = path.with_name(f".pathprox-{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path, safetensors: Any) -> tuple[_Manifest, dict[str, Tensor]]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get("pathprox")
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
    except Exception as error:
        cure = "It was cut short, or is something else: copy it again, or save the model again."
        raise ValueError(f"{path} is not a complete safetensors file ({error}). {cure}") from error
    if text is None:
        cure = "Build the model at the file's sizes and use load_state_dict(safetensors.torch.load_file(path))."
        raise ValueError(f"{path} has no manifest: it was not written by pathprox.save. {cure}")
    try:
        return _parse(json.loads(text), stored), stored
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{path} has a damaged manifest ({error!r}). Save the model again.") from error


def _parse(found: Any, stored: Mapping[str, Tensor]) -> _Manifest:
    if found["format"] > FORMAT:
        newer = f"the file has format {found['format']} and was written by pathprox {found['pathprox']}"
        raise ValueError(f"{newer}; {pathprox.__version__} reads formats up to {FORMAT}. Install a later pathprox.")
    kinds = {"modules": str, "numbers": dict, "requires_grad": bool, "tied": str, "strides": list}
    for key, kind in kinds.items():
        if any(type(value) is not kind for value in found[key].values()):
            raise TypeError(f"{key} has values of another kind than {kind.__name__}")
    manifest = _Manifest(**{key: found[key] for key in kinds})
    if lost := set(manifest.tied.values()) - stored.keys():
        raise KeyError(*lost)
    for name, stride in manifest.strides.items():
        if _stride(torch.empty_strided(stored[name].shape, stride, device="meta")) != tuple(stride):
            raise TypeError(f"{name} cannot have the strides {stride}")
    return manifest


def _differences(model: nn.Module, manifest: _Manifest, stored: Mapping[str, Tensor]) -> Iterator[str]:
    """Why the file cannot be put into the model."""
    modules, tensors = _modules(model), _tensors(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if lazy := [name for name, t in tensors.items() if is_lazy(t)]:
        yield f"it has lazy layers without weights ({shortened(lazy)}), which have to be called once on an example"
    for name in [*manifest.modules, *modules]:
        saved, built = manifest.modules.get(name), type(modules[name]).__name__ if name in modules else None
        if saved != built:
            yield f"{name or 'the model'} is {saved or 'missing'} in the file and {built or 'missing'} in the model"
    if missing := [name for name in tensors if name not in stored and name not in manifest.tied]:
        yield f"the file lacks {shortened(missing)}"
    if unexpected := [name for name in [*stored, *manifest.tied] if name not in tensors]:
        yield f"the model lacks {shortened(unexpected)}, which the file has"
    slots: dict[tuple[nn.Module, str], str] = {}
    for name, t in tensors.items():
        first = manifest.tied.get(name, name)
        other = slots.setdefault(slot(model, name), first)
        if (name in parameters) != (name in manifest.requires_grad):
            yield f"{name} is a parameter in {'the model' if name in parameters else 'the file'} only, else a buffer"
        if t.dim() != stored[first].dim():
            yield f"{name} has {t.dim()} dimensions in the model and {stored[first].dim()} in the file"
        if other != first:
            yield f"{name} and {other} belong to one shared module in the model, and to two in the file"


def _rebuild(here: Mapping[str, Tensor], manifest: _Manifest, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The file's tensors in memory of their own, on the model's devices, under all their names."""
    new: dict[str, Tensor] = {}
    for name, source in stored.items():
        device = "cpu" if here[name].is_meta else here[name].device
        stride = manifest.strides.get(name, _plain_stride(source))
        tensor = torch.empty_strided(source.shape, stride, dtype=source.dtype, device=device).copy_(source)
        trained = manifest.requires_grad.get(name)
        new[name] = tensor if trained is None else nn.Parameter(tensor, requires_grad=trained)
    return new | {name: new[first] for name, first in manifest.tied.items()}
