"""Arrays in files: safetensors, `.npz`, `.npy` and PyTorch's checkpoints, read piece by piece."""

from gradclip.files.difference import difference
from gradclip.files.open import open_file
from gradclip.files.stored import FileError, Stored, StoredFile

__all__ = ["FileError", "Stored", "StoredFile", "difference", "open_file"]
