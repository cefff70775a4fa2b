"""Layers and units of gradients that several processes hold, beside what one process makes of the same gradients."""

import processes


@processes.cases(
    (2, "layers.py"),
    (3, "layers.py"),
    (4, "layers_on_meshes.py"),
    (3, "layers_alone.py"),
)
def test_as_on_one_process(request, world, script, case):
    processes.check(request.session.items, world, script, case)
