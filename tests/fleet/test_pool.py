"""Work goes to free nodes, and outlives those that die."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tasks.fleet.pool import NodeDied, NoNodes, Pool


def test_work_is_spread_over_the_nodes_and_never_more_than_the_slots() -> None:
    pool = Pool(["a", "b"], slots=2)
    lock, now, most = threading.Lock(), {"a": 0, "b": 0}, {"a": 0, "b": 0}
    full = threading.Barrier(4)  # four pieces of work at a time, or nobody goes on

    def work(node: str) -> str:
        with lock:
            now[node] += 1
            most[node] = max(most[node], now[node])
        full.wait(30)
        with lock:
            now[node] -= 1
        return node

    with ThreadPoolExecutor(8) as threads:
        done = list(threads.map(lambda _: pool.run(work), range(16)))
    assert sorted(done) == ["a"] * 8 + ["b"] * 8
    assert most == {"a": 2, "b": 2}


def test_what_a_dead_node_was_doing_goes_to_another_after_it_was_buried() -> None:
    log: list[str] = []
    pool = Pool(["a", "b"], slots=2, bury=lambda node: log.append(f"bury {node}"))
    full, begun = threading.Barrier(4), set()

    def work(item: int) -> str:
        def on(node: str) -> str:
            if item not in begun:
                begun.add(item)
                full.wait(30)  # two pieces of work are on each node when one of them dies
            if node == "a":
                raise NodeDied("killed")
            log.append(f"{item} on {node}")
            return node

        return pool.run(on)

    with ThreadPoolExecutor(4) as threads:
        done = list(threads.map(work, range(4)))
    assert done == ["b"] * 4
    assert log.count("bury a") == 1
    assert pool.alive == ["b"]
    assert sorted(line for line in log if line.endswith("on b")) == [f"{i} on b" for i in range(4)]


def test_work_that_kills_every_node_is_given_up() -> None:
    pool, tried = Pool(["a", "b", "c"], slots=1, attempts=2), []

    def work(node: str) -> None:
        tried.append(node)
        raise NodeDied("poison")

    with pytest.raises(NodeDied, match="poison"):
        pool.run(work)
    assert len(tried) == 2
    assert len(pool.alive) == 1


def test_without_nodes_there_is_no_waiting() -> None:
    pool = Pool(["a"], slots=1, attempts=5)

    def die(node: str) -> None:
        raise NodeDied("gone")

    with pytest.raises(NoNodes, match="what is committed stays"):
        pool.run(die)


def test_an_error_of_the_work_is_not_the_node_s() -> None:
    pool = Pool(["a"], slots=1)
    with pytest.raises(ZeroDivisionError):
        pool.run(lambda node: 1 // 0)
    assert pool.run(lambda node: node) == "a"
