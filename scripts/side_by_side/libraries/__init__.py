"""One module for each library: how each of its functions is called, the peer's and ours."""
