"""Time in-place clipping for growing numbers of tensors and bytes, compared with torch and the floor.

The first series has one to ten thousand tensors of 64 float32 elements. The second has one float32 tensor of 1 KB to
2 GB.
"""

import random

import torch
from in_place import CASES, parameters_of, torch_contenders
from report import GROWTH, parser, readable_bytes, rows, show, write_measured
from timing import medians

ELEMENTS_EACH = 64
NUMBERS_OF_TENSORS = [10**k for k in range(5)]
NUMBERS_OF_BYTES = [2**k for k in range(10, 32, 3)]


def points(numbers_of_tensors, numbers_of_bytes):
    for tensors in numbers_of_tensors:
        yield "tensors", tensors, f"{tensors:,} x {ELEMENTS_EACH} elements", [(ELEMENTS_EACH,)] * tensors
    for size in numbers_of_bytes:
        yield "bytes", size, f"1 x {readable_bytes(size)}", [(size // 4,)]


def measured(shapes, case, repeats, seconds):
    return medians(torch_contenders(parameters_of(shapes, torch.float32), case), repeats, seconds)


def main():
    options = parser(__doc__, GROWTH, "up to 1,000 tensors and 4 MB").parse_args()
    random.seed(0)
    torch.manual_seed(0)
    few = (NUMBERS_OF_TENSORS[:4], NUMBERS_OF_BYTES[:5])
    growth = []
    for along, number, label, shapes in points(*(few if options.quick else (NUMBERS_OF_TENSORS, NUMBERS_OF_BYTES))):
        for case in CASES:
            described = {"along": along, "number": number, "case": case}
            found = rows(described, measured(shapes, case, options.repeats, options.seconds))
            show(label, found)
            growth += found
    write_measured({"threads": torch.get_num_threads(), "repeats": options.repeats, "growth": growth}, options)


if __name__ == "__main__":
    main()
