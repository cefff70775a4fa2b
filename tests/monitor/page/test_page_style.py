"""The style has a colour for everything, in light and in dark."""

import re

from gradclip._src.monitor.page.looks import Palette
from gradclip._src.monitor.page.page import STYLE


def test_every_colour_is_there_twice():
    light, dark = (
        dict(re.findall(r"--(\w+):(#\w+)", part)) for part in STYLE.split("@media(prefers-color-scheme:dark)")
    )
    assert light.keys() == dark.keys()
    assert vars(Palette()).items() <= light.items()
    used = set(re.findall(r"var\(--(\w+)\)", STYLE))
    assert used <= light.keys()
    assert all(light[name] != dark[name] for name in light)
