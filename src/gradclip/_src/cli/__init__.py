"""The command line."""

INSTALL = "pip install '.[demo]' in a clone of gradclip"
FOR_LOGS = "pip install '.[cli,plot]' in a clone of gradclip"
