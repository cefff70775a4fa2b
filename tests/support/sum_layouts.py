"""Settings of sums as tests write them: flat, with those of the layout among the others."""

from dataclasses import fields

from gradclip import SumLayout


def with_layout(settings):
    """Return settings for `sensitivity` or `clipped_sum_sensitivity`, those of the layout in a `SumLayout`."""
    names = {one.name for one in fields(SumLayout)} & settings.keys()
    rest = {name: value for name, value in settings.items() if name not in names}
    return rest | ({"layout": SumLayout(**{name: settings[name] for name in names})} if names else {})
