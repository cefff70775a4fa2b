"""Arrays in pieces, as files hold them, whose memory is used again for the next piece."""

import math
from decimal import Decimal, localcontext

import numpy as np

from gradclip._src.backends.host.arrays import HostArray
from gradclip._src.core.formats import dtype_name


class Held:
    """A NumPy array that is read in pieces of so many numbers. Counts how often it is read."""

    def __init__(self, name, values, piece=3):
        self.name, self.dtype, self.shape = name, dtype_name(values), values.shape
        self._flat, self._piece, self.reads = values.reshape(-1), piece, 0

    def pieces(self):
        self.reads += 1
        memory = np.empty(self._piece, self._flat.dtype)
        whole = HostArray.of(memory)
        for start in range(0, self._flat.size, self._piece):
            some = self._flat[start : start + self._piece]
            memory[: some.size] = some
            yield whole if some.size == self._piece else HostArray.of(memory[: some.size])


def held(piece=3, **arrays):
    return [Held(name, np.asarray(x), piece) for name, x in arrays.items()]


def excess(power, ord, max_norm):
    """Return the norm minus a bound, or 0.0, by so many digits that cancellation does not matter.

    The bound is below 1e300. An excess below all floats is the smallest one.
    """
    if power <= (max_norm if math.isinf(ord) else max_norm**ord):
        return 0.0
    with localcontext(prec=700, Emin=-999_999, Emax=999_999):
        root, bound = (Decimal(x.numerator) / Decimal(x.denominator) for x in (power, max_norm))
        if not math.isinf(ord) and ord > 1:
            root = root.sqrt() if ord == 2 else root ** (Decimal(1) / Decimal(ord))
        return max(float(root - bound), 5e-324)
