"""What sums over examples ask of a framework with derivatives: gradients of functions, batches of calls, programs."""
