"""Small networks with what breaks other tools: each is a function that returns (model, example input)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from networks import Net, chain, image, words


def raw_input_in_the_stream():
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    return Net(forward, blocks=nn.ModuleList(chain(6, 10, 6) for _ in range(2)), head=nn.Linear(6, 3)), torch.randn(
        4, 6
    )


def layer_norm_on_the_stream():
    def forward(self, x):
        x = self.stem(x)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.head(x)

    norms, blocks = nn.ModuleList(nn.LayerNorm(8) for _ in range(2)), nn.ModuleList(chain(8, 12, 8) for _ in range(2))
    return Net(forward, stem=nn.Linear(4, 8), norms=norms, blocks=blocks, head=nn.Linear(8, 3)), torch.randn(4, 4)


def group_norm():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Conv2d(6, 2, 1)
    ), image()


def pixel_shuffle():
    return nn.Sequential(nn.Conv2d(3, 24, 3), nn.ReLU(), nn.PixelShuffle(2), nn.Conv2d(6, 4, 3)), image()


def weight_norm():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(8, 9), nn.ReLU(), nn.Linear(9, 3)), torch.randn(4, 6)


def linear_view_conv():
    def forward(self, x):
        return self.conv(torch.relu(self.linear(x)).view(x.shape[0], -1, 4, 4))

    return Net(forward, linear=nn.Linear(5, 96), conv=nn.Conv2d(6, 3, 3)), torch.randn(2, 5)


def conv_flatten_linear():
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 4)), image()


def channels_last_flatten():
    def forward(self, x):
        return self.head(torch.relu(self.conv(x)).permute(0, 2, 3, 1).flatten(1))

    return Net(forward, conv=nn.Conv2d(3, 6, 3), head=nn.Linear(216, 4)), image()


def u_net():
    def forward(self, x):
        a = torch.relu(self.a(x))
        b = torch.relu(self.b(F.max_pool2d(a, 2)))
        up = F.interpolate(torch.relu(self.mid(b)), scale_factor=2, mode="bilinear")
        return self.head(torch.relu(self.c(torch.cat([up, a], 1))))

    convs = {"a": nn.Conv2d(3, 6, 3, padding=1), "b": nn.Conv2d(6, 8, 3, padding=1), "mid": nn.Conv2d(8, 8, 1)}
    return Net(forward, **convs, c=nn.Conv2d(14, 7, 3, padding=1), head=nn.Conv2d(7, 2, 1)), image()


def dense_net():
    def forward(self, x):
        parts = [self.stem(x)]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            parts.append(conv(torch.relu(norm(torch.cat(parts, 1)))))
        return self.head(torch.relu(torch.cat(parts, 1)).mean((2, 3)))

    norms = nn.ModuleList(nn.BatchNorm2d(6 + 4 * i) for i in range(3))
    convs = nn.ModuleList(nn.Conv2d(6 + 4 * i, 4, 3, padding=1) for i in range(3))
    return Net(forward, stem=nn.Conv2d(3, 6, 1), norms=norms, convs=convs, head=nn.Linear(18, 3)), image()


def inverted_residual(act: type[nn.Module] = nn.ReLU):
    def block(c):
        wide = [nn.Conv2d(c, 3 * c, 1, bias=False), nn.BatchNorm2d(3 * c), act()]
        deep = [nn.Conv2d(3 * c, 3 * c, 3, padding=1, groups=3 * c, bias=False), nn.BatchNorm2d(3 * c), act()]
        return nn.Sequential(*wide, *deep, nn.Conv2d(3 * c, c, 1, bias=False), nn.BatchNorm2d(c))

    def forward(self, x):
        x = torch.relu(self.stem(x))
        for part in self.blocks:
            x = x + part(x)
        return self.head(x.mean((2, 3)))

    return Net(
        forward, stem=nn.Conv2d(3, 4, 3), blocks=nn.ModuleList(block(4) for _ in range(2)), head=nn.Linear(4, 3)
    ), image()


def inverted_residual_with_swish():
    return inverted_residual(nn.SiLU)


def pre_activation_res_net():
    def forward(self, x):
        x = self.stem(x)
        for a, conv_a, b, conv_b in zip(self.a, self.conv_a, self.b, self.conv_b, strict=True):
            x = x + conv_b(torch.relu(b(conv_a(torch.relu(a(x))))))
        return self.head(torch.relu(x).mean((2, 3)))

    def make(layer):
        return nn.ModuleList(layer() for _ in range(2))

    parts = {"a": make(lambda: nn.BatchNorm2d(6)), "conv_a": make(lambda: nn.Conv2d(6, 8, 3, padding=1, bias=False))}
    parts |= {"b": make(lambda: nn.BatchNorm2d(8)), "conv_b": make(lambda: nn.Conv2d(8, 6, 3, padding=1, bias=False))}
    return Net(forward, stem=nn.Conv2d(3, 6, 3), **parts, head=nn.Linear(6, 3)), image()


def shuffle_net():
    def forward(self, x):
        x = F.channel_shuffle(torch.relu(self.a(x)), 2)
        return self.c(torch.relu(self.b(x)))

    return Net(
        forward, a=nn.Conv2d(4, 12, 1, groups=2), b=nn.Conv2d(12, 12, 3, groups=2), c=nn.Conv2d(12, 2, 1)
    ), image(4)


def grouped_transposed_convolution():
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 12, 2, groups=4), nn.ReLU(), nn.Conv2d(12, 2, 1)]
    return nn.Sequential(*layers), image()


def conv_next_block():
    def forward(self, x):
        x = self.stem(x)
        y = self.norm(self.deep(x).permute(0, 2, 3, 1))
        y = (self.down(F.gelu(self.up(y))) * self.gamma).permute(0, 3, 1, 2)
        return self.head((x + y).mean((2, 3)))

    layers = {"stem": nn.Conv2d(3, 6, 3), "deep": nn.Conv2d(6, 6, 3, padding=1, groups=6), "norm": nn.LayerNorm(6)}
    layers |= {"up": nn.Linear(6, 24), "down": nn.Linear(24, 6), "head": nn.Linear(6, 3)}
    return Net(forward, gamma=nn.Parameter(torch.ones(6)), **layers), image()


def maxout():
    return Net(
        lambda self, x: self.b(self.a(x).unflatten(-1, (-1, 3)).amax(-1)), a=nn.Linear(6, 24), b=nn.Linear(8, 3)
    ), torch.randn(4, 6)


def called_twice():
    def forward(self, x):
        return self.head(torch.relu(self.b(torch.relu(self.b(torch.relu(self.a(x)))))))

    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 8), head=nn.Linear(8, 3)), torch.randn(4, 6)


def tied_weights():
    model = nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
    )
    model[4].weight = model[2].weight
    return model, torch.randn(4, 6)


def cross_stage():
    def forward(self, x):
        x = torch.relu(self.a(x))
        left, right = x[:, :5], x[:, 5:]
        return self.c(torch.cat([torch.relu(self.b(right)), left], 1))

    return Net(forward, a=nn.Conv2d(3, 12, 3), b=nn.Conv2d(7, 4, 1), c=nn.Conv2d(9, 2, 1)), image()


def halves():
    def forward(self, x):
        left, right = torch.relu(self.a(x)).chunk(2, 1)
        return self.c(torch.cat([torch.relu(self.b(right)), left], 1))

    return Net(forward, a=nn.Conv2d(3, 12, 3), b=nn.Conv2d(6, 4, 1), c=nn.Conv2d(10, 2, 1)), image()


def size_in_an_attribute():
    class Sized(nn.Module):
        def __init__(self, hidden=8):
            super().__init__()
            self.hidden = hidden
            self.a, self.b = nn.Linear(6, hidden), nn.Linear(hidden, 3)

        def forward(self, x):
            return self.b(torch.relu(self.a(x)).view(-1, self.hidden))

    return Sized(), torch.randn(4, 6)


def literal_size():
    def forward(self, x):
        return self.c(torch.relu(self.b(torch.relu(self.a(x)).view(-1, 8))))

    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 9), c=nn.Linear(9, 3)), torch.randn(8, 6)


def output_of_a_hidden_layer():
    def forward(self, x):
        h = torch.relu(self.a(x))
        return torch.cat([h, self.c(torch.relu(self.b(h)))], 1)

    return Net(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 9), c=nn.Linear(9, 3)), torch.randn(4, 6)


def class_token():
    def forward(self, x):
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), self.embed(x)], 1)
        return self.head(torch.relu(self.a(x))[:, 0])

    return Net(
        forward,
        token=nn.Parameter(torch.zeros(1, 1, 8)),
        embed=nn.Linear(6, 8),
        a=nn.Linear(8, 12),
        head=nn.Linear(12, 3),
    ), words(6)


def written_in_place():
    def forward(self, x):
        x = torch.relu(self.a(x))
        y = torch.zeros_like(x)
        y[:, 2:6] = x[:, 2:6]
        return self.b(y)

    return Net(forward, a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(8, 2, 1)), image()


def transposed_weights():
    """Square ones too, where only the order of the dimensions tells rows from columns."""

    def forward(self, x):
        x = torch.relu(x @ self.a.t())
        x = torch.relu(x @ self.b.permute(1, 0))
        x = torch.relu(F.linear(x, self.c.T, self.bias))
        return torch.addmm(self.last, x, self.d)

    sizes = {"a": (8, 8), "b": (7, 8), "c": (7, 9), "d": (9, 3), "bias": (9,), "last": (3,)}
    return Net(forward, **{name: nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}), torch.randn(4, 8)


def scale_in_another_shape():
    def forward(self, x):
        x = torch.relu(self.a(x)) * self.scale.view(-1, 1, 1)
        x = torch.addcmul(self.c(x), self.b(x), self.gain.reshape(1, 8, 1, 1))
        return self.d(torch.relu(x) + self.offset)

    layers = {"a": nn.Conv2d(3, 6, 3), "b": nn.Conv2d(6, 8, 1), "c": nn.Conv2d(6, 8, 1), "d": nn.Conv2d(8, 2, 1)}
    sizes = {"scale": 6, "gain": 8, "offset": 1}
    return Net(forward, **layers, **{name: nn.Parameter(torch.ones(size)) for name, size in sizes.items()}), image()
