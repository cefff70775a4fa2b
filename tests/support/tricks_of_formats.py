"""Files that are right in two formats, with other numbers in each."""

import hand_zipped
from hand_pickled import MANY, ONES, SMALL, members_of
from hand_zipped import parts_of
from tricks_of_arrays import entry, npy

ZIP = int.from_bytes(b"PK\3\4", "little")  # 67 MB, less than the longest header of safetensors


def safetensors_that_end_in(members):
    """Return a file that starts as zip archives do, with an archive as the bytes of its last array."""
    start = 8 + ZIP + len(MANY)
    body, directory = hand_zipped.body_and_directory(parts_of(members), start)
    zipped = body + directory + hand_zipped.end(len(members), len(directory), start + len(body))
    last = entry(len(MANY), "U8", f"[{len(zipped)}]", len(zipped))
    return ZIP.to_bytes(8, "little") + f'{{"w":{entry()},"z":{last}}}'.encode().ljust(ZIP) + MANY + zipped


CHECKPOINT = list(members_of({"w": SMALL}).items())
FORMATS = {
    "an array of NumPy in a checkpoint": lambda: hand_zipped.archive(*parts_of([*CHECKPOINT, ("a/w.npy", npy())])),
    "a checkpoint in safetensors": lambda: safetensors_that_end_in(CHECKPOINT),
    "an array of NumPy in safetensors": lambda: safetensors_that_end_in([("w.npy", npy(ONES))]),
}
