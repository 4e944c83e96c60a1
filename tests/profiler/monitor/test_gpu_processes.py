from collections.abc import Callable
from pathlib import Path

import pytest

from lucid_profiler.monitor.gpu_processes import GpuProcess, Shares, share_out

MIB = 2**20
HOST, CONTAINER, OTHER_CONTAINER = "pid:[4026531836]", "pid:[4026532001]", "pid:[4026532002]"
Add = Callable[..., None]


@pytest.fixture
def add(tmp_path: Path) -> Add:
    """Give a function that adds a process to a process file system at `tmp_path`."""

    def add_process(pid: int | str, *ids: int, namespace: str = HOST, files: tuple[str, ...] = ()) -> None:
        folder = tmp_path / str(pid)
        (folder / "ns").mkdir(parents=True)
        (folder / "fd").mkdir()
        (folder / "ns" / "pid").symlink_to(namespace)
        for number, file in enumerate(files):
            (folder / "fd" / str(number)).symlink_to(file)
        line = "\t".join(str(number) for number in ids or (pid,))
        (folder / "status").write_text(f"Name:\tpython\nNSpid:\t{line}\nThreads:\t1\n")

    return add_process


def share(proc: Path, pids: set[int], *listed: tuple[int, int | None], used_mib: int | None = None) -> Shares:
    """Share out a list of pids and MiB."""
    processes = [GpuProcess(pid=pid, used_bytes=None if mib is None else mib * MIB) for pid, mib in listed]
    return share_out(processes, pids, used_bytes=None if used_mib is None else used_mib * MIB, proc=proc)


def test_the_targets_processes_are_told_from_others(tmp_path: Path, add: Add) -> None:
    """Memory of the target's processes is added up, that of others apart."""
    add("self")
    for pid in (10, 11, 20):
        add(pid)
    shares = share(tmp_path, {10, 11, 12}, (10, 100), (20, 30), (11, 50))
    assert (shares.process.value, shares.others.value) == (150 * MIB, 30 * MIB)
    assert (shares.num_others, shares.num_unknown, shares.match) == (1, 0, "pid")


def test_a_process_is_asked_about_before_it_counts_as_another_s(tmp_path: Path, add: Add) -> None:
    """Only one that runs here and is not known yet."""
    add("self")
    for pid in (10, 11, 20):
        add(pid)
    asked = []

    def is_member(pid: int) -> bool:
        asked.append(pid)
        return pid == 11

    listed = [GpuProcess(pid=pid, used_bytes=pid * MIB) for pid in (10, 11, 20, 645_400)]
    shares = share_out(listed, {10}, is_member=is_member, proc=tmp_path)
    assert (shares.process.value, shares.others.value) == (21 * MIB, (20 + 645_400) * MIB)
    assert (shares.num_others, shares.num_unknown, asked) == (1, 1, [11, 20])


def test_a_process_that_has_ended_hides_no_other(tmp_path: Path, add: Add) -> None:
    """Of three entries the middle one is dead and the last one ours: ours is found."""
    add("self")
    add(20)
    add(10)
    shares = share(tmp_path, {10}, (20, 30), (15, 40), (10, 100))
    assert (shares.process.value, shares.num_others, shares.num_unknown) == (100 * MIB, 1, 1)


@pytest.mark.parametrize("namespace", [HOST, CONTAINER])
def test_foreign_pids_give_no_number(tmp_path: Path, add: Add, namespace: str) -> None:
    """A list of pids that do not exist here is never taken for the target's."""
    add("self", namespace=namespace)
    add(10)
    shares = share(tmp_path, {10}, (645_400, 900), (645_500, 100))
    assert (shares.process.value, shares.process.reason) == (None, "pid_namespace")
    assert (shares.others.value, shares.others.reason) == (None, "pid_namespace")
    assert (shares.num_others, shares.num_unknown, shares.match) == (0, 2, None)


def test_a_single_foreign_pid_is_not_the_targets_unless_it_uses_cuda(tmp_path: Path, add: Add) -> None:
    """Being alone is no proof: the target must have CUDA open, and both must live in a container."""
    add("self", namespace=CONTAINER)
    add(10, files=("/dev/null",))
    assert share(tmp_path, {10}, (645_400, 900)).process.reason == "pid_namespace"


def test_the_only_process_is_the_target_in_a_container(tmp_path: Path, add: Add) -> None:
    """In a container a single foreign pid is the target that has CUDA open, and labelled as an estimate."""
    add("self", namespace=CONTAINER)
    add(10, files=("/dev/null", "/dev/nvidia-uvm"))
    shares = share(tmp_path, {10}, (645_400, 900))
    assert (shares.process.value, shares.others.value, shares.match) == (900 * MIB, 0, "only_process")
    assert (shares.num_others, shares.num_unknown) == (0, 0)


def test_on_the_host_a_single_foreign_pid_is_no_target(tmp_path: Path, add: Add) -> None:
    """On the host the driver would give the target its own pid."""
    add("self", namespace=HOST)
    add(10, files=("/dev/nvidia-uvm",))
    assert share(tmp_path, {10}, (645_400, 900)).match is None


def test_the_target_is_known_by_its_name_in_the_container(tmp_path: Path, add: Add) -> None:
    """Seen from the host the target is 5000 and 7 inside; a list that says 7 means it when there is no 7 here."""
    add("self")
    add(5000, 5000, 7, namespace=CONTAINER)
    shares = share(tmp_path, {5000}, (7, 100))
    assert (shares.process.value, shares.match) == (100 * MIB, "namespace")


def test_a_process_of_the_same_number_is_not_the_target(tmp_path: Path, add: Add) -> None:
    """Where there is a 7 here, it is that process and not the target's inner name."""
    add("self")
    add(7)
    add(5000, 5000, 7, namespace=CONTAINER)
    shares = share(tmp_path, {5000}, (7, 100))
    assert (shares.process.value, shares.others.value) == (None, 100 * MIB)


def test_host_pids_are_followed_where_the_hosts_proc_is_mounted(tmp_path: Path, add: Add) -> None:
    """With the host's process files a host pid leads to the target inside, and to no other container's pid 7."""
    add("self", namespace=CONTAINER)
    add(5000, 5000, 7, namespace=CONTAINER)
    add(6000, 6000, 7, namespace=OTHER_CONTAINER)
    shares = share(tmp_path, {7}, (5000, 100), (6000, 30))
    assert (shares.process.value, shares.others.value, shares.match) == (100 * MIB, 30 * MIB, "namespace")


def test_an_empty_list_is_not_zero_bytes(tmp_path: Path) -> None:
    """The driver lists nothing for the target: that is not known to be no memory."""
    shares = share(tmp_path, {10})
    assert (shares.process.value, shares.process.reason, shares.others.value) == (None, "not_found", 0)


@pytest.mark.parametrize("pid", [2**32 - 1, 4_294_967_294, 1_819_043_144, 2**22 + 1, -1])
def test_an_impossible_pid_makes_the_list_suspect(tmp_path: Path, add: Add, pid: int) -> None:
    """A scrambled entry means that the others were read at wrong places too."""
    add(10)
    shares = share(tmp_path, {10}, (10, 100), (pid, 100))
    assert {reading.reason for reading in shares.readings()} == {"abi_suspect"}
    assert {reading.value for reading in shares.readings()} == {None}


def test_a_pid_in_the_place_of_the_bytes_makes_the_list_suspect(tmp_path: Path, add: Add) -> None:
    """Pid 0 with a handful of bytes is an entry that was read at a shifted place."""
    add(10)
    shares = share_out([GpuProcess(pid=0, used_bytes=4711)], {10}, proc=tmp_path)
    assert shares.process.reason == "abi_suspect"


def test_a_hidden_pid_is_an_unknown_process(tmp_path: Path, add: Add) -> None:
    """Drivers give pid 0 to processes of other containers; ours is found beside them."""
    add(10)
    shares = share(tmp_path, {10}, (0, 500), (10, 100))
    assert (shares.process.value, shares.num_unknown) == (100 * MIB, 1)
    assert share(tmp_path, {10}, (0, 500)).process.reason == "pid_namespace"


def test_shares_far_above_the_used_memory_are_not_believed(tmp_path: Path, add: Add) -> None:
    """The sum may exceed what is in use a little, since the two are read one after the other, and not by far."""
    add(10)
    assert share(tmp_path, {10}, (10, 1_100), used_mib=1_000).process.value == 1_100 * MIB
    assert share(tmp_path, {10}, (10, 3_000), used_mib=1_000).process.reason == "implausible"


def test_bytes_that_the_driver_withholds_are_none(tmp_path: Path, add: Add) -> None:
    """One unknown share of the target makes the target's sum unknown and leaves the others' alone."""
    for pid in (10, 11, 20):
        add(pid)
    shares = share(tmp_path, {10, 11}, (10, None), (11, 50), (20, 30))
    assert (shares.process.reason, shares.others.value) == ("not_supported", 30 * MIB)


def test_a_live_process_without_memory_is_not_believed(tmp_path: Path, add: Add) -> None:
    """A process on the GPU has a context there: 0 bytes mean that the driver did not look."""
    add(10)
    assert share(tmp_path, {10}, (10, 0)).process.reason == "implausible"


def test_processes_that_cannot_be_looked_into_are_others(tmp_path: Path) -> None:
    """Without permission, or with an unreadable line, a process is another one."""
    (tmp_path / "20").mkdir()
    (tmp_path / "21").mkdir()
    (tmp_path / "21" / "status").write_text("NSpid:\tx y\n")
    shares = share(tmp_path, {10}, (20, 30), (21, 30))
    assert (shares.process.reason, shares.others.value, shares.num_others) == ("not_found", 60 * MIB, 2)
