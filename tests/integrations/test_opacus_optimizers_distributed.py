"""Opacus' optimizers for several processes, beside the sums of one."""

import processes


@processes.cases((2, "private_steps.py"), (3, "private_steps.py"))
def test_as_on_one_process(request, world, script, case):
    processes.check(request.session.items, world, script, case)
