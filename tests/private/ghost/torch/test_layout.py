"""Places of views in a parameter, from their sizes and strides."""

import pytest
import torch

from gradclip._src.private.ghost.torch.layout import layout_of


def place(shape, view, *roles):
    """Return the place of a view and whether the rows are the first role, or None."""
    layout = layout_of(shape).children(view, (), object())[0]
    return layout and layout.place(*roles)


def indexed(shape, found):
    """Return the indices of a parameter's elements, as matrices of this place."""
    region = tuple(slice(a, b) for a, b in zip(found.start, found.stop, strict=True))
    every = torch.arange(torch.Size(shape).numel()).reshape(shape)[region]
    assert tuple(every.shape) == found.box
    return every.reshape(found.view).permute(found.axes).reshape(found.shape)


VIEWS = {
    "itself": ((6, 4), lambda w: w, ((), (0,), (1,))),
    "transposed": ((6, 4), lambda w: w.t(), ((), (0,), (1,))),
    "a part of the rows": ((6, 4), lambda w: w[2:5], ((), (0,), (1,))),
    "a part of the columns": ((6, 4), lambda w: w[:, 1:3].t(), ((), (0,), (1,))),
    "a part of both": ((6, 4), lambda w: w[1:, :2], ((), (0,), (1,))),
    "heads": ((6, 4), lambda w: w.view(3, 2, 4), ((0,), (1,), (2,))),
    "heads as rows": ((6, 4), lambda w: w.view(3, 2, 4), ((), (0, 1), (2,))),
    "heads the other way": ((6, 4), lambda w: w.view(3, 2, 4).transpose(0, 1), ((0,), (1,), (2,))),
    "one head": ((6, 4), lambda w: w.view(3, 2, 4)[1], ((), (0,), (1,))),
    "two heads": ((6, 4), lambda w: w.view(3, 2, 4)[1:], ((0,), (1,), (2,))),
    "one of a stack": ((3, 4, 5), lambda w: w[1], ((), (0,), (1,))),
    "flat": ((3, 4, 5), lambda w: w.reshape(12, 5), ((), (0,), (1,))),
    "axes merged and split": ((6, 4), lambda w: w.view(-1).view(2, 12), ((), (0,), (1,))),
    "axes of length one": ((1, 4, 1, 5), lambda w: w[0, :, 0], ((), (0,), (1,))),
    "axes added": ((4, 5), lambda w: w[:, None, :, None], ((1,), (0, 3), (2,))),
    "rows of a flat parameter": ((24,), lambda w: w[4:12].view(2, 4), ((), (0,), (1,))),
    "a vector": ((5,), lambda w: w, ((), (0,), ())),
    "a number": ((), lambda w: w, ((), (), ())),
}


@pytest.mark.parametrize("name", VIEWS)
def test_places_hold_the_elements_of_views(name):
    shape, view, roles = VIEWS[name]
    found, first = place(shape, view, *roles)
    elements = view(torch.arange(torch.Size(shape).numel()).reshape(shape))
    order = roles if first else (roles[0], roles[2], roles[1])
    sizes = [torch.Size([elements.shape[i] for i in role]).numel() for role in order]
    assert found.shape == tuple(sizes)
    assert torch.equal(indexed(shape, found), elements.permute([i for role in order for i in role]).reshape(sizes))


NO_BOXES = {
    "every second row": ((6, 4), lambda w: w[::2], ((), (0,), (1,))),
    "a diagonal": ((4, 4), lambda w: w.diagonal(), ((), (0,), ())),
    "stretched": ((1, 4), lambda w: w.expand(3, 4), ((), (0,), (1,))),
    "a flat part that ends within a row": ((6, 4), lambda w: w.view(-1)[5:13].view(2, 4), ((), (0,), (1,))),
    "a flat part of several rows": ((6, 4), lambda w: w.view(-1)[2:8], ((), (0,), ())),
    "windows": ((6,), lambda w: w.unfold(0, 3, 1), ((), (0,), (1,))),
    "nothing": ((0, 4), lambda w: w, ((), (0,), (1,))),
}


@pytest.mark.parametrize("name", NO_BOXES)
def test_views_that_are_not_boxes_have_no_place(name):
    shape, view, roles = NO_BOXES[name]
    assert place(shape, view, *roles) is None


def test_copies_have_no_layout():
    assert layout_of((6, 4)).children(lambda w: w.t().reshape(-1), (), "copy") == [None]


def test_layouts_are_found_once():
    layout = layout_of((6, 4))
    assert layout_of((6, 4)) is layout
    first = layout.children(torch.Tensor.chunk, (3,), "chunk")
    assert layout.children(None, (), "chunk") is first
    assert [child.place((), (0,), (1,))[0].start for child in first] == [(0, 0), (2, 0), (4, 0)]


def test_rows_begin_with_the_first_axis():
    one, two = place((3, 3), lambda w: w, (), (0,), (1,)), place((3, 3), lambda w: w.t(), (), (0,), (1,))
    assert one[0] == two[0]
    assert (one[1], two[1]) == (True, False)


def test_the_memory_of_layouts_is_bounded():
    layout = layout_of((5000, 2))
    for i in range(4500):
        layout.children(torch.Tensor.select, (0, i), i)
    assert len(layout._children) < 4096
