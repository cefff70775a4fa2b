"""What is drawn from uniform words is exact: every outcome is counted, for sources with few possible words."""

import itertools
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from gradclip._src.private.noise import draws
from gradclip._src.private.noise.draws import (
    Keystream,
    SeededDraws,
    SystemDraws,
    check_seed,
    chosen,
    draws_from,
    keystream,
    shuffled,
)


class Given:
    """Gives out words that are set beforehand."""

    secure = False

    def __init__(self, *batches):
        self.batches = list(batches)

    def words(self, count):
        words = np.array(self.batches.pop(0), np.uint64)
        assert words.size == count
        return words


def test_all_orders_are_equally_likely():
    # Keys from 0 to 3: each assignment of keys to three numbers is as likely as any other.
    found = Counter()
    for keys in itertools.product(range(4), repeat=3):
        again = (2, 1, 0)
        order = tuple(shuffled(Given(keys, again), 3).tolist())
        if len(set(keys)) == 3:
            found[order] += 1
        else:
            assert order == (2, 1, 0)  # drawn again
    assert found == dict.fromkeys(itertools.permutations(range(3)), 4)


def test_orders_of_nothing_and_of_one():
    assert shuffled(Given(()), 0).tolist() == []
    assert shuffled(Given((7,)), 1).tolist() == [0]


def test_a_number_is_chosen_by_the_top_53_bits_of_its_word():
    threshold = 5
    words = [(4 << 11) + 2**11 - 1, 5 << 11, 0, 2**64 - 1, 4 << 11]
    assert chosen(Given(words), 5, threshold).tolist() == [0, 2, 4]
    assert chosen(Given([2**64 - 1, 0]), 2, 2**53).tolist() == [0, 1]  # with probability 1 all are


def test_many_numbers_are_drawn_in_pieces(monkeypatch):
    monkeypatch.setattr(draws, "_AT_ONCE", 2)
    none = 2**64 - 1
    found = chosen(Given((none, 0), (0, none), (0,)), 5, 1)
    assert found.tolist() == [1, 2, 4]
    assert found.dtype == np.int64


@pytest.mark.parametrize("source", [SystemDraws, Keystream])
def test_secure_words_use_all_64_bits(source):
    # A bit that is 0 (or 1) in all of 400 words has probability 2**-400.
    words = source().words(400)
    assert words.dtype == np.uint64
    assert int(np.bitwise_or.reduce(words)) == 2**64 - 1
    assert int(np.bitwise_and.reduce(words)) == 0


def test_a_keystream_is_that_of_the_cipher_and_goes_on(monkeypatch):
    # AES-256 of zeros with a key of zeros, and of the counter 1: FIPS 197's cipher, as NIST's AESAVS lists it.
    monkeypatch.setattr(draws.os, "urandom", bytes)
    found = Keystream()
    first, second = (found.words(2).tobytes() for _ in range(2))
    assert first.hex() == "dc95c078a2408989ad48a21492842087"
    assert second.hex() == "530f8afbc74536b9a963b4f1c4cb738b"
    assert len({Keystream().words(1)[0] for _ in range(3)}) == 1


def test_every_keystream_has_a_key_of_its_own():
    assert len({int(Keystream().words(1)[0]) for _ in range(100)}) == 100


@pytest.mark.parametrize("found", [None, SimpleNamespace(), SimpleNamespace(Cipher=1, algorithms=object(), modes=1)])
def test_without_the_cipher_all_words_are_the_systems(found, monkeypatch):
    assert isinstance(keystream(), Keystream)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", found)
    assert isinstance(keystream(), SystemDraws)


def test_a_seed_repeats_and_a_generator_goes_on():
    assert draws_from(3).words(5).tolist() == draws_from(3).words(5).tolist()
    generator = np.random.default_rng(3)
    first, second = draws_from(generator).words(5).tolist(), draws_from(generator).words(5).tolist()
    assert first == draws_from(3).words(5).tolist()
    assert first != second
    assert isinstance(draws_from(np.int64(3)), SeededDraws)
    assert draws_from(None).secure
    assert not draws_from(3).secure


@pytest.mark.parametrize("seed", ["3", 3.0, True, sys])
def test_other_seeds_are_refused(seed):
    with pytest.raises(TypeError, match=r"seed must be None for the system's random numbers, an int or"):
        check_seed(seed)


def test_a_negative_seed_is_refused():
    with pytest.raises(ValueError, match="seed must be 0 or more, got -1"):
        check_seed(-1)
