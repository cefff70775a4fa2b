"""Monitors of gradients that several processes hold."""

import processes


@processes.cases((2, "watched.py"), (3, "watched.py"))
def test_monitors_see_the_layers(request, world, script, case):
    processes.check(request.session.items, world, script, case)
