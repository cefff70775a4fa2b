"""Checksums of zip archives, beside zlib."""

import random
import zlib

import pytest

from gradclip._src.native import checksum, kernels


@pytest.mark.parametrize("first", [0, 1, 7])
def test_checksums_are_those_of_zlib(first):
    draw = random.Random(first)
    bytes_ = memoryview(draw.randbytes(100_000))[first:]
    for count in [*range(300), 1000, 4095, 65_537, len(bytes_)]:
        before = draw.getrandbits(32)
        found = [checksum(bytes_[:count]), checksum(bytes_[:count], before)]
        assert found == [zlib.crc32(bytes_[:count]), zlib.crc32(bytes_[:count], before)]


def test_a_checksum_continues_that_of_the_bytes_before():
    bytes_ = random.Random(0).randbytes(10_000)
    for cut in (0, 1, 128, 5000, 10_000):
        assert checksum(bytes_[cut:], checksum(bytes_[:cut])) == zlib.crc32(bytes_)


def test_the_bytes_must_lie_side_by_side():
    with pytest.raises(BufferError):
        kernels.crc32(memoryview(b"abcdef")[::2], 0)
