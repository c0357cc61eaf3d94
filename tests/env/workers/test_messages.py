"""Tests of env/workers/messages.py."""

import socket
import threading

import numpy as np
import pytest

from doubles.toys import Counter
from inchworm.core.errors import EnvError
from inchworm.env.episodes import Replay
from inchworm.env.restore import pack_tree, unpack_tree
from inchworm.env.source import make_vector_env
from inchworm.env.workers import messages
from inchworm.env.workers.messages import REPLAY, Message, pack, receive


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


@pytest.mark.parametrize("lanes", [1, 2])
def test_replays_arrive_as_they_were_sent(lanes):
    rng, agents = np.random.default_rng(0), () if lanes == 1 else (lanes,)
    jobs = [
        Replay(copy, 7 + copy, options, {"go": rng.integers(4, size=(n, *agents)), "push": rng.random((n, *agents, 2), np.float32)})
        for copy, n, options in ((0, 3, None), (2, 0, {"a": 1}), (5, 1, None))
    ]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(pack(REPLAY, *pack_tree(jobs)))
        message = receive(theirs)
        for job, sent in zip((Replay(*job) for job in unpack_tree(message.header, message.raw)), jobs, strict=True):
            assert (job.copy, job.seed, job.options) == (sent.copy, sent.seed, sent.options)
            for leaf, array in sent.actions.items():
                np.testing.assert_array_equal(job.actions[leaf], array, strict=True)


def test_a_factory_that_cannot_be_sent_is_explained():
    lock = threading.Lock()
    with pytest.raises(EnvError, match=r"cannot be sent to worker processes.*env\.num_workers=0"):
        make_vector_env(lambda: (lock, Counter())[1], 2, 2)
