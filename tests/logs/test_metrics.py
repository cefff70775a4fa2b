"""A folder with a file for each metric."""

import pytest

import training_logs
from gradclip._src.logs.read import read
from gradclip._src.logs.rows import LogError


def run(tmp_path, name="train/grad_norm"):
    folder = tmp_path / "run"
    file = folder / "metrics" / name
    file.parent.mkdir(parents=True)
    file.write_text(training_logs.metric(training_logs.NORMS))
    file.with_name("loss").write_text(training_logs.metric(training_logs.LOSSES))
    (folder / "params").mkdir()
    (folder / "params" / "lr").write_text("0.1")
    return folder, file


@pytest.mark.parametrize("name", ["grad_norm", "train/grad_norm"])
def test_a_run_its_metrics_and_a_file(tmp_path, name):
    folder, file = run(tmp_path, name)
    for path in (folder, folder / "metrics", file):
        log = read(path)
        assert [tuple(row[:3]) for row in log.rows] == training_logs.RUN
        assert log.kind == "a file of a metric"
    assert [row.norm for row in read(folder, name.replace("grad_norm", "loss")).rows] == training_logs.LOSSES


def test_what_is_no_single_norm(tmp_path):
    folder, file = run(tmp_path)
    file.with_name("gnorm").write_text("1700000000000 2.5 1\n")
    with pytest.raises(LogError, match=r"has several norms: .*gnorm, .*grad_norm\. Pass one of them"):
        read(folder)
    assert [row.norm for row in read(folder, "train/gnorm").rows] == [2.5]
    with pytest.raises(LogError, match=r"is a folder without trainer_state\.json"):
        read(folder, "other")
    file.write_text("1700000000000 high 1\n")
    with pytest.raises(LogError, match=r"begins with|no norms"):
        read(file)
