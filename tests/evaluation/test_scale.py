"""Cells over Ray: two workers give the numbers of one; a killed one is retried and nothing is counted twice."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from stacktok.evaluation.cells import Results, cells_of
from stacktok.evaluation.run import run_plan
from stacktok.evaluation.scale import over_ray, run_on_worker
from tests.evaluation import studies

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray", reason="needs ray: make test-eval")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    how = {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False}
    ray.init("local", **how, runtime_env={"env_vars": {"PYTHONPATH": path}})
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return studies.save_tiny(tmp_path_factory.mktemp("tiny"))


def small(checkpoint):
    plan = studies.plan(checkpoint, methods=[{"name": "StackTok", "method": "stacktok"}], budgets=[12])
    return plan.model_copy(update={"tasks": plan.tasks[:1]})


def items(results: Results):
    found = {}
    for result in results.read():
        key = (result["settings"]["label"], result["settings"]["task"]["name"])
        found[key] = list(zip(*(result["items"][name] for name in ("id", "answer", "score", "tokens")), strict=True))
    return found


def test_two_workers_give_the_numbers_of_one(cluster, checkpoint, tmp_path):
    spread = run_plan(small(checkpoint), tmp_path / "ray", ray="local", device="cpu")
    assert items(spread) == items(run_plan(small(checkpoint), tmp_path / "one", device="cpu"))


def test_a_killed_worker_is_retried_and_nothing_is_counted_twice(cluster, checkpoint, tmp_path):
    mark = str(tmp_path / "killed")

    def work(plan, key, device):
        result = run_on_worker(plan, key, device)
        if not os.path.exists(mark):
            Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    plan = small(checkpoint)
    cells = cells_of(plan)
    outcomes = list(over_ray(plan, cells, address="local", device="cpu", work=work))
    assert os.path.exists(mark)
    assert sorted(cell.key for cell, _, _ in outcomes) == sorted(cell.key for cell in cells)
    assert all(error is None for _, _, error in outcomes)


def test_a_cells_error_comes_back_as_it_was(cluster, checkpoint):
    def work(plan, key, device):
        raise ValueError("a clear sentence")

    plan = small(checkpoint)
    _, result, error = next(over_ray(plan, cells_of(plan)[:1], address="local", work=work))
    assert result is None
    assert "a clear sentence" in str(error)


def test_processes_and_ray_exclude_each_other(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="processes cannot be combined with ray"):
        run_plan(small(checkpoint), tmp_path, processes=2, ray="local")
    with pytest.raises(ValueError, match="processes=0 must be at least 1"):
        run_plan(small(checkpoint), tmp_path, processes=0)
