"""The command line."""

INSTALL = "pip install '.[{}]' in a clone of gradclip"
