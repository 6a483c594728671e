"""More of the networks of `patterns`: attention, gates and recurrent layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from networks import Net, image, words


def _heads(x: Tensor, layer: nn.Module, head_dim: int) -> Tensor:
    return layer(x).view(*x.shape[:2], -1, head_dim).transpose(1, 2)


def grouped_query_attention(norm: bool = False):
    def forward(self, x):
        q, k, v = (_heads(x, layer, 4) for layer in (self.q, self.k, self.v))
        q, k = self.q_norm(q), self.k_norm(k)
        k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for t in (k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    norms = [nn.RMSNorm(4) if norm else nn.Identity() for _ in range(2)]
    layers = {"q": nn.Linear(16, 24), "k": nn.Linear(16, 12), "v": nn.Linear(16, 12), "o": nn.Linear(24, 16)}
    return Net(forward, q_norm=norms[0], k_norm=norms[1], **layers), words()


def grouped_query_attention_with_norms_on_queries_and_keys():
    return grouped_query_attention(norm=True)


def packed_attention():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.head_dim = 4, 4
            self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            shape = *x.shape[:2], 3, self.num_heads, self.head_dim
            q, k, v = self.qkv(x).reshape(shape).permute(2, 0, 3, 1, 4).unbind(0)
            scores = (q @ k.transpose(-2, -1) * self.head_dim**-0.5).softmax(-1)
            return self.proj((scores @ v).transpose(1, 2).flatten(2))

    return Attention(), words()


def attention_whose_values_may_be_narrow():
    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    return Net(forward, **{name: nn.Linear(16, 16) for name in "qkvo"}), words()


def linear_attention():
    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (4, -1)) for layer in (self.q, self.k, self.v))
        state = torch.einsum("bnhd,bnhe->bhde", k.relu(), v)
        return self.o(torch.einsum("bnhd,bhde->bnhe", q.relu(), state).flatten(2))

    return Net(forward, **{name: nn.Linear(16, 16) for name in "qkvo"}), words()


def encoder_layer(**options):
    return nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, **options), words()


def encoder_layer_with_gelu_and_norms_first():
    return encoder_layer(activation="gelu", norm_first=True)


def decoder_layer():
    layer = nn.TransformerDecoderLayer(16, 4, 24, batch_first=True)
    return Net(lambda self, x: self.layer(x, x.flip(1)), layer=layer), words()


def multihead_attention():
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    return Net(
        lambda self, x: self.head(self.attention(x, x, x)[0]), attention=attention, head=nn.Linear(16, 3)
    ), words()


def squeeze_excitation():
    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        return self.head(x * torch.sigmoid(self.up(torch.relu(self.down(x.mean((2, 3), keepdim=True))))))

    gate = {"down": nn.Conv2d(8, 4, 1), "up": nn.Conv2d(4, 8, 1)}
    return Net(forward, conv=nn.Conv2d(3, 8, 3), norm=nn.BatchNorm2d(8), **gate, head=nn.Conv2d(8, 2, 1)), image()


def spatial_gate():
    def forward(self, x):
        x = torch.relu(self.a(x))
        return self.c(torch.relu(self.b(x)) * torch.sigmoid(self.gate(x)))

    return Net(
        forward, a=nn.Conv2d(3, 6, 3), b=nn.Conv2d(6, 8, 1), gate=nn.Conv2d(6, 1, 1), c=nn.Conv2d(8, 2, 1)
    ), image()


def recurrent(kind: type[nn.Module] = nn.GRU):
    layers = {"gru": kind(6, 8, batch_first=True), "a": nn.Linear(8, 10), "b": nn.Linear(10, 3)}
    return Net(lambda self, x: self.b(torch.relu(self.a(self.gru(x)[0][:, -1]))), **layers), words(6)


def lstm():
    return recurrent(nn.LSTM)


def gated(act=F.silu):
    def forward(self, x):
        return self.down(act(self.gate(x)) * self.up(x))

    return Net(forward, gate=nn.Linear(6, 12), up=nn.Linear(6, 12), down=nn.Linear(12, 4)), torch.randn(4, 6)


def gated_by_relu():
    return gated(F.relu)


def gated_and_packed():
    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)

    return Net(forward, both=nn.Linear(6, 24), down=nn.Linear(12, 4)), torch.randn(4, 6)


def gated_convolution():
    return nn.Sequential(
        nn.Conv1d(3, 16, 3), nn.GLU(1), nn.Conv1d(8, 12, 3), nn.ReLU(), nn.Conv1d(12, 2, 1)
    ), torch.randn(2, 3, 12)


def tanh_times_sigmoid():
    def forward(self, x):
        return self.c(torch.tanh(self.a(x)) * torch.sigmoid(self.b(x)))

    return Net(forward, a=nn.Linear(6, 10), b=nn.Linear(6, 10), c=nn.Linear(10, 3)), torch.randn(4, 6)


def scale_and_shift():
    def forward(self, x):
        h = torch.relu(self.a(x))
        return self.b(h * (1 + self.scale(x)) + self.shift(x))

    return Net(
        forward, a=nn.Linear(6, 10), scale=nn.Linear(6, 10), shift=nn.Linear(6, 10), b=nn.Linear(10, 3)
    ), torch.randn(4, 6)


def squeeze_excitation_with_swish():
    """The gate comes first in the product, and both factors are curved."""

    def forward(self, x):
        x = F.silu(self.conv(x))
        return self.head(torch.sigmoid(self.up(F.silu(self.down(x.mean((2, 3), keepdim=True))))) * x)

    gate = {"down": nn.Conv2d(8, 4, 1), "up": nn.Conv2d(4, 8, 1)}
    return Net(forward, conv=nn.Conv2d(3, 8, 3), **gate, head=nn.Conv2d(8, 2, 1)), image()
