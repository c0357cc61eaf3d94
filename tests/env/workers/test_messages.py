"""Tests of env/workers/messages.py."""

import socket
import threading

import pytest

from doubles.toys import Counter
from inchworm.core.errors import EnvError
from inchworm.env.source import make_vector_env
from inchworm.env.workers import messages
from inchworm.env.workers.messages import Message, pack, receive


def test_messages_survive_being_cut_into_pieces():
    ours, theirs = socket.socketpair()
    data = pack(messages.REPLAY, {"a": [1, "ż"]}, b"x" * 300_000)

    def trickle():
        for start in range(0, len(data), 70_001):
            ours.sendall(data[start : start + 70_001])

    thread = threading.Thread(target=trickle)
    thread.start()
    assert receive(theirs) == Message(messages.REPLAY, {"a": [1, "ż"]}, b"x" * 300_000)
    thread.join()
    ours.sendall(data[:50])
    ours.close()
    with pytest.raises(EOFError):
        receive(theirs)
    theirs.close()


def test_a_factory_that_cannot_be_sent_is_explained():
    lock = threading.Lock()
    with pytest.raises(EnvError, match=r"cannot be sent to worker processes.*env\.num_workers=0"):
        make_vector_env(lambda: (lock, Counter())[1], 2, 2)
