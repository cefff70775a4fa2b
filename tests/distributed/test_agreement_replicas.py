"""Gradients that are the same in all processes of a group that was named, and what only looks like them."""

import processes


@processes.cases((4, "replicas.py"))
def test_as_on_one_process(request, world, script, case):
    processes.check(request.session.items, world, script, case)
