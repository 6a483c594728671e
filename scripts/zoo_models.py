"""The models of the zoo: public architectures with random weights, small inputs and, where one can choose, few layers.

Nothing is downloaded. `NAMES` lists them as "source/name" and `build` makes one.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from zoo_transformers import TRANSFORMERS, Only, draw_for

Inputs = tuple[Tensor, ...]
SIDE = 64
"""Of an image, in pixels, where a table does not say otherwise."""


@dataclass(frozen=True)
class Entry:
    """One model of the zoo."""

    model: nn.Module
    draw: Callable[[torch.Generator], Inputs]
    """Random inputs for it, others at every call."""


# "size" is the side of the image; everything else goes to the function that makes the model.
TORCHVISION: dict[str, dict[str, Any]] = {
    "alexnet": {"size": 96},
    "convnext_tiny": {},
    "deeplabv3_mobilenet_v3_large": {"weights_backbone": None, "aux_loss": False},
    "densenet121": {},
    "efficientnet_b0": {},
    "efficientnet_v2_s": {},
    "fcn_resnet50": {"weights_backbone": None, "aux_loss": False},
    "googlenet": {"aux_logits": False, "init_weights": False},
    "inception_v3": {"size": 96, "aux_logits": False, "init_weights": False},
    "lraspp_mobilenet_v3_large": {"weights_backbone": None},
    "mnasnet0_5": {},
    "mobilenet_v2": {},
    "mobilenet_v3_large": {},
    "mobilenet_v3_small": {},
    "regnet_x_400mf": {},
    "regnet_y_400mf": {},
    "resnet18": {},
    "resnet50": {},
    "resnext50_32x4d": {},
    "shufflenet_v2_x0_5": {},
    "shufflenet_v2_x1_0": {},
    "squeezenet1_1": {},
    "swin_t": {},
    "swin_v2_t": {},
    "maxvit_small": {
        "input_size": (64, 64),
        "stem_channels": 16,
        "partition_size": 4,
        "block_channels": [16, 32],
        "block_layers": [1, 2],
        "head_dim": 8,
        "stochastic_depth_prob": 0.1,
    },
    "vgg11": {},
    "vgg16_bn": {},
    "vit_small": {
        "image_size": 64,
        "patch_size": 16,
        "num_layers": 3,
        "num_heads": 4,
        "hidden_dim": 64,
        "mlp_dim": 128,
    },
    "wide_resnet50_2": {},
}

TIMM: dict[str, dict[str, Any]] = {
    "cait_xxs24_224": {"img_size": 64, "depth": 4},
    "coat_lite_tiny": {"img_size": 64},
    "coatnet_pico_rw_224": {"img_size": 64},
    "convmixer_small": {"dim": 128, "depth": 6, "patch_size": 4},
    "convnextv2_atto": {},
    "crossvit_tiny_240": {"img_size": 240, "size": 240},
    "cs3darknet_s": {},
    "cspdarknet53": {},
    "cspresnet50": {},
    "darknet53": {},
    "deit_tiny_distilled_patch16_224": {"img_size": 64, "depth": 4},
    "dla34": {},
    "dpn48b": {},
    "ecaresnet26t": {},
    "eca_nfnet_l0": {},
    "edgenext_xx_small": {},
    "efficientformer_l1": {"size": 224},
    "efficientnet_lite0": {},
    "efficientvit_b0": {},
    "ese_vovnet19b_dw": {},
    "eva02_tiny_patch14_224": {"img_size": 56, "size": 56, "depth": 4},
    "fastvit_t8": {},
    "fbnetc_100": {},
    "gcresnet33ts": {},
    "ghostnet_100": {},
    "gmlp_ti16_224": {"img_size": 64},
    "hardcorenas_a": {},
    "hgnetv2_b0": {},
    "hrnet_w18_small": {},
    "inception_next_atto": {},
    "legacy_senet154": {"layers": (1, 1, 1, 1)},
    "legacy_seresnet18": {},
    "levit_128s": {"img_size": 224, "size": 224},
    "mambaout_femto": {},
    "maxvit_pico_rw_256": {"img_size": 64},
    "mixer_s16_224": {"img_size": 64},
    "mobilenetv4_conv_small": {},
    "mobileone_s0": {},
    "mobilevit_xxs": {},
    "nest_tiny": {"img_size": 128, "size": 128},
    "nf_resnet26": {},
    "nfnet_l0": {},
    "pit_ti_224": {"img_size": 64},
    "poolformer_s12": {},
    "poolformerv2_s12": {},
    "regnetz_005": {},
    "regnety_002": {},
    "repvgg_a0": {},
    "repvit_m0_9": {},
    "res2net50_14w_8s": {},
    "resmlp_12_224": {"img_size": 64},
    "resnest14d": {},
    "resnet50_gn": {},
    "resnetblur50": {},
    "resnetv2_18": {},
    "resnetv2_50": {},
    "resnetv2_50x1_bit": {},
    "selecsls42": {},
    "seresnet18": {},
    "skresnet18": {},
    "starnet_s050": {},
    "tinynet_e": {},
    "tresnet_m": {},
    "twins_svt_small": {"img_size": 64},
    "visformer_tiny": {"img_size": 64},
    "vit_relpos_small_patch16_224": {"img_size": 64, "depth": 4},
    "vit_small_patch14_dinov2": {"img_size": 56, "size": 56, "depth": 4},
    "vit_giant_patch14_dinov2": {"img_size": 56, "size": 56, "depth": 2, "embed_dim": 96, "num_heads": 4},
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 4},
    "volo_d1_224": {"img_size": 64},
    "xception41": {},
    "xcit_nano_12_p16_224": {"img_size": 64, "depth": 4},
}


def build(name: str) -> Entry:
    """The model of that name ("source/name") and a function that draws inputs for it."""
    source, _, model = name.partition("/")
    return SOURCES[source][1](model)


def images(side: int, channels: int = 3) -> Callable[[torch.Generator], Inputs]:
    """Draws a batch of two random images."""
    return lambda random: (torch.randn(2, channels, side, side, generator=random),)


@cache
def declare_operators() -> torch.library.Library | None:
    """Let torchvision be imported where its compiled operators cannot be loaded (none of these models calls one).

    The declarations live as long as the library that is returned, which the cache keeps.
    """
    root = Path(next(iter(importlib.util.find_spec("torchvision").submodule_search_locations)))
    for extension in root.glob("_C*"):
        with suppress(OSError):
            torch.ops.load_library(extension)
    if hasattr(torch.ops.torchvision, "nms"):
        return None
    text = (root / "_meta_registrations.py").read_text()
    library = torch.library.Library("torchvision", "DEF")
    for operator in {"nms", *re.findall(r"torchvision::(\w+)", text), *re.findall(r'register_meta\("(\w+)"', text)}:
        library.define(f"{operator}(Tensor a) -> Tensor")
    return library


class UNet(nn.Module):
    """Two levels down and up again: concatenated skips, transposed convolutions, batch norm and ReLU."""

    def __init__(self, width: int = 16, classes: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.pair(3, width), self.pair(width, 2 * width)])
        self.bottom = self.pair(2 * width, 4 * width)
        self.lift = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)]
        )
        self.up = nn.ModuleList([self.pair(4 * width, 2 * width), self.pair(2 * width, width)])
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def pair(inside: int, out: int) -> nn.Sequential:
        first = [nn.Conv2d(inside, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU(inplace=True)]
        return nn.Sequential(*first, nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for lift, block in zip(self.lift, self.up, strict=True):
            x = block(torch.cat([lift(x), skips.pop()], 1))
        return self.head(x)


def _torchvision(name: str) -> Entry:
    declare_operators()
    from torchvision import models
    from torchvision.models import maxvit, vision_transformer

    options = dict(TORCHVISION[name])
    size = options.pop("size", SIDE)
    classes = {"vit_small": vision_transformer.VisionTransformer, "maxvit_small": maxvit.MaxVit}
    if name in classes:
        return Entry(classes[name](**options, num_classes=10), images(size))
    return Entry(models.get_model(name, weights=None, num_classes=10, **options), images(size))


def _timm(name: str) -> Entry:
    declare_operators()
    import timm

    options = dict(TIMM[name])
    size = options.pop("size", options.get("img_size", SIDE))
    if name == "convmixer_small":
        return Entry(timm.models.ConvMixer(**options, num_classes=10), images(size))
    return Entry(timm.create_model(name, pretrained=False, num_classes=10, **options), images(size))


def _transformers(name: str) -> Entry:
    declare_operators()
    import transformers

    spec = TRANSFORMERS[name]
    config = getattr(transformers, spec.config)(**spec.settings)
    model = getattr(transformers, spec.cls)(config)
    return Entry(Only(model, spec.takes, spec.gives), draw_for(spec))


def _own(name: str) -> Entry:
    return Entry({"unet": UNet}[name](), images(SIDE))


SOURCES: dict[str, tuple[list[str], Callable[[str], Entry]]] = {
    "own": (["unet"], _own),
    "timm": (sorted(TIMM), _timm),
    "torchvision": (sorted(TORCHVISION), _torchvision),
    "transformers": (sorted(TRANSFORMERS), _transformers),
}
NAMES = [f"{source}/{name}" for source, (names, _) in SOURCES.items() for name in names]
