"""Advice in errors for users who try the names and keywords of other libraries, or pass what is no array."""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Set, Sized
from functools import cache
from os import PathLike

# The integrations, with other names of their libraries.
_INTEGRATIONS = {
    "brainstate": ("brainstate",),
    "declearn": ("declearn",),
    "flower": ("flower", "flwr"),
    "jax_privacy": ("jax_privacy",),
    "keras": ("keras",),
    "lightning": ("lightning", "pytorch_lightning", "pl"),
    "lucid": ("lucid",),
    "mlx": ("mlx", "mlx_lm"),
    "opacus": ("opacus",),
    "optax": ("optax",),
    "tensorflow": ("tensorflow", "tf"),
    "torch": ("torch", "pytorch"),
    "transformers": ("transformers", "huggingface", "hf"),
}
_AS_THEY_ARE = "Pass arrays of any framework to gradclip's own functions"
_GLOBAL = "Use gradclip.clip_grad_norm_(parameters, max_norm) in place, or gradclip.clip_by_global_norm(tree, max_norm)"
_NORM = "Use gradclip.global_norm(tree) for gradients, or gradclip.grad_norm(parameters)"
_LAYER_NORMS = "Use gradclip.layer_norms(tree) for the norm of each array"
_LAYERS = "Use gradclip.clip_grad_layer_norm_ in place, or gradclip.clip_by_layer_norm"
_VALUE = "Use gradclip.clip_grad_value_ in place, or gradclip.clip_by_value for a tree"
_UNITS = "Use gradclip.adaptive_grad_clip(grads, params), or gradclip.adaptive_grad_clip_(parameters) in place"
_FOLLOWS = (
    "For a threshold that follows the norms, pass max_norm=gradclip.AdaptiveThreshold() to gradclip.clip_grad_norm_"
)
_AT_QUANTILE = "For a threshold at a quantile of the last norms, pass \
max_norm=gradclip.AdaptiveThreshold(gradclip.QuantileRule(1, 0.9, window=1_000)) to gradclip.clip_grad_norm_"
_CALLBACKS = "Import ClipCallback from gradclip.integrations.lightning or from gradclip.integrations.transformers"
_NONFINITE = 'Pass nonfinite="raise" or "zero" to gradclip.clip_grad_norm_ or gradclip.clip_by_global_norm'
_BY_UNIT = "Use gradclip.clip_grad_unit_norm_ in place, or gradclip.clip_by_unit_norm for a tree"
_NOISE = "Use clipped_grad(...).sensitivity().noise_std(noise_multiplier), or the same of \
gradclip.clipped_sum_sensitivity(max_norm, batch_size=...)"
_SPENT = "Use gradclip.PrivateRun, whose noise is that for an epsilon, and which says what a run has spent"
_BATCHES = "Use gradclip.PoissonBatches, or in PyTorch gradclip.integrations.torch.poisson_loader"
_PRIVATE = "Use gradclip.clipped_grad(loss, max_norm), or gradclip.per_example_clip for gradients you already have"

# Keys are in lower case, without leading or trailing underscores.
_NAMES = {
    **{
        name: f"{_AS_THEY_ARE}. For the names of {name}, import gradclip.integrations.{module}"
        for module, names in _INTEGRATIONS.items()
        for name in names
    },
    **dict.fromkeys(("jax", "flax", "nnx", "equinox", "haiku", "numpy"), _AS_THEY_ARE),
    **dict.fromkeys(("privacyengine", "dpoptimizer", "gradsamplemodule", "per_example_gradients"), _PRIVATE),
    **dict.fromkeys(("private", "dp", "dp_sgd", "dpsgd", "differentially_private_aggregate"), _PRIVATE),
    **dict.fromkeys(("noise_std", "noise_multiplier", "sensitivity", "l2_sensitivity"), _NOISE),
    **dict.fromkeys(("get_noise_multiplier", "accountant", "rdpaccountant", "get_epsilon", "epsilon"), _SPENT),
    **dict.fromkeys(("poissonsampler", "poisson_loader", "dpdataloader", "batchmemorymanager"), _BATCHES),
    **dict.fromkeys(("per_sample_clip", "clip_per_example", "clip_per_sample", "per_example_grad"), _PRIVATE),
    **dict.fromkeys(("get_total_norm", "total_norm", "norm", "get_grad_norm", "gradient_norm"), _NORM),
    **dict.fromkeys(("tree_norm", "tree_l2_norm", "l2_norm", "tree_global_norm", "compute_norm"), _NORM),
    **dict.fromkeys(("global_grad_norm", "get_global_norm", "get_global_grad_norm", "get_norm", "grad_l2_norm"), _NORM),
    **dict.fromkeys(("grad_norms", "gradient_norms", "per_layer_norms", "layer_norm"), _LAYER_NORMS),
    "clip_grads_with_norm": "Use gradclip.integrations.torch.clip_grads_with_norm_",
    **dict.fromkeys(("clip_grad_norm", "clip_gradients", "clip_grads", "clip_grad", "clip_norm"), _GLOBAL),
    **dict.fromkeys(("clip_gradient_norm", "clip_gradients_norm", "clip_grads_norm", "clip_gradient"), _GLOBAL),
    **dict.fromkeys(("fold_into", "clip_in_step"), "Use gradclip.clip_at_step(optimizer, max_norm)"),
    **dict.fromkeys(("follow", "deepspeed", "megatron"), "Use gradclip.clip_at_step(engine, max_norm)"),
    "clip_in_backward": "Import it from gradclip.integrations.torch",
    **dict.fromkeys(
        ("clipgrad", "gradclip", "clip_tree", "clip_pytree", "clip_global_norm", "dispatch_clip_grad"), _GLOBAL
    ),
    **dict.fromkeys(("clipbyglobalnorm", "global_norm_clip", "gradient_clip_val", "max_grad_norm"), _GLOBAL),
    **dict.fromkeys(
        ("gradient_clipping", "configure_gradient_clipping", "global_clipnorm", "clip_grad_by_norm"), _GLOBAL
    ),
    "clip": f"{_GLOBAL}. By value, as in NumPy and optax: gradclip.clip_by_value",
    **dict.fromkeys(("clipped", "clippingmetrics"), "Import it from gradclip.integrations.keras"),
    "skip_spikes": "Import it from gradclip.integrations.optax",
    "clip_by_norm": "Use gradclip.clip_by_layer_norm(tree, max_norm), which clips each array by its own norm, or \
gradclip.clip_by_global_norm(tree, max_norm) for the global norm",
    "clip_by_average_norm": "Use gradclip.integrations.tensorflow.clip_by_average_norm",
    "clip_by_block_rms": "Use gradclip.integrations.optax.clip_by_block_rms",
    **dict.fromkeys(("clip_grad_value", "clip_value", "clipvalue", "clipbyvalue", "clip_grads_by_value"), _VALUE),
    **dict.fromkeys(("clip_by_layer", "clip_layer_norm", "clip_grad_layer_norm", "clip_per_layer"), _LAYERS),
    **dict.fromkeys(("clipnorm", "clipbynorm"), _LAYERS),
    **dict.fromkeys(("clipcallback", "gradientclipping", "gradientclippingcallback"), _CALLBACKS),
    **dict.fromkeys(("apply_if_finite", "zero_nans", "skip_nonfinite", "error_if_nonfinite"), _NONFINITE),
    **dict.fromkeys(("per_example_global_norm_clip", "per_example_layer_norm_clip"), _PRIVATE),
    **dict.fromkeys(("adaptive_gradient_clipping", "adaptive_gradient_clip", "adaptive_clip_grad", "agc"), _UNITS),
    **dict.fromkeys(("unitwise_clip", "unitwise_norm", "clip_by_unit", "clip_grad_unit_norm"), _BY_UNIT),
    **dict.fromkeys(
        ("zclip", "smartclip", "adaptive_clip", "adaptiveclip", "adaptive_norm", "adaptivenorm", "adaptive_threshold"),
        _FOLLOWS,
    ),
    **dict.fromkeys(("autoclip", "quantileclip", "percentileclip"), _AT_QUANTILE),
    **{f"{name.lower()}threshold": f"Use gradclip.{name}Rule" for name in ("Quantile", "Spread", "Steady")},
}

_ORDER = ("ord",)
_THRESHOLD = ("max_norm", "clip_value", "clipping")
_LEAVE_OUT = "Leave it out"
_NOISE_AFTER = "Noise is added to the sum, by gradclip.add_noise(summed, clipped.sensitivity(), noise_multiplier)"
_OF_RULE = ("rule=gradclip.QuantileRule(...)",)
# What replaces a word of another library or call: the first of these that the function has, written as in a call.
_KEYWORDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("norm_type", "p", "order", "norm"), _ORDER),
    **dict.fromkeys(("clip_norm", "max_grad_norm", "l2_clip_norm", "l2_norm_clip", "threshold"), _THRESHOLD),
    **dict.fromkeys(("max_norm", "max_value", "clip_value", "max_delta", "clip_factor", "clipping"), _THRESHOLD),
    **dict.fromkeys(("clip_grad", "gradient_clip_val", "gradient_clipping", "max_gradient_norm"), _THRESHOLD),
    **dict.fromkeys(("clipnorm", "global_clipnorm", "clipvalue"), _THRESHOLD),
    **dict.fromkeys(("error_if_nonfinite", "raise_if_nonfinite"), ('nonfinite="raise"',)),
    **dict.fromkeys(("axis", "axes", "dim"), ("unit_axis",)),
    **dict.fromkeys(("grads", "gradients", "updates", "tensors", "t_list"), ("tree", "grads", "parameters")),
    "tree": ("parameters", "grads"),
    **dict.fromkeys(("params", "model"), ("parameters",)),
    **dict.fromkeys(("weights", "parameters"), ("params", "tree")),
    **dict.fromkeys(("function", "loss", "loss_fn"), ("fun",)),
    **dict.fromkeys(("rates", "lrs"), ("learning_rates",)),
    **dict.fromkeys(("target", "target_unclipped_quantile"), ("quantile",)),
    "ord": ("norm_type",),
    "per_layer": ('scope="layer"',),
    **dict.fromkeys(("foreach", "eps"), (_LEAVE_OUT,)),
    **dict.fromkeys(("noise_multiplier", "noise_std", "stddev"), (_NOISE_AFTER,)),
    **dict.fromkeys(("expected_batch_size", "denominator"), ("normalize_by",)),
    **dict.fromkeys(("max_physical_batch_size", "num_microbatches"), ("microbatch_size",)),
    **dict.fromkeys(("batch_size", "max_batch_size"), ("pad_to",)),
    "releases": ("state=run.state_dict()",),
    **dict.fromkeys(("in_axes", "in_dims"), ("batch_argnums",)),
    **{
        word: (f"layout=gradclip.SumLayout({word}=...)",)
        for word in ("summed_in", "partial_sums", "partial_sums_in", "elements", "microbatches")
    },
    **dict.fromkeys(("factor", "quantile", "window", "initial", "lower", "upper"), _OF_RULE),
}

_TREES = ("clip_by_global_norm", "clip_by_layer_norm", "clip_by_unit_norm", "adaptive_grad_clip", "per_example_clip")
_IN_PLACE = ("clip_grad_norm_", "clip_grad_layer_norm_", "clip_grad_unit_norm_", "adaptive_grad_clip_", "grad_norm")
_PROCESSES = "Pass distributed tensors as they are, or in JAX the name of the mesh axis as axis_name="
# What to do without one of gradclip's own words, in the functions that lack it.
_WITHOUT: dict[str, tuple[tuple[str, ...], str]] = {
    "monitor": (_TREES, "Record what it returns: monitor.record(norm, max_norm)"),
    **dict.fromkeys(("process_group", "mesh"), (_TREES, _PROCESSES)),
    "axis_name": (_IN_PLACE, "Name the processes of PyTorch as process_group= or mesh="),
    "nonfinite": (("clip_by_value", "clip_grad_value_"), "NaN stays NaN, and infinities are clamped"),
    "integers": (("clip_in_backward",), "Leave it out: a backward pass makes no gradients of integers"),
    "skip_above": (_IN_PLACE, "Pass max_norm=gradclip.AdaptiveThreshold(skip_above=...) to gradclip.clip_grad_norm_"),
    "unit_axis": ((*_TREES, *_IN_PLACE, "clip_by_value", "clip_grad_value_"), _BY_UNIT),
    "mask": (_TREES[:-1], "To choose leaves, pass where=. To leave examples out, call gradclip.per_example_clip"),
}


def advice_on_name(name: str, module: str = "gradclip") -> str:
    """Return what to use instead of a name that a module lacks, as a sentence; empty if there is nothing to say."""
    advice = _NAMES.get(name.strip("_").lower())
    if not advice and module.endswith(".integrations") and not name.startswith("_"):
        advice = f"It has {', '.join(_INTEGRATIONS)}. {_AS_THEY_ARE}"
    if not advice and module != "gradclip" and name in sys.modules["gradclip"].__all__:
        advice = f"Use gradclip.{name}"
    if not advice and name in sys.modules["gradclip"].typing.__all__:
        advice = "Import it from gradclip.typing"
    return f"{advice}." if advice else ""


def raise_advice(function: Callable[..., object], arguments: Sized, keywords: Iterable[str]) -> None:
    """Raise a TypeError with advice for the first keyword that `function` lacks and that other functions have.

    Likewise if `arguments` are more than it takes by position. Call this after `function` has raised a TypeError. With
    such a call it never started, so this hides no other error.
    """
    taken = inspect.signature(function).parameters
    kinds = {parameter.kind for parameter in taken.values()}
    name = getattr(function, "__qualname__", "the function").rpartition("<locals>.")[2]
    name = name.replace("FunctionSettings.", "ClippedFunction.")  # users know no other
    for keyword in () if inspect.Parameter.VAR_KEYWORD in kinds else keywords:
        if keyword not in taken and (advice := _in_place_of(keyword, taken) or _own(name, keyword)):
            raise TypeError(f"{name}() got an unexpected keyword argument {keyword!r}. {advice}.") from None
    named = [f"{one.name}=" for one in taken.values() if one.kind is one.KEYWORD_ONLY]
    most = len(taken) - len(named)
    if named and len(arguments) > most and inspect.Parameter.VAR_POSITIONAL not in kinds:
        raise TypeError(
            f"{name}() takes {most} positional arguments but {len(arguments)} were given. Pass the others by name: "
            f"{', '.join(named)}."
        ) from None


def how_to_convert(leaf: object) -> str:
    """Return the advice for a leaf that holds arrays but is none, for errors; empty if there is nothing to say."""
    if isinstance(leaf, Mapping):
        return " Convert it with dict(...), which loads the arrays if it is an open file."
    if hasattr(leaf, "to_numpy"):
        return " Pass the result of its to_numpy()."
    if isinstance(leaf, str | bytes | PathLike) or hasattr(leaf, "read"):
        return " Load the arrays of a file first: dict(numpy.load(path, allow_pickle=False)) for .npz."
    if isinstance(leaf, Iterator):
        return (
            " Convert it with list(...). If it yields parameters, call gradclip.grad_norm or gradclip.clip_grad_norm_ "
            "for their gradients."
        )
    return " Convert it with list(...)." if isinstance(leaf, Set | range) else ""


def _in_place_of(keyword: str, taken: Iterable[str]) -> str:
    for written in _KEYWORDS.get(keyword, ()):
        ours, _, value = written.partition("=")
        if written == _NOISE_AFTER:
            return written
        if written == _LEAVE_OUT:
            return f"{written}: gradclip does not need it"
        if ours in taken:
            return f"Pass {written if value else written + '='} instead"
    return ""


def _own(name: str, keyword: str) -> str:
    """Return advice if a function lacks the keyword, but gradclip's of the same name has it, or others of gradclip."""
    takers = _takers(keyword)
    if name in takers:
        return f"Call gradclip.{name} instead, which takes it"
    lacking, instead = _WITHOUT.get(keyword, ((), ""))
    if name in lacking:
        return instead
    more = f" and {len(takers) - 3} more" if len(takers) > 3 else ""
    told = ", ".join(f"gradclip.{one}" for one in takers[:3])
    return f"Leave it out: it is an argument of {told}{more}" if takers else ""


@cache
def _takers(keyword: str) -> list[str]:
    """Return the public functions, classes and methods that take a keyword."""
    gradclip = sys.modules["gradclip"]
    calls = {name: getattr(gradclip, name) for name in gradclip.__all__}
    kinds = {name: one for name, one in calls.items() if isinstance(one, type)}
    calls |= {f"{name}.{method}": getattr(one, method) for name, one in kinds.items() for method in vars(one)}
    taking = []
    for name, one in calls.items():
        # Of a class, its own arguments: a tuple or an error has none that users pass.
        made = one.__init__ if isinstance(one, type) else one  # type: ignore[misc]
        public = "._" not in name and (inspect.isfunction(made) or inspect.ismethod(made))
        taking += [name] if public and keyword in inspect.signature(one).parameters else []
    return taking
