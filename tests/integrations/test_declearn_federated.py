"""A federated run of declearn: a server and two clients over websockets, whose optimizers clip by a module's name."""

import asyncio
import json
import socket
import warnings
from typing import ClassVar

import numpy as np
import pytest
from declearn.model.sklearn import NumpyVector
from declearn.optimizer import modules as originals
from declearn.quickrun import quickrun
from sklearn.datasets import load_digits

from gradclip.integrations.declearn import L2GlobalClipping
from rational import at_most

MAX_NORM, ROUNDS, STEPS = 0.25, 2, 12
MODEL = """
from declearn.model.sklearn import SklearnSGDModel

model = SklearnSGDModel.from_parameters(kind="classifier", loss="log_loss", penalty=None)
"""
CONFIG = """
[network]
protocol = "websockets"
host = "127.0.0.1"
port = {port}
heartbeat = 0.1

[data]

[optim]
server_opt = 1.0
client_opt = {{lrate = 0.5, modules = [
    ["seen", {{place = "before"}}], ["l2-global-clipping", {{max_norm = {max_norm}}}], ["seen", {{place = "after"}}]
]}}

[run]
rounds = ROUNDS
register = {{min_clients = 2}}
training = {{batch_size = 16, n_steps = STEPS}}
evaluate = {{batch_size = 128}}

[experiment]
metrics = [["multi-classif", {{labels = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]}}]]
checkpoint = "{folder}"
""".replace("ROUNDS", str(ROUNDS)).replace("STEPS", str(STEPS))


class Seen(originals.OptiModule):
    """A module that keeps what passes through it."""

    name: ClassVar[str] = "seen"
    vectors: ClassVar[dict[str, list[NumpyVector]]] = {}

    def __init__(self, place):
        self.place = place

    def get_config(self):
        return {"place": self.place}

    def run(self, gradients):
        self.vectors.setdefault(self.place, []).append(gradients)
        return gradients


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the folder of results of a run on handwritten digits, of which each client has a half."""
    folder = tmp_path_factory.mktemp("federated")
    (folder / "model.py").write_text(MODEL)
    images, labels = load_digits(return_X_y=True)
    for client in range(2):
        place = folder / "data" / f"client_{client}"
        place.mkdir(parents=True)
        for kind, rows in (("train", slice(client, 1200, 2)), ("valid", slice(1200 + client, None, 2))):
            np.save(place / f"{kind}_data.npy", images[rows] / 16.0)
            np.save(place / f"{kind}_target.npy", labels[rows])
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    (folder / "config.toml").write_text(CONFIG.format(port=port, max_norm=MAX_NORM, folder=folder / "results"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Argument 'logger' is deprecated", DeprecationWarning)
        asyncio.run(quickrun(str(folder)))
    return folder / "results"


def test_clients_clip_with_our_module(results):
    before, after = Seen.vectors["before"], Seen.vectors["after"]
    assert len(before) == len(after) == 2 * ROUNDS * STEPS
    assert not any(at_most(vector.coefs.values(), 2, MAX_NORM) for vector in before)
    assert all(at_most(vector.coefs.values(), 2, MAX_NORM) for vector in after)
    assert after == [L2GlobalClipping(MAX_NORM).run(vector) for vector in before]


def test_the_module_of_declearn_would_have_exceeded_the_threshold(results):
    theirs = [originals.L2GlobalClipping(MAX_NORM).run(vector) for vector in Seen.vectors["before"]]
    assert not all(at_most(vector.coefs.values(), 2, MAX_NORM) for vector in theirs)


def test_the_model_is_trained(results):
    """Of rounds that end in the same second, declearn keeps the last."""
    rounds = list(json.loads((results / "server" / "metrics.json").read_text()).values())
    assert 1 <= len(rounds) <= ROUNDS
    assert [each["loss"] for each in rounds] == sorted((each["loss"] for each in rounds), reverse=True)
    assert rounds[-1]["accuracy"] > 0.6
    specification = json.loads((results / "client_0" / "optimizer_config.json").read_text())
    assert specification["modules"][1] == ["l2-global-clipping", {"max_norm": MAX_NORM}]
