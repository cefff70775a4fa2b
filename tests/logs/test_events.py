"""TensorBoard's files: those that TensorFlow writes, and records by hand."""

import struct

import pytest
import tensorflow

import training_logs
from gradclip._src.logs.events import checksum, is_event_file, of_events, scalars_of
from gradclip._src.logs.rows import LogError


def test_the_checksum_is_the_published_one():
    # CRC-32C of "123456789" is 0xE3069283; the mask rotates it by 15 bits and adds a constant.
    crc = 0xE3069283
    assert checksum(b"123456789") == (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


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


def test_numbers_are_read_from_each_kind_of_value():
    value = training_logs.message(1, b"a") + b"\x15" + struct.pack("<f", 0.5)
    double = training_logs.message(1, b"b") + training_logs.message(8, b"\x08\x02" + b"\x31" + struct.pack("<d", 0.25))
    packed = training_logs.message(1, b"c") + training_logs.message(
        8, b"\x08\x01" + training_logs.message(5, struct.pack("<f", 2.0))
    )
    two = training_logs.message(1, b"d") + training_logs.message(
        8, b"\x08\x01" + training_logs.message(5, struct.pack("<2f", 2.0, 3.0))
    )
    summary = b"".join(training_logs.message(1, one) for one in (value, double, packed, two))
    event = b"\x10" + training_logs.varint(300) + training_logs.message(5, summary)
    assert scalars_of(event) == [("a", 300, 0.5), ("b", 300, 0.25), ("c", 300, 2.0)]


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"\x10", b"\x2a\x7f", b"\x2a\x02\x0a\x50", b"\x15\x00", b"\x10" + b"\xff" * 20, b"\x13"]
)
def test_a_damaged_message_holds_nothing(data):
    assert scalars_of(data) == []


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
    path.write_bytes(training_logs.events() + length + struct.pack("<I", checksum(length)) + b"x")
    assert len(of_events([path], None).rows) == len(training_logs.RUN)


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
