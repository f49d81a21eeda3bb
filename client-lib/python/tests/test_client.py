"""What the daemon is asked for, and what it refuses."""

import gc
import os
import pickle
import signal
import threading
import time

import pytest

import lapis


def test_bytes_survive_eviction(client):
    page = client.page_size
    size = client.mapped_pages_max * page * 2
    memory = client.allocate(size)
    for start in range(0, size, page):
        with memory.map(start, start + page, "overwrite") as mapping:
            mapping[0].copy_from(bytes([start // page % 251]) * page)
    for start in range(0, size, page):
        with memory.map(start, start + page) as mapping:
            assert mapping[0].tobytes() == bytes([start // page % 251]) * page
            assert mapping.stats["pages"] == 1
    assert memory.size == size and memory.id > 0
    memory.free()


def test_a_mapping_of_several_ranges(client):
    with client.allocate(200000) as one, client.allocate(100) as other:
        with client.map([(one, 10, 20), other, (one, 150000, 150001)], "write") as mapping:
            assert [tensor.nbytes for tensor in mapping.values()] == [10, 100, 1]
            assert mapping[-1].shape == (1,) and mapping.keys() == [None] * 3
            assert not mapping[0].readonly and mapping[0].dtype == "U8"
            with pytest.raises(IndexError, match="range 3 of a mapping that has 3"):
                mapping[3]
            with pytest.raises(IndexError):
                mapping[-4]
            with pytest.raises(KeyError):
                mapping["weight"]
        assert mapping.closed


def test_what_is_said_beside_mapping(client):
    with client.allocate(200000) as memory:
        client.prefetch([memory, (memory, 0, 10)], priority=1, within=0.5)
        client.cancel_prefetch(memory)
        client.advise((memory, 0, 70000), "keep")
        client.flush(memory, wait=10)
        with client.plan([(memory, 0, 10), ([(memory, 0, 10), (memory, 100, 200)], "write")]):
            pass
        recording = client.record()
        memory.map(0, 10).unmap()
        plan = recording.plan()
        plan.end()
        plan.end()
        with pytest.raises(lapis.Closed):
            recording.plan()
        client.record().end()


def test_a_file(client, model_path):
    content = model_path.read_bytes()
    with client.open_path(model_path, 777) as rest, model_path.open("rb") as file:
        with client.open_file(file, 5, 10000) as part:
            with client.map([(rest, 3, 1003), part]) as mapping:
                assert mapping[0].tobytes() == content[780:1780]
                assert mapping[1].tobytes() == content[5:10005]
                with pytest.raises(lapis.ReadOnly):
                    mapping[0].copy_from(b"x")
        with pytest.raises(lapis.ReadOnly):
            rest.map(0, 1, "write")
        assert rest.size == len(content) - 777


def test_each_refusal_has_its_class_and_numbers(client):
    with pytest.raises(lapis.BadRequest) as caught:
        client.allocate(0)
    assert isinstance(caught.value, (lapis.Refused, ValueError))
    with pytest.raises(MemoryError) as caught:
        client.allocate(1 << 36)
    assert type(caught.value) is lapis.OutOfMemory and caught.value.retryable and caught.value.limit > 0
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.limit) == (str(caught.value), caught.value.limit)
    with pytest.raises(lapis.TooMany):
        client.allocate(1 << 50)
    with pytest.raises(OverflowError):
        client.allocate(1 << 64)
    with pytest.raises(OverflowError):
        client.allocate(-1)
    with pytest.raises(TypeError):
        client.allocate(None)
    with client.allocate(100) as memory:
        for start, stop in [(0, 101), (50, 20), (0, 2**64 - 1), (2**64 - 1, 2**64 - 1)]:
            with pytest.raises(lapis.OutOfRange, match="outside the allocation of 100 bytes"):
                memory.map(start, stop)
        with pytest.raises(ValueError, match='it can be "read", "write" or "overwrite"'):
            memory.map(access="rw")
        for wait in [-1, float("nan")]:
            with pytest.raises(ValueError, match="wait is"):
                memory.map(wait=wait)
        with pytest.raises(ValueError, match="advice is 'x'|advice is \"x\""):
            client.advise(memory, "x")
        with pytest.raises(TypeError, match="a range is an Allocation"):
            client.map([None])
        with pytest.raises(TypeError):
            client.map(None)
        with memory.map(access="write", wait=float("inf")):
            with pytest.raises(lapis.Conflict) as caught:
                memory.map()
            assert caught.value.retryable
            with pytest.raises(lapis.InUse):
                client.flush(memory)
        with lapis.Client() as other, pytest.raises(lapis.Foreign):
            other.map(memory)
    with pytest.raises(lapis.OpenFailed):
        client.open_path("/nowhere")
    with pytest.raises(lapis.NotAFile):
        client.open_path("/dev/zero", 0, 10)
    for descriptor in [-1, 12345]:
        with pytest.raises(OSError, match="Bad file descriptor"):
            client.open_file(descriptor, 0, 10)
    with pytest.raises(lapis.ModelFailed):
        client.open_model("/")
    with pytest.raises(ConnectionError, match="/nowhere/s") as caught:
        lapis.Client("/nowhere/s")
    assert type(caught.value) is lapis.ConnectFailed


def test_what_is_closed_says_so():
    client = lapis.Client()
    memory = client.allocate(100)
    client.close()
    client.close()
    with pytest.raises(lapis.Closed, match="the client is closed"):
        client.allocate(1)
    mapping = memory.map(access="write")
    tensor = mapping[0]
    memory.free()
    memory.free()
    with pytest.raises(lapis.Closed, match="the allocation is closed"):
        memory.map()
    tensor.copy_from(b"still")
    mapping.unmap()
    mapping.unmap()
    for use in [tensor.tobytes, tensor.numpy, tensor.raw, lambda: memoryview(tensor), lambda: tensor.copy_from(b"x")]:
        with pytest.raises(lapis.Closed, match="the mapping is closed"):
            use()
    with pytest.raises(lapis.Closed):
        mapping[0]
    assert "unmapped" in repr(tensor)


def test_the_interpreter_runs_while_a_map_waits(client):
    size = client.mapped_pages_max * client.page_size
    with client.allocate(size) as all_of_it, client.allocate(10) as little:
        holding = all_of_it.map()
        threading.Timer(0.3, holding.unmap).start()
        started = time.monotonic()
        with little.map(wait=30) as mapping:
            assert 0.2 < time.monotonic() - started < 20
            assert mapping.stats["waited"] > 0.1
        with all_of_it.map():
            with pytest.raises(TimeoutError) as caught:
                little.map(wait=0.01)
            assert type(caught.value) is lapis.TimedOut


def test_many_threads(client):
    memory = client.allocate(64 * client.page_size)
    failures = []

    def work(number):
        try:
            start = number * client.page_size
            for turn in range(50):
                with memory.map(start, start + 100, "write") as mapping:
                    mapping[0].copy_from(bytes([turn]) * 100)
                with memory.map(start, start + 100) as mapping:
                    assert mapping[0].tobytes() == bytes([turn]) * 100
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    memory.free()


def test_a_fork_has_nothing_of_its_parents(client):
    memory = client.allocate(100)
    mapping = memory.map(access="write")
    mapping[0].copy_from(b"parent")
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for use in [client.stats, lambda: memory.map(), mapping[0].tobytes, lambda: client.allocate(1)]:
                with pytest.raises(lapis.Forked):
                    use()
            with lapis.Client() as own:
                # CUDA doesn't work in a child of a process that uses it.
                if own.device == "sim":
                    with own.allocate(10) as mine, mine.map():
                        pass
                status = 0
            del mapping, memory
            gc.collect()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert mapping[0].tobytes()[:6] == b"parent"
    mapping.unmap()
    memory.free()


def test_when_the_daemon_goes(daemon):
    client = lapis.Client(daemon.socket)
    memory = client.allocate(100)
    mapping = memory.map(access="write")
    mapping[0].copy_from(b"kept")
    daemon.send_signal(signal.SIGKILL)
    daemon.wait()
    with pytest.raises(lapis.Disconnected) as caught:
        client.stats()
    assert isinstance(caught.value, ConnectionError) and caught.value.retryable
    assert mapping[0].tobytes()[:4] == b"kept"
    with pytest.raises(lapis.Disconnected):
        mapping.unmap()
    assert mapping.closed
    with pytest.raises(lapis.Disconnected):
        memory.map()
    memory.free()
    client.close()


def test_a_hundred_thousand_maps_leak_nothing(client):
    def rss():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    def count(directory):
        return len(os.listdir(directory))

    with client.allocate(8 * client.page_size) as memory:

        def work(count):
            for number in range(count):
                start = number % 8 * client.page_size
                mapping = memory.map(start, start + 4096, "write" if number % 2 else "read")
                mapping[0].tobytes()
                if client.device == "sim":
                    memoryview(mapping[0]).release()
                mapping.unmap()

        work(2000)
        gc.collect()
        before, open_before = rss(), count("/proc/self/fd")
        work(int(os.environ.get("LAPIS_TEST_MAPS", "100000")))
        gc.collect()
        assert rss() < before + (2 << 20)
        assert count("/proc/self/fd") == open_before


def test_stubs_name_what_there_is():
    import ast
    import pathlib

    path = pathlib.Path(lapis.__file__).with_name("__init__.pyi")
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        real = getattr(lapis, node.name)
        documented = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        public = {name for name in vars(real) if not name.startswith("_")}
        assert public <= documented, node.name
        assert {name for name in documented if not name.startswith("__")} <= public, node.name
