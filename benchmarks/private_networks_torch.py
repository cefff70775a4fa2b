"""The networks of private_steps.py in PyTorch, as modules that Opacus knows."""

import itertools

import torch
from private_networks import CLASSES, INPUTS, LARGE, LONG, PERCEPTRON, SHORT, UNITS, WORDS
from torch import nn
from torch.nn.functional import gelu, relu


def perceptron(widths=PERCEPTRON):
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Recurrent(nn.Module):
    """A GRU cell in a loop. Opacus' ghost mode needs its own class of dense layers that are used in every step."""

    def __init__(self, linear=nn.Linear):
        super().__init__()
        self.inputs, self.hidden = linear(INPUTS, 3 * UNITS), linear(UNITS, 3 * UNITS)
        self.head = nn.Linear(UNITS, CLASSES)

    def forward(self, features):
        h = features.new_zeros(len(features), UNITS)
        for x in features.unbind(1):
            reset_x, update_x, new_x = self.inputs(x).chunk(3, -1)
            reset_h, update_h, new_h = self.hidden(h).chunk(3, -1)
            update = torch.sigmoid(update_x + update_h)
            h = (1 - update) * torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h) + update * h
        return self.head(h)


def convolution():
    images = nn.Flatten(), nn.Unflatten(1, (1, 28, 28))
    layers = nn.Conv2d(1, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 32, 5, 2, 2), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*images, *layers, nn.Linear(7 * 7 * 32, CLASSES))


class Block(nn.Module):
    """Causal self-attention and a perceptron, each after a normalization and beside an identity."""

    def __init__(self, sizes):
        super().__init__()
        width = sizes.width
        self.heads = sizes.heads
        self.first, self.second = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def attention(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5).masked_fill(later, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))

    def forward(self, x):
        x = x + self.attention(self.first(x))
        return x + self.down(gelu(self.up(self.second(x)), approximate="tanh"))


class Transformer(nn.Module):
    """A transformer that predicts the next token."""

    def __init__(self, sizes=SHORT):
        super().__init__()
        self.tokens, self.positions = (nn.Embedding(n, sizes.width) for n in (sizes.vocabulary, sizes.tokens))
        self.blocks = nn.Sequential(*[Block(sizes) for _ in range(sizes.layers)])
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device).repeat(len(tokens), 1)
        return self.head(self.blocks(self.tokens(tokens) + self.positions(places)))


class Tied(nn.Module):
    """An embedding that is also the output layer, with a dense layer between."""

    def __init__(self, sizes=WORDS):
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.dense = nn.Linear(sizes.width, sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=sizes.width**-0.5)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(relu(self.dense(self.embedding(tokens))))


NETWORKS = {
    "perceptron": perceptron,
    "recurrent": Recurrent,
    "transformer": Transformer,
    "tied": Tied,
    "convolution": convolution,
    "large tied": lambda: Tied(LARGE),
    "long transformer": lambda: Transformer(LONG),
}
