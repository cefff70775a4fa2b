"""Gradients that have been taken are clipped by one norm, and whoever watches gets the norm of each."""

import math

import numpy as np
import torch

import gradclip
from gradclip._src import look
from gradclip._src.core.decision import Clipping
from gradclip._src.core.holders import ALONE
from gradclip._src.core.nonfinite import PROPAGATE
from gradclip._src.core.norms import Order
from gradclip._src.core.pipeline import EachNorm, Names
from gradclip._src.core.rules import CLIP
from gradclip._src.distributed.processes import ONE_PROCESS
from gradclip._src.inplace.driver import clip_each, clip_taken
from gradclip._src.inplace.gradients import entered
from gradclip._src.passed.parameters import ParameterList


def made():
    return {"w": np.array([3.0, 4.0]), "b": np.array([12.0])}


def test_ordinary_gradients():
    parameters = {name: torch.nn.Parameter(torch.zeros(x.shape, dtype=torch.float64)) for name, x in made().items()}
    for parameter, x in zip(parameters.values(), made().values(), strict=True):
        parameter.grad = torch.tensor(x)
    params, each = ParameterList.of(parameters), gradclip.Monitor(layers_every=1)._watching()
    assert clip_each(look.gradients(params.parameters), 6.5, Order(2.0), params, each) == 13.0
    assert list(each.names) == ["w", "b"]
    np.testing.assert_allclose(each.norms, [5.0, 12.0])
    np.testing.assert_allclose(parameters["b"].grad, [6.0], rtol=1e-6)


def test_names_are_those_of_the_gradients_that_are_there():
    names = Names()
    parameters = {name: torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for name in "abc"}
    for lacking, expected in (("c", ["a", "b"]), ("b", ["a", "c"]), ("a", ["b", "c"])):
        for name, parameter in parameters.items():
            parameter.grad = None if name == lacking else torch.tensor([1.0], dtype=torch.float64)
        params, each = ParameterList.of(parameters), EachNorm(names)
        assert clip_each(look.gradients(params.parameters), 6.5, Order(2.0), params, each) == math.sqrt(2.0)
        assert list(each.names) == expected


def test_all_others():
    update = made()
    taken = entered(ParameterList.of(update), ONE_PROCESS, 6.5, to_write=True)
    norm, shown = clip_taken(taken, ALONE, Clipping(6.5, Order(2.0), PROPAGATE, CLIP), math.inf, None)
    assert (float(norm), bool(shown.spike)) == (13.0, False)
    np.testing.assert_allclose(update["w"], [1.5, 2.0])
