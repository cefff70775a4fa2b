"""TensorBoard's files: those that TensorFlow writes, and records by hand."""

import gzip
import struct
import sys

import numpy as np
import pytest
import tensorflow
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from tensorboard.util.tensor_util import make_tensor_proto

import fresh_process
import training_logs
from gradclip._src.logs.events import is_event_file, of_events
from gradclip._src.logs.read import read
from gradclip._src.logs.rows import LogError
from training_logs import Summary

NORM = "grad_norm"


def written(folder, *records):
    path = folder / "run.tfevents"
    path.write_bytes(b"".join(map(training_logs.record, records)))
    return path


def test_what_tensorflow_writes_is_read(tmp_path):
    tf = tensorflow.compat.v1
    path = tmp_path / "run.tfevents"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for step in range(3):
            norm = tf.Summary.Value(tag="train/grad_norm", tensor=tf.make_tensor_proto(1.5 * step + 1))
            loss = tf.Summary.Value(tag="train/loss", simple_value=2.0 - step)
            words = tf.Summary.Value(tag="train/text", tensor=tf.make_tensor_proto("words"))
            event = tf.Event(step=step, wall_time=1.7e9, summary=tf.Summary(value=[words, norm, loss]))
            writer.write(event.SerializeToString())
    rows = of_events([path], None).rows
    assert [(row.step, row.norm, row.loss) for row in rows] == [(0, 1.0, 2.0), (1, 2.5, 1.0), (2, 4.0, 0.0)]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_numbers_are_read_from_tensors_of_one_element(tmp_path, dtype, shape):
    packed = make_tensor_proto(np.full(shape, 0.25, dtype))
    held = TensorProto(dtype=packed.dtype, tensor_shape=packed.tensor_shape)
    held.tensor_content = np.full(shape, 2.5, dtype).tobytes()
    values = [Summary.Value(tag=NORM, tensor=tensor) for tensor in (packed, held)]
    path = written(tmp_path, *(training_logs.logged(300 + step, value) for step, value in enumerate(values)))
    assert [(row.step, row.norm) for row in of_events([path], None).rows] == [(300, 0.25), (301, 2.5)]


def _wide():
    """One number that stands for 2**40."""
    tensor = make_tensor_proto(np.float32(1.0))
    tensor.tensor_shape.dim.add(size=2**40)
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [
        make_tensor_proto(np.zeros(2, np.float32)),
        make_tensor_proto(np.zeros(0, np.float32)),
        make_tensor_proto(np.int32(3)),
        make_tensor_proto(b"words"),
        TensorProto(),
        TensorProto(dtype=1, tensor_content=b"abc"),
        TensorProto(dtype=19, half_val=[2**20]),
        TensorProto(dtype=99),
        _wide(),
    ],
)
def test_other_tensors_hold_no_norm(tmp_path, tensor):
    value = Summary.Value(tag=NORM, tensor=tensor)
    path = written(tmp_path, training_logs.logged(1, value), training_logs.event(2, NORM, 0.5))
    assert [(row.step, row.norm) for row in of_events([path], None).rows] == [(2, 0.5)]


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x10", b"\x2a\x7f", b"\x2a\x02\x0a\x50", b"\x15\x00", b"\x13"])
def test_a_message_that_is_none_is_passed_over(tmp_path, data):
    path = written(tmp_path, data, training_logs.event(2, NORM, 0.5))
    log = of_events([path], None)
    assert ([(row.step, row.norm) for row in log.rows], log.notes) == ([(2, 0.5)], ())


def test_a_compressed_file_is_read(tmp_path):
    path = tmp_path / "run.tfevents.gz"
    path.write_bytes(gzip.compress(training_logs.events()))
    assert len(read(path).rows) == len(training_logs.RUN)


def test_tensorflow_is_not_imported(tmp_path):
    training_logs.written(tmp_path, "events.out.tfevents.1")
    code = """
        import sys
        from gradclip._src.logs.read import read
        print(len(read(sys.argv[1]).rows), "tensorflow" in sys.modules)
    """
    assert fresh_process.run(code, tmp_path) == f"{len(training_logs.RUN)} False"


def test_without_tensorboard_one_line_says_what_to_install(tmp_path, monkeypatch):
    path = training_logs.written(tmp_path, "events.out.tfevents.1")
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(LogError, match=r"1 is TensorBoard's\. To read it, run: pip install tensorboard\.") as raised:
        read(path)
    assert len(str(raised.value).splitlines()) == 1


def test_several_files_of_one_run(tmp_path):
    paths = []
    for place, steps in enumerate((range(3), range(2, 5))):
        paths.append(tmp_path / f"{place}.tfevents")
        records = (training_logs.record(training_logs.event(step, "grad_norm", step + place)) for step in steps)
        paths[-1].write_bytes(b"".join(records))
    assert [(row.step, row.norm) for row in of_events(paths, None).rows] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (2, 3),
        (3, 4),
        (4, 5),
    ]


@pytest.mark.parametrize("where", ["length", "data", "tail"])
def test_reading_stops_where_a_checksum_is_wrong(tmp_path, where):
    content = bytearray(training_logs.events())
    size = len(training_logs.record(training_logs.event(400, "train/grad_norm", 1.0)))
    content[{"length": -size, "data": -30, "tail": -1}[where]] ^= 1
    path = tmp_path / "run.tfevents"
    path.write_bytes(content)
    log = of_events([path], None)
    assert [row.step for row in log.rows] == list(training_logs.STEPS)[:-1]
    assert log.notes == ("run.tfevents is cut off or damaged: what could be read of it is used.",)


def test_a_record_of_an_enormous_length(tmp_path):
    length = struct.pack("<Q", 2**62)
    path = tmp_path / "run.tfevents"
    path.write_bytes(training_logs.events() + length + struct.pack("<I", masked_crc32c(length)) + b"x")
    assert len(of_events([path], None).rows) == len(training_logs.RUN)


def test_of_images_no_checksum_is_taken(tmp_path):
    large = training_logs.record(bytes(2**16 + 1))
    path = tmp_path / "run.tfevents"
    path.write_bytes(training_logs.events() + large[:-4] + bytes(4) + training_logs.record(b"\x10\x01"))
    log = of_events([path], None)
    assert (len(log.rows), log.notes) == (len(training_logs.RUN), ())


def test_the_tags_are_told_if_none_is_the_norm(tmp_path):
    path = tmp_path / "run.tfevents"
    path.write_bytes(training_logs.record(training_logs.event(1, "train/loss", 1.0)))
    with pytest.raises(LogError, match=r"has no norms of gradients\. Its entries are train/loss"):
        of_events([path], None)


def test_other_files_are_told_apart():
    assert is_event_file(training_logs.events())
    assert not is_event_file(b"step,grad_norm\n1,2\n")
    assert not is_event_file(b"short")


def test_a_file_that_is_damaged_at_its_start_says_so(tmp_path):
    path = tmp_path / "run.tfevents"
    content = bytearray(training_logs.record(training_logs.event(1, "grad_norm", 2.0)))
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(LogError, match="is cut off or damaged before its first number"):
        of_events([path], None)


def test_only_entries_with_many_numbers_are_told_as_others_that_mean_the_same(tmp_path):
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(training_logs.events() + training_logs.record(training_logs.event(20, "train/train_loss", 1.0)))
    assert of_events([path], None).notes == ()
    more = (training_logs.record(training_logs.event(step, "train/train_loss", 1.0)) for step in (18, 19))
    path.write_bytes(path.read_bytes() + b"".join(more))
    (note,) = of_events([path], None).notes
    assert note == "Of entries that mean the same, these are read: train/loss, not train/train_loss."
