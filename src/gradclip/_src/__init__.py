"""What gradclip is made of. Users import `gradclip`, `gradclip.typing` and `gradclip.integrations`."""
