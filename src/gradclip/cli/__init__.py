"""The command line."""

INSTALL = "pip install '.[demo]' in a clone of gradclip"
