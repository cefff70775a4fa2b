"""The command line."""

INSTALL = "pip install 'gradclip[demo]'"
