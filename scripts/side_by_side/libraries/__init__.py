"""One module per library: how to call each of its functions, the library's version and ours."""
