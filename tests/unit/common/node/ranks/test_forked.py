"""Ranks forked from their node's process: they wait, run as they are told, and end with it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, signal, subprocess, sys, time
from common.node.ranks.forked import ForkedRank

def run(fields, rank, leader):
    os.write(1, f"{fields} {rank} {leader} {os.getppid() == parent}\\n".encode())
    if rank == 2:
        sys.exit("no such layout")
    if rank == 3:
        raise ValueError("it broke")
    if rank > 3:
        time.sleep(60)

parent = os.getpid()
forks = [ForkedRank(run) for _ in range(6)]
assert [fork.poll() for fork in forks] == [None] * 6, "they wait"
for rank, fork in enumerate(forks[:5], 1):
    fork.begin({"threads": 1}, rank, "tcp://leader")
print([fork.wait(30) for fork in forks[:3]])
try:
    forks[3].wait(0.0)
except subprocess.TimeoutExpired:
    print("runs")
forks[3].terminate()
forks[4].kill()
print(forks[3].wait(30), forks[4].wait(), forks[4].poll())
forks[4].terminate()
sys.stdout.flush()
os._exit(0)
"""


def test_forked_ranks_run_as_told_and_die_with_their_node() -> None:
    # Output is read to its end: that comes when the last of them, which nobody told anything, is gone too.
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    for rank in range(1, 4):
        assert f"{{'threads': 1}} {rank} tcp://leader True" in told
    assert [line for line in told if "{" not in line][:3] == ["[0, 1, 1]", "runs", "-15 -9 -9"]
    assert "no such layout" in done.stderr
    assert "ValueError: it broke" in done.stderr


RACE = """
import os, threading, time
from common.node.ranks.forked import ForkedRank

fork = ForkedRank(lambda *_: None)
fork.begin({}, 1, "tcp://leader")
waitpid, asked, failed = os.waitpid, threading.Event(), []

def slow(pid, options):
    answer = waitpid(pid, options)
    asked.set()
    time.sleep(0.2 if answer[0] else 0.0)  # the child is gone, and nobody has noted it yet
    return answer

def look():
    try:
        fork.wait(30)
    except BaseException as error:
        failed.append(error)

os.waitid(os.P_PID, fork.pid, os.WEXITED | os.WNOWAIT)
os.waitpid = slow
threads = [threading.Thread(target=look) for _ in range(2)]
threads[0].start()
asked.wait(30)
threads[1].start()
fork.terminate()
for thread in threads:
    thread.join()
print(failed, fork.returncode)
"""


def test_two_threads_may_see_a_rank_end() -> None:
    """While a start is stopped: the one that waits for the ranks' reports, and the one that ends them."""
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "[] 0\n", done.stderr


KILLED = """
import os, signal
from common.node.ranks.forked import ForkedRank

fork = ForkedRank(lambda *_: None)
os.kill(fork.pid, signal.SIGKILL)
os.waitid(os.P_PID, fork.pid, os.WEXITED | os.WNOWAIT)
fork.begin({}, 1, "tcp://leader")
print(fork.poll())
"""


def test_a_rank_that_was_killed_before_it_was_told_anything_has_an_exit_code() -> None:
    """Where memory runs out, for example. Its node ended with a traceback about a broken pipe."""
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("-9\n", "")


STOPPED = """
import os, signal, time
from common.node.ranks.forked import ForkedRank

def run(fields, rank, leader):
    print("runs", flush=True)
    time.sleep(1)

forks = [ForkedRank(run) for _ in range(2)]
signal.signal(signal.SIGINT, lambda *_: None)
signal.signal(signal.SIGHUP, lambda *_: None)
forks[0].begin({}, 1, "tcp://leader")
time.sleep(0.2)
os.killpg(0, signal.SIGINT)
os.killpg(0, signal.SIGHUP)
print(forks[0].wait(30), forks[1].poll())
"""


def test_ctrl_c_and_the_end_of_the_terminal_are_left_to_the_leader() -> None:
    """Each rank showed a traceback, and its node could take it for lost before it had told anyone that it ends."""
    done = subprocess.run(
        [sys.executable, "-c", STOPPED], capture_output=True, text=True, timeout=60, check=False, start_new_session=True
    )
    assert (done.stdout, done.stderr) == ("runs\n0 None\n", "")
