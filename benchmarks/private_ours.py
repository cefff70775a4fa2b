"""gradclip's contenders in private_steps.py."""

import gradclip


def clipped(loss, size, method, **settings):
    """Return a clipped function. Raise a ValueError if one example can move its sum without limit."""
    settings = settings or ({"microbatch_size": size} if size % 8 else {"pad_to": size})
    made = gradclip.clipped_grad(loss, 1.0, batch_argnums=(1, 2), method=method, **settings)
    made.sensitivity(batch_size=size).noise_std(noise_multiplier=1.0)
    return made


def with_noise(call, size):
    """Return a call that adds exact noise to the sum that `call` returns."""
    sensitivity = gradclip.clipped_sum_sensitivity(1.0, batch_size=size)
    return lambda: gradclip.add_noise(call(), sensitivity, noise_multiplier=1.0)
