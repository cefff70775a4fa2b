"""The search of the built site finds what people look for. The browser's own script answers; `make docs` runs this."""

import json
from pathlib import Path

import pytest
import quickjs

SITE = Path(__file__).parents[2] / "build" / "site" / "html"
# What people really type. For each question, the page that answers it, or several. One of them must be among the
# first three that are found.
ANSWERS = {
    "install": ["install.html"],
    "pip install": ["install.html"],
    "compiler": ["install.html"],
    "quickstart": ["index.html"],
    "quick start": ["index.html"],
    "getting started": ["tutorials/index.html"],
    "tutorial": ["tutorials/index.html"],
    "loss spike": ["how-to/loss-spikes.html"],
    "huggingface": ["how-to/trainers.html"],
    "hugging face": ["how-to/trainers.html"],
    "trainer": ["how-to/trainers.html"],
    "lightning": ["how-to/trainers.html"],
    "deepspeed": ["how-to/deepspeed-megatron.html"],
    "wandb": ["how-to/trainers.html", "how-to/log-norms.html"],
    "npz": ["reference/command-line.html", "how-to/check-client-updates.html"],
    "epsilon": ["tutorials/private.html"],
    "bf16": ["bound.html", "help/glossary.html", "how-to/amp-accumulation-ddp.html"],
    "lora": ["how-to/lora-private.html", "how-to/parameter-groups.html"],
    "agc": ["which-clipping.html", "reference/functional.html", "reference/in-place.html"],
    "adaptive gradient clipping": ["which-clipping.html", "adaptive.html"],
    "clip by value": ["which-clipping.html", "reference/functional.html"],
    "which clipping": ["which-clipping.html"],
    "fsdp": ["sharded.html"],
    "pipeline parallel": ["sharded.html"],
    "shard_map": ["sharded_jax.html"],
    "opacus": ["migrate/opacus.html"],
    "dp-sgd": ["tutorials/private.html", "per-example.html", "which-clipping.html"],
    "flower": ["how-to/flower.html"],
    "gan": ["how-to/special-loops.html"],
    "muon": ["how-to/muon.html"],
    "keras": ["keras.html"],
    "optax": ["migrate/optax.html"],
    "grad_norm": ["how-to/log-norms.html", "reference/norms.html"],
    "layer norms": ["how-to/log-norms.html", "reference/norms.html"],
    "safetensors": ["how-to/check-client-updates.html", "reference/command-line.html"],
    "gradient exploding": ["how-to/loss-spikes.html", "which-clipping.html"],
    "nan": ["how-to/loss-spikes.html", "reference/policies.html"],
}


class Search:
    """The script that a browser runs as a worker, and the index that it is given."""

    def __init__(self, index):
        self.items = index["items"]
        (script,) = (SITE / "assets" / "javascripts" / "workers").glob("search.*.js")
        self.context = quickjs.Context()
        self.context.eval("var self = { postMessage: (answer) => { self.answer = JSON.stringify(answer) } }")
        self.context.eval(script.read_text("utf-8"))
        assert self._send({"type": 0, "data": index}) == {"type": 1}

    def _send(self, message):
        self.context.eval(f"self.onmessage({{ data: {json.dumps(message)} }})")
        while self.context.execute_pending_job():
            pass
        return json.loads(self.context.eval("self.answer"))

    def __call__(self, question):
        """Return the pages that are found, the best one first."""
        found = self._send({"type": 2, "data": {"input": question}})["data"]["items"]
        return [self.items[item["id"]]["location"].partition("#")[0] for item in found]


@pytest.fixture(scope="module")
def index():
    return json.loads((SITE / "search.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def search(index):
    return Search(index)


@pytest.mark.parametrize("question", ANSWERS)
def test_it_finds_what_people_look_for(search, question):
    best = list(dict.fromkeys(search(question)))[:3]
    assert set(best) & set(ANSWERS[question]), best


def test_a_threshold_leads_to_the_page_on_thresholds(search):
    assert search("gradient clipping threshold")[0] == "how-to/choose-a-threshold.html"


def test_it_finds_nothing_where_nothing_is(search):
    assert search("quantumchromodynamics") == []


def test_results_and_sources_are_not_searched(index):
    beside = {item["location"].partition("#")[0] for item in index["items"] if item["location"].startswith("files/")}
    assert beside == {"files/examples/index.html"}


def test_pages_opened_from_disk_have_the_same_index(index):
    from_disk = (SITE / "search.js").read_text("utf-8").removeprefix("var __index = ").rstrip().removesuffix(";")
    assert json.loads(from_disk) == index
    for page in SITE.rglob("*.html"):
        text = page.read_text("utf-8")
        if "__config" in text:
            # It must be there before the script that starts the worker.
            assert 0 < text.index("assets/iframe-worker.js") < text.index("assets/javascripts/bundle."), page


# What the script of a page opened from disk asks of a browser. The frame's own `self` is the one of the search.
BROWSER = """
var location = { protocol: "file:" }, window = {}, URL = class { constructor(address) { this.href = address } };
var setTimeout = (call) => call(), structuredClone = (data) => JSON.parse(JSON.stringify(data));
var script = {}, self = { document: { createElement: () => script, body: { append: () => 0 } } };
var frame = { contentWindow: self }, document = { baseURI: "", body: self.document.body, createElement: () => frame };
"""


def test_from_disk_the_script_answers_in_a_frame_and_changes_no_question(index):
    (script,) = (SITE / "assets" / "javascripts" / "workers").glob("search.*.js")
    context = quickjs.Context()
    context.eval(BROWSER + (SITE / "assets" / "iframe-worker.js").read_text("utf-8"))
    context.eval('var worker = new window.Worker("search.js"); worker.onmessage = ({ data }) => { worker.last = data }')
    context.eval(script.read_text("utf-8") + "; script.onload()")
    for message, kind in ({"type": 0, "data": index}, 1), ({"type": 2, "data": {"input": "install"}}, 3):
        context.eval(f"var message = {json.dumps(message)}; worker.postMessage(message)")
        while context.execute_pending_job():
            pass
        assert context.eval("worker.last.type") == kind
        assert json.loads(context.eval("JSON.stringify(message)")) == message
    best = index["items"][context.eval("worker.last.data.items[0].id")]
    assert best["location"] == "install.html"
