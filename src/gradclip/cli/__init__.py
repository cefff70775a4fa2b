"""The command line: `gradclip demo` and `gradclip info`."""
