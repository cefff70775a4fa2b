"""Arrays in files: safetensors, `.npz`, `.npy` and PyTorch's checkpoints, read piece by piece."""

from gradclip._src.files.difference import difference
from gradclip._src.files.open import open_file
from gradclip._src.files.stored import FileError, Stored, StoredFile

__all__ = ["FileError", "Stored", "StoredFile", "difference", "open_file"]
