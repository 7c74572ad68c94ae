"""Signals and limits ask a run to stop, also while its main thread is blocked outside of Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from pdmpi.slurm.signals import StopRequest


def until(condition, timeout_s: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(condition())


def test_a_signal_is_noted_and_handlers_are_put_back():
    before = signal.getsignal(signal.SIGUSR1)
    told: list[str] = []
    with StopRequest(["USR1", "TERM"], notice=told.append) as stop:
        assert stop.reason() == ""
        os.kill(os.getpid(), signal.SIGUSR1)
        assert until(lambda: stop.reason() == "SIGUSR1")
        os.kill(os.getpid(), signal.SIGTERM)
        assert until(lambda: len(told) == 2)
        assert stop.reason() == "SIGUSR1"
    assert told == ["received SIGUSR1", "received SIGTERM again"]
    assert signal.getsignal(signal.SIGUSR1) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_other_signals_are_not_taken_for_ours():
    previous = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        with StopRequest(["USR1"]) as stop:
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(0.05)
            assert stop.reason() == ""
    finally:
        signal.signal(signal.SIGUSR2, previous)


BLOCKED = """
import ctypes, os, signal, sys, threading
from pdmpi.slurm.signals import StopRequest
signal.alarm(120)  # a signal that nobody sees ends the test
libc = ctypes.CDLL(None)
barrier = ctypes.create_string_buffer(64)  # signals do not interrupt a wait at it, as little as MPI's
libc.pthread_barrier_init(barrier, None, 2)

def release():
    sys.stdin.readline()
    libc.pthread_barrier_wait(barrier)

with StopRequest(["USR1"], notice=lambda line: os.write(1, (line + "\\n").encode())) as stop:
    threading.Thread(target=release).start()
    os.write(1, b"ready\\n")
    libc.pthread_barrier_wait(barrier)
    os.write(1, f"back {stop.reason()}\\n".encode())
"""


def test_it_is_seen_while_the_main_thread_is_blocked_in_c():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", BLOCKED], **pipes) as child:
        assert child.stdout.readline() == b"ready\n"
        time.sleep(0.3)
        child.send_signal(signal.SIGUSR1)
        assert child.stdout.readline() == b"received SIGUSR1\n"
        assert child.communicate(b"go\n")[0] == b"back SIGUSR1\n"


def test_a_forked_child_gets_its_signals_back():
    with StopRequest(["TERM"]) as stop:
        ready, started = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(started, b"x")
            time.sleep(30)
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert stop.reason() == ""


def test_the_time_limit_is_a_reason_early_enough():
    with StopRequest([], deadline_unix_s=time.time() + 100, margin_s=60) as stop:
        assert stop.reason(needed_s=30) == ""
        assert stop.reason(needed_s=45).startswith("the job's time limit is ")
