"""What to do about the clipping that was recorded, in sentences."""
