"""A threshold for each layer: the same, to the bit, as a holder for each of them, in loops, saved, and on devices."""

import io
import math
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gradclip
import gradclip._src.backends.torch.framework as torch_backend
from gradclip import AdaptiveThreshold, QuantileRule, SpreadRule, SteadyRule

RULES = {
    "spread": SpreadRule(window=7),
    "steady": SteadyRule(window=6),
    "quantile": QuantileRule(1.1, 0.3, window=5, initial=3.0),
}
EACH_RULE = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def steps(count=30):
    """Return the gradients of four layers at each step: NaN in one, zeros of one, and one that comes late."""
    rng = np.random.default_rng(0)
    for step in range(count):
        grads = [rng.normal(size=3).astype(np.float32) * np.float32(rng.exponential()) for _ in range(4)]
        if step == 5:
            grads[1][0] = math.nan
        if step == 7:
            grads[2] *= 0
        if step in (0, 1, 9):
            grads[3] = None
        yield grads


def give(parameters, grads):
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = None if grad is None else torch.from_numpy(grad.copy())


def parameters(count=4):
    return [torch.nn.Parameter(torch.zeros(3)) for _ in range(count)]


def bits(array):
    return np.asarray(array, np.float32).tobytes()


def alone(rule, place, grads, policy="drop"):
    """Clip one layer at all steps by a holder of its own; return the holder and what is left at each step."""
    holder, left = AdaptiveThreshold(rule), []
    for every in grads:
        if every[place] is not None:
            (one,) = parameters(1)
            give([one], [every[place]])
            gradclip.clip_grad_norm_([one], holder, nonfinite=policy)
            left.append(bits(one.grad))
    return holder, left


@EACH_RULE
@pytest.mark.parametrize("monitored", [False, True])
def test_each_layer_is_clipped_as_by_a_holder_of_its_own(rule, monitored):
    layers, many, left = parameters(), AdaptiveThreshold(rule), [[] for _ in range(4)]
    monitor = gradclip.Monitor() if monitored else None
    for grads in steps():
        give(layers, grads)
        gradclip.clip_grad_layer_norm_(layers, many, nonfinite="drop", monitor=monitor)
        for place, layer in enumerate(layers):
            left[place] += [] if layer.grad is None else [bits(layer.grad)]
    for place in range(4):
        holder, expected = alone(rule, place, steps())
        assert left[place] == expected
        assert bits(many.next_max_norm[place]) == bits(holder.next_max_norm)
        assert bits(many.max_norm[place]) == bits(holder.max_norm)
        assert bits(many.norm[place]) == bits(float(holder.norm))
    assert (many.steps, many.num_skipped) == (30, 1)
    assert 15 < many.num_clipped < 31
    assert monitor is None or (monitor.last.step, monitor.last.clipped) == (30, True)


@EACH_RULE
def test_so_is_a_tree_of_arrays(rule):
    many = AdaptiveThreshold(rule)
    for first, second, *_ in steps():
        tree = {"b": {"x": second}, "a": first, "count": np.array([3])}
        gradclip.clip_grad_layer_norm_(tree, many, nonfinite="drop")
    assert many._layers == ("a, of shape (3,)", "b.x, of shape (3,)", "count, of shape (1,)")
    for place, name in enumerate((0, 1)):
        assert bits(many.next_max_norm[place]) == bits(alone(rule, name, steps())[0].next_max_norm)
    assert (many.norm[2], many.history.count[2]) == (0.0, 0)


@pytest.mark.after_error
def test_a_tree_gets_a_new_array_but_none_of_another_shape():
    many, tree = AdaptiveThreshold(), {"a": np.ones(3), "z": np.ones(1)}
    gradclip.clip_grad_layer_norm_(tree, many)
    gradclip.clip_grad_layer_norm_({"new": np.ones(2), **tree}, many)
    assert many.history.count.tolist() == [2, 1, 2]
    with pytest.raises(ValueError, match=r"has observed 'a, of shape .3,.', got 'a, of shape .2,.'. Pass the same"):
        gradclip.clip_grad_layer_norm_({"new": np.ones(2), "z": np.ones(1), "y": np.ones(1), "a": np.ones(2)}, many)


def test_wide_layers_and_layers_that_do_not_count():
    many = AdaptiveThreshold(QuantileRule(window=3))
    model = {"a": torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)), "b": torch.nn.Parameter(torch.zeros(2))}
    for _ in range(2):
        model["a"].grad, model["b"].grad = torch.tensor([3e100, 4e100], dtype=torch.float64), torch.ones(2)
        gradclip.clip_grad_layer_norm_(model, many, where="a")
    assert many.history.norms.dtype == np.float64
    np.testing.assert_allclose(many.next_max_norm, [1e101, math.inf])


def test_a_step_that_skips_a_layer_counts_as_skipped_alone_as_for_a_monitor():
    many, monitor, layers = AdaptiveThreshold(QuantileRule()), gradclip.Monitor(), parameters(2)
    for sizes in ((1, 1), (10, math.nan), (10, 1)):
        give(layers, [np.full(3, size, np.float32) for size in sizes])
        gradclip.clip_grad_layer_norm_(layers, many, nonfinite="drop", monitor=monitor)
    assert (many.num_clipped, many.num_skipped) == (monitor.num_clipped, monitor.num_skipped) == (1, 1)


# Errors


def clipped_once(count=2, **settings):
    many, layers = AdaptiveThreshold(**settings), parameters(count)
    give(layers, [np.ones(3, np.float32)] * count)
    gradclip.clip_grad_layer_norm_(layers, many)
    return many, layers


@pytest.mark.after_error
def test_other_layers_are_refused_and_not_observed():
    many, layers = clipped_once()
    old = r"has observed 'parameters.1., of shape .3,.', got 'parameters.0., of shape .3,.'. Pass it, too: without"
    with pytest.raises(ValueError, match=old):
        gradclip.clip_grad_layer_norm_(layers[:1], many)
    with pytest.raises(ValueError, match=r"'parameters.0., of shape .3,.', got 'w, of shape .3,.', 'b, of shape"):
        gradclip.clip_grad_layer_norm_({"w": layers[0], "b": layers[1]}, many)
    for more in (layers + layers[:1], parameters(3)):
        with pytest.raises(ValueError, match=r"2 layers, got 3 layers, so which of them are new is not known. Name"):
            gradclip.clip_grad_layer_norm_(more, many)
    with pytest.raises(ValueError, match=r"got 'parameters.0., of shape .4,.'. Pass the same parameters, or make"):
        gradclip.clip_grad_layer_norm_([torch.nn.Parameter(torch.zeros(4)), layers[1]], many)
    with pytest.raises(ValueError, match=r"the norms of 2 layers, got one norm. Make one for all gradients together"):
        gradclip.clip_grad_norm_(layers, many)
    one = AdaptiveThreshold()
    gradclip.clip_grad_norm_(layers, one)
    with pytest.raises(ValueError, match=r"has observed one norm, got the norms of 2 layers. Make one for"):
        gradclip.clip_grad_layer_norm_(layers, one)
    with pytest.raises(ValueError, match="skip_above skips a step by the norm of all gradients"):
        gradclip.clip_grad_layer_norm_(layers, AdaptiveThreshold(skip_above=4.0))
    with pytest.raises(ValueError, match="has the key 'max_norm', a threshold of its own, but an Adaptive"):
        gradclip.clip_grad_layer_norm_([{"params": layers, "max_norm": 1.0}], AdaptiveThreshold())
    with pytest.raises(TypeError, match=r"has a norm for each layer, not one for the step. Pass monitor="):
        gradclip.Monitor().record(many)
    for clip in (gradclip.clip_grad_layer_norm_, gradclip.clip_grad_unit_norm_):
        with pytest.raises(TypeError, match=r"in order, got .*It is a rule: .* or clip_grad_layer_norm_\.$"):
            clip(layers, SpreadRule())
    with pytest.raises(TypeError, match=r"in order, got .*AdaptiveThreshold. Pass it to gradclip.clip_grad_norm_, "):
        gradclip.clip_grad_unit_norm_(layers, many)
    give(layers, [np.full(3, math.nan, np.float32)] * 2)
    with pytest.raises(FloatingPointError):
        gradclip.clip_grad_layer_norm_(layers, many, nonfinite="raise")
    assert (many.steps, one.steps) == (1, 1)


@pytest.mark.after_error
@pytest.mark.parametrize(
    "damaged",
    [
        {"norms": [[1.0]]},
        {"norms": [[1.0], [math.nan]]},
        {"norms": [1.0, 2.0]},
        {"held": [1.0]},
        {"held": 1.0},
        {"layers": ["a"]},
        {"layers": [0, 1]},
        {"norm": 1.0},
        {"norm": [1.0]},
        {"max_norm": [1.0, 1.0, 1.0]},
        {"max_norm": [-1.0, 1.0]},
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damaged):
    many, _ = clipped_once(rule=SteadyRule())
    before = many.state_dict()
    with pytest.raises(ValueError, match=r"the state is damaged: .* Pass the result of its state_dict"):
        many.load_state_dict({**before, **damaged})
    assert many.state_dict() == before


# Saving


@EACH_RULE
def test_thresholds_continue_to_the_bit(rule):
    layers, whole = parameters(), AdaptiveThreshold(rule)
    for at, grads in enumerate(steps()):
        if at == 12:
            resumed = AdaptiveThreshold(rule)
            resumed.load_state_dict(whole.state_dict())
            assert resumed.state_dict() == whole.state_dict()
        for one in (whole, resumed) if at > 11 else (whole,):
            give(layers, grads)
            gradclip.clip_grad_layer_norm_(layers, one, nonfinite="drop")
    assert resumed.state_dict() == whole.state_dict()
    with pytest.raises(ValueError, match="the norms of 4 layers, got one norm"):
        resumed.load_state_dict({**AdaptiveThreshold().state_dict(), "ord": 2.0})
    resumed.load_state_dict(AdaptiveThreshold(rule).state_dict())
    gradclip.clip_grad_layer_norm_(layers, resumed)
    assert resumed.steps == 1


def trained(start, stop, saved=None, *, names=True, **settings):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.named_parameters() if names else list(model.parameters())[::-1], lr=0.1)
    clipping = gradclip.clip_at_step(optimizer, AdaptiveThreshold(RULES["steady"]), scope="layer", **settings)
    if saved is not None:
        found = torch.load(io.BytesIO(saved), weights_only=True)
        model.load_state_dict(found[0])
        optimizer.load_state_dict(found[1])
    for step in range(start, stop):
        torch.manual_seed(step)
        optimizer.zero_grad()
        (model(torch.randn(5, 3)) * (math.nan if step == 3 else 1 + step)).square().mean().backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    return clipping, model, file.getvalue()


@pytest.mark.after_error
def test_a_run_with_steps_that_clip_layers_goes_on_as_if_it_had_not_stopped():
    _, _, half = trained(0, 8, nonfinite="skip")
    clipping, model, _ = trained(8, 16, half, nonfinite="skip")
    expected, other, _ = trained(0, 16, nonfinite="skip")
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert (clipping.max_norm.state_dict(), clipping.threshold.shape) == (expected.max_norm.state_dict(), (4,))
    assert (expected.max_norm.steps, expected.max_norm.num_skipped, expected.steps) == (16, 1, 16)
    assert clipping.norm > 0
    with pytest.raises(ValueError, match=r"got '0.weight, of shape \(2,\)'. Pass the same parameters"):
        trained(8, 9, half, names=False)


def test_a_step_clips_each_layer_to_what_it_had_before():
    first, second = parameters(2)
    optimizer = torch.optim.SGD([first, second], lr=1.0)
    gradclip.clip_at_step(optimizer, AdaptiveThreshold(), scope="layer")
    for size in (1.0, 10.0):
        give([first, second], [np.array([3, 4, 0], np.float32), np.array([size, 0, 0], np.float32)])
        optimizer.step()
    torch.testing.assert_close(first.detach(), torch.tensor([-6.0, -8.0, 0.0]))
    torch.testing.assert_close(second.detach(), torch.tensor([-2.0, 0.0, 0.0]))


# New layers, and names that wrappers change


def unfreeze(rule, *, steps_before, by_group=False):
    """Clip one layer, then two, of which the new one is the first; return the holder and what is left of both."""
    old, new = parameters(2)
    many, left = AdaptiveThreshold(rule), ([], [])
    for at, grads in enumerate(steps()):
        give([old, new], grads[::2])
        named = [("old", old)] if at < steps_before else [("new", new), ("old", old)]
        groups = [{"params": [old]}, *([{"params": [new]}] if at >= steps_before else [])]
        gradclip.clip_grad_layer_norm_(groups if by_group else named, many, nonfinite="drop")
        left[0].append(bits(old.grad))
        left[1].extend([bits(new.grad)] if at >= steps_before else [])
    return many, left


@EACH_RULE
@pytest.mark.parametrize("by_group", [False, True])
def test_a_new_layer_begins_alone_and_the_old_ones_go_on(rule, by_group):
    many, left = unfreeze(rule, steps_before=11, by_group=by_group)
    for place, after in ((0, 0), (2, 11)):
        holder, expected = alone(rule, place, list(steps())[after:])
        assert left[place // 2] == expected
        assert bits(many.next_max_norm[0 if (place == 0) is by_group else 1]) == bits(holder.next_max_norm)
    resumed = AdaptiveThreshold(rule)
    resumed.load_state_dict(many.state_dict())
    assert resumed.state_dict() == many.state_dict()


def test_an_optimizer_gets_a_group_after_its_first_step():
    old, new = parameters(2)
    optimizer = torch.optim.SGD([old], lr=1.0)
    clipping = gradclip.clip_at_step(optimizer, AdaptiveThreshold(), scope="layer")
    for size in (1.0, 10.0, 10.0):
        give([old, new], [np.full(3, size, np.float32)] * 2)
        optimizer.step()
        if size == 1.0:
            optimizer.add_param_group({"params": [new]})
    assert clipping.max_norm.history.count.tolist() == [3, 2]
    torch.testing.assert_close(new.detach(), torch.full((3,), -20.0))
    assert -old[0] < 3.1  # clipped to its first norm


WRAPPED = pytest.mark.parametrize("wrapped", ["_orig_mod.{}", "module.{}", "module._orig_mod.{}"])


@WRAPPED
def test_names_of_wrappers_do_not_count_in_either_direction(wrapped):
    plain = ["a.weight", "a.bias"]
    for before, after in ((plain, map(wrapped.format, plain)), (map(wrapped.format, plain), plain)):
        layers, saved, resumed = parameters(2), AdaptiveThreshold(), AdaptiveThreshold()
        give(layers, [np.ones(3, np.float32)] * 2)
        gradclip.clip_grad_layer_norm_(zip(before, layers, strict=True), saved)
        resumed.load_state_dict(saved.state_dict())
        gradclip.clip_grad_layer_norm_(zip(after, layers, strict=True), resumed)
        assert resumed.history.count.tolist() == [2, 2]


@pytest.mark.after_error
def test_names_that_only_wrappers_tell_apart_count_as_they_are():
    layers, many = dict(zip(("w", "module.w"), parameters(2), strict=True)), AdaptiveThreshold()
    give(layers.values(), [np.ones(3, np.float32)] * 2)
    gradclip.clip_grad_layer_norm_({"module.w": layers["module.w"]}, many)
    gradclip.clip_grad_layer_norm_(layers, many)
    assert many.history.count.tolist() == [1, 2]
    again = [*layers.items(), ("w", parameters(1)[0])]
    with pytest.raises(ValueError, match=r"2 layers, got 3 layers, so which of them are new is not known"):
        gradclip.clip_grad_layer_norm_(again, many)
    with pytest.raises(ValueError, match=r"has observed 'w, .* Pass it, too: without a gradient it keeps"):
        gradclip.clip_grad_layer_norm_({f"_orig_mod.{name}": one for name, one in layers.items()}, many)


def test_the_history_goes_on_when_processes_are_named():
    layers, many = dict(zip("ab", parameters(2), strict=True)), AdaptiveThreshold()
    for settings in ({}, {"process_group": []}, {}):
        give(layers.values(), [np.ones(3, np.float32)] * 2)
        gradclip.clip_grad_layer_norm_(layers, many, **settings)
    assert many.history.count.tolist() == [3, 3]


@pytest.mark.after_error
@pytest.mark.parametrize("saved_by", ["layer", "global"])
def test_a_state_of_the_other_scope_is_refused_as_it_is_loaded(saved_by):
    found = {}
    for scope in ("layer", "global"):
        (one,) = parameters(1)
        give([one], [np.ones(3, np.float32)])
        optimizer = torch.optim.SGD([one], lr=0.1)
        found[scope] = optimizer, gradclip.clip_at_step(optimizer, AdaptiveThreshold(), scope=scope)
    found[saved_by][0].step()
    optimizer, clipping = found["global" if saved_by == "layer" else "layer"]
    for load, state in (
        (one.load_state_dict, two.state_dict()) for one, two in zip((optimizer, clipping), found[saved_by], strict=True)
    ):
        with pytest.raises(ValueError, match=r"the saved state follows .* scope of the run that saved it"):
            load(state)
    assert (clipping.max_norm.steps, clipping.max_norm.norm) == (0, None)
    optimizer.step()
    assert clipping.max_norm.steps == 1


# Devices and compiled code


class NoWaits(TorchDispatchMode):
    """Counts operations, and raises where a value is looked at, for which an accelerator would be waited for."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "waits"
        self.count += not func.is_view  # views take no time there
        return func(*args, **(kwargs or {}))


@EACH_RULE
def test_on_an_accelerator_nothing_waits_and_all_is_the_same(rule):
    here, there, layers, others = AdaptiveThreshold(rule), AdaptiveThreshold(rule), parameters(), parameters()
    for grads in steps():
        give(layers, grads)
        give(others, grads)
        gradclip.clip_grad_layer_norm_(layers, here, nonfinite="drop")
        with mock.patch.object(torch_backend, "in_host_memory", return_value=False), NoWaits():
            gradclip.clip_grad_layer_norm_(others, there, nonfinite="drop")
        for one, other in zip(layers, others, strict=True):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None:
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=0)
    with mock.patch.object(torch_backend, "in_host_memory", return_value=False):
        assert isinstance(there.next_max_norm, torch.Tensor)
        np.testing.assert_allclose(there.state_dict()["max_norm"], here.state_dict()["max_norm"], rtol=1e-6)
    assert (there.steps, there.num_clipped, there.num_skipped) == (here.steps, here.num_clipped, here.num_skipped)


def test_on_an_accelerator_thresholds_take_as_many_operations_for_all_layers_as_for_few():
    """Beside a fixed threshold: what it takes more does not depend on the number of layers."""
    more = []
    for count in (4, 40):
        layers, counts = parameters(count), []
        for max_norm in (1.0, AdaptiveThreshold()):
            for _ in range(3):
                give(layers, [np.ones(3, np.float32)] * count)
                with mock.patch.object(torch_backend, "in_host_memory", return_value=False), NoWaits() as seen:
                    gradclip.clip_grad_layer_norm_(layers, max_norm)
            counts.append(seen.count)
        more.append(counts[1] - counts[0])
    assert more[0] == more[1]


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")  # what PyTorch makes of NumPy's arrays
def test_compiled_code_follows_as_other_code_does():
    layers, (here, there) = parameters(3), (AdaptiveThreshold(QuantileRule(window=4)) for _ in range(2))
    compiled = torch.compile(lambda max_norm: gradclip.clip_grad_layer_norm_(layers, max_norm), backend="eager")
    for step in range(4):
        for clip, max_norm in ((gradclip.clip_grad_layer_norm_, here), (None, there)):
            give(layers, [np.full(3, 1.0 + step * place, np.float32) for place in range(3)])
            clip(layers, max_norm) if clip else compiled(max_norm)
    np.testing.assert_allclose(np.asarray(there.next_max_norm), here.next_max_norm, rtol=1e-6)
    assert there.steps == 4
