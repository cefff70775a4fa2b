"""Flower without a network: a grid that hands each message to a `ClientApp` in this process.

`flwr.simulation` needs Ray. The strategies, their `start` and the apps are Flower's.
"""

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

# What Flower's processes are told when they start.
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1


class InProcess(Grid):
    """Clients 1 to n, each a function from parameters and its number to trained parameters."""

    def __init__(self, train, clients, mods=()):
        self.clients, self.evaluated = clients, 0
        self.app = ClientApp(mods=list(mods))
        self.app.train()(self._trained(train))
        self.app.evaluate()(self._evaluate)
        self.replies = []

    def _trained(self, train):
        def reply(message, context):
            arrays = message.content["arrays"]
            new = train(dict(zip(arrays.keys(), arrays.to_numpy_ndarrays(), strict=True)), context.node_id)
            metrics = MetricRecord({"num-examples": 1, "loss": float(context.node_id)})
            return Message(RecordDict({"arrays": record(new), "metrics": metrics}), reply_to=message)

        return reply

    def _evaluate(self, message, context):
        self.evaluated += 1
        metrics = MetricRecord({"num-examples": 1, "loss": float(context.node_id)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    def send_and_receive(self, messages, *, timeout=None):
        del timeout
        found = [self.app(m, Context(1, m.metadata.dst_node_id, {}, RecordDict(), {})) for m in messages]
        self.replies = found or self.replies
        return found

    def get_node_ids(self):
        return range(1, self.clients + 1)

    def get_nodes(self):
        raise NotImplementedError

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def push_messages(self, messages):
        raise NotImplementedError

    def pull_messages(self, message_ids):
        raise NotImplementedError


def record(arrays):
    return ArrayRecord({key: Array(np.asarray(x)) for key, x in arrays.items()})


def arrays_of(found):
    return dict(zip(found.keys(), found.to_numpy_ndarrays(), strict=True))
