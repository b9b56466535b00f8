"""Combined figures of the sequence benchmark, and its known tasks."""

from typing import get_args

from benchmarks.mesh.rows import ROWS, TASKS, Task, compare


def test_compare():
    dense = {"first_token": [4.0, 6.0, 5.0], "exchange": [0.25], "bytes": {"formula": 800}}
    plan = {
        "first_token": [2.5],
        "exchange": [0.125],
        "near": [0.5],
        "near_and_exchange": [0.5],
        "attention": [0.75],
        "bytes": {"formula": 300},
    }
    failed = {"first_token": {"error": "RuntimeError: out of memory"}}
    results = {
        f"{name} 8": {"row": name, "length": 8, **out}
        for name, out in {"dense": dense, "plan": plan, "one_device": failed}.items()
    }
    results["plan 16"] = {"row": "plan", "length": 16, "first_token": [1.0]}
    compare({"link_rate": 1e9, **results}, layers=2)
    assert results["plan 8"]["compared"] == {
        "speedup_over_dense": 2.0,
        "bytes_of_dense": 0.375,
        "exchange_of_dense": 0.5,
        "together_over_sum": 0.8,
        "exchange_share": 0.1,
        "rest": 0.5,
    }
    assert results["one_device 8"]["compared"] == {}
    assert results["plan 16"]["compared"] == {}


def test_times_of_two_commits_are_not_compared():
    def row(name, first, exchange, commit):
        return {
            "row": name,
            "length": 8,
            "first_token": [first],
            "exchange": [exchange],
            "commits": {"first_token": commit, "exchange": "b"},
        }

    results = {"dense 8": row("dense", 4.0, 0.5, "b"), "plan 8": row("plan", 2.0, 0.25, "b")}
    results["late 8"] = row("late", 1.0, 0.25, "a")
    compare(results, layers=1)
    assert results["plan 8"]["compared"]["speedup_over_dense"] == 2.0
    assert results["late 8"]["compared"] == {"exchange_of_dense": 0.5, "exchange_share": 0.25}


def test_tasks():
    assert set(TASKS) <= set(get_args(Task))
    assert {task for task in TASKS if ":" not in task} == set(ROWS)
