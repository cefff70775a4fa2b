"""The command line."""

INSTALL = "pip install '.[cli,plot]' in a clone of gradclip"
