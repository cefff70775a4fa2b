"""The shapes of the gradients to clip."""

_GPT2_BLOCK = [(768, 2304), (2304,), (768, 768), (768,), (768, 3072), (3072,), (3072, 768), (768,), *[(768,)] * 4]
_RESNET50_STAGES = [(64, 256, 3), (128, 512, 4), (256, 1024, 6), (512, 2048, 3)]


_LLAMA_8B_LAYER = [
    *((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)),  # queries, 8 heads of keys, 8 of values, output
    *((14336, 4096), (14336, 4096), (4096, 14336)),
    *((4096,), (4096,)),
]


def _resnet50():
    """Return convolutions without bias, each with the scale and shift of its normalisation, and the last layer."""
    shapes = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for width, out, blocks in _RESNET50_STAGES:
        for block in range(blocks):
            convolutions = [(width, channels, 1, 1), (width, width, 3, 3), (out, width, 1, 1)]
            if block == 0:
                convolutions.append((out, channels, 1, 1))
            shapes += [shape for conv in convolutions for shape in (conv, conv[:1], conv[:1])]
            channels = out
    return [*shapes, (1000, 2048), (1000,)]


def _small(count):
    """Return lengths from 64 to 1,000 elements, in a fixed order that mixes them."""
    return [(64 + 487 * i % 937,) for i in range(count)]


GPT2_SMALL = [(50257, 768), (1024, 768), *_GPT2_BLOCK * 12, (768,), (768,)]
WORKLOADS = {
    "GPT-2 small": GPT2_SMALL,
    "ResNet-50": _resnet50(),
    "1,000 LoRA tensors": [(6144,)] * 1000,
    "2,000 small tensors": [(64, 64), (64,)] * 1000,
    "one of 250 M": [(250_000_000,)],
}
ON_GPU = {
    "GPT-2 small": GPT2_SMALL,
    "Llama 3, 8 B": [(128256, 4096), *_LLAMA_8B_LAYER * 32, (4096,), (128256, 4096)],
    "1,000 LoRA tensors": [(16, 4096), (4096, 16)] * 500,
    "2,000 small tensors": _small(2000),
    "ResNet-50": WORKLOADS["ResNet-50"],
}
"""What a GPU is timed with. Adapters have rank 16, and small tensors have 64 to 1,000 elements."""
