"""The shapes of the gradients to clip."""

_GPT2_BLOCK = [(768, 2304), (2304,), (768, 768), (768,), (768, 3072), (3072,), (3072, 768), (768,), *[(768,)] * 4]
_RESNET50_STAGES = [(64, 256, 3), (128, 512, 4), (256, 1024, 6), (512, 2048, 3)]


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


GPT2_SMALL = [(50257, 768), (1024, 768), *_GPT2_BLOCK * 12, (768,), (768,)]
WORKLOADS = {
    "GPT-2 small": GPT2_SMALL,
    "ResNet-50": _resnet50(),
    "1,000 LoRA tensors": [(6144,)] * 1000,
    "2,000 small tensors": [(64, 64), (64,)] * 1000,
    "one of 250 M": [(250_000_000,)],
}
