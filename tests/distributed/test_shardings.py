"""Gradients that are sharded over meshes in ways that are drawn at random, beside one process."""

import processes


@processes.cases((4, "drawn.py"))
def test_as_on_one_process(request, world, script, case):
    processes.check(request.session.items, world, script, case)
