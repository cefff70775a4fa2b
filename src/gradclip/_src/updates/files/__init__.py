"""Arrays in files: safetensors, `.npz`, `.npy` and PyTorch's checkpoints, read piece by piece."""

from gradclip._src.updates.files.difference import difference
from gradclip._src.updates.files.open import open_file
from gradclip._src.updates.files.stored import FileError, Stored, StoredFile

__all__ = ["FileError", "Stored", "StoredFile", "difference", "open_file"]
