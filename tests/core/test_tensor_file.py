"""The tensor file: equal bits back, and every kind of damage refused with one error."""

import errno
import hashlib
import json
import math
import os
import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from doubles.disk import failing, record_syncs
from inchworm.core import tensor_file as files
from inchworm.core.errors import ConfigError, CorruptFileError
from inchworm.core.tensor_file import (
    flatten_tree,
    json_pieces,
    make_directory,
    read_bytes,
    read_json,
    read_tensor_file,
    unflatten_tree,
    untrusted,
    write_atomically,
    write_tensor_file,
)

DTYPES = [bool, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64, np.float16, np.float32, np.float64]


def sample() -> dict[str, np.ndarray]:
    arrays = {np.dtype(dtype).name: np.arange(6).reshape(2, 3).astype(dtype) for dtype in DTYPES}
    arrays |= {
        "scalar": np.array(2**64 - 1, np.uint64),
        "none": np.zeros((0, 3), np.float32),
        "slice": np.arange(12.0).reshape(3, 4)[::2, ::-1],
    }
    arrays |= {"big endian": np.arange(3, dtype=">f8"), "nan": np.array([np.nan, -0.0, np.inf], np.float32), "ä/ö \"'\\": np.ones(1)}
    return arrays


def write(path, arrays=None, **changes):
    return write_tensor_file(
        path, sample() if arrays is None else arrays, **{"kind": "thing", "version": 1, "header": {"a": [1, None]}, **changes}
    )


def read(path, **changes):
    return read_tensor_file(path, **{"kind": "thing", "max_version": 1, **changes})


def test_round_trip(tmp_path):
    arrays, header = read(write(tmp_path / "x"))
    assert header == {"a": [1, None]}
    expected = sample()
    assert sorted(arrays) == sorted(expected)
    for name, array in expected.items():
        assert arrays[name].dtype == array.dtype.newbyteorder("=")
        assert arrays[name].shape == array.shape
        assert arrays[name].tobytes() == array.astype(array.dtype.newbyteorder("=")).tobytes()  # NaN and -0.0 too
    assert read(write(tmp_path / "empty", {})) == ({}, {"a": [1, None]})


def test_equal_content_makes_equal_bytes_that_others_read(tmp_path):
    backwards = dict(reversed(sample().items()))
    assert write(tmp_path / "x").read_bytes() == write(tmp_path / "y", backwards).read_bytes()
    np.testing.assert_array_equal(load_file(tmp_path / "x")["float32"], sample()["float32"])


def test_load_save_to_the_same_path_and_keep_using_what_was_loaded(tmp_path):
    path = write(tmp_path / "x")
    arrays, header = read(path)
    write_tensor_file(path, {name: np.zeros_like(array) for name, array in arrays.items()}, kind="thing", version=1, header=header)
    np.testing.assert_array_equal(arrays["int64"], sample()["int64"])  # not mapped: the file's new content does not shine through
    assert not read(path)[0]["int64"].any()


@pytest.mark.parametrize(
    "content, error, words",
    [
        ({"arrays": {"x": np.array([None])}}, TypeError, "object"),
        ({"arrays": {"x": np.array(["a"])}}, TypeError, "<U1"),
        ({"arrays": {"x": np.array([1j])}}, TypeError, "complex128"),
        ({"arrays": {"x": [1.0]}}, TypeError, "list"),
        ({"arrays": {"a\0b": np.ones(1)}}, TypeError, "NUL"),
        ({"arrays": {"\ud800": np.ones(1)}}, TypeError, "array name"),
        ({"arrays": {3: np.ones(1)}}, TypeError, "must be text"),
        ({"arrays": {"__metadata__": np.ones(1)}}, ValueError, "reserves that name"),
        ({"header": {"a": float("nan")}}, ValueError, "JSON"),
        ({"header": {"a": [[]] * 300_000}}, ValueError, "save in smaller pieces"),
    ],
)
def test_what_a_file_cannot_hold(tmp_path, content, error, words):
    with pytest.raises(error, match=words):
        write(tmp_path / "x", **content)
    assert list(tmp_path.iterdir()) == []


def test_wrong_kind_newer_version_and_missing_files(tmp_path):
    with pytest.raises(CorruptFileError, match="x cannot be read: it is a thing file, not a rollout file"):
        read(write(tmp_path / "x"), kind="rollout")
    with pytest.raises(CorruptFileError, match="version 3 of the thing format, and this inchworm reads up to version 2"):
        read(write(tmp_path / "x", version=3), max_version=2)
    assert read(write(tmp_path / "x", version=2), max_version=2)
    for missing, error in ((tmp_path / "nothing", FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(error):
            read(missing)


def test_a_safetensors_file_of_others_is_refused(tmp_path):
    save_file({"x": np.ones(3)}, tmp_path / "foreign", metadata={"format": "pt"})
    with pytest.raises(CorruptFileError, match="foreign"):
        read(tmp_path / "foreign")


def test_a_header_length_beyond_the_file_is_refused_before_anything_is_parsed(tmp_path):
    blob = write(tmp_path / "x").read_bytes()
    for length in (len(blob), 10**8, 2**63, 2**64 - 1):
        (tmp_path / "x").write_bytes(struct.pack("<Q", length) + blob[8:])
        with pytest.raises(CorruptFileError, match="too few for its header"):
            read(tmp_path / "x")


def signed(header: str, data: bytes = b"") -> bytes:
    """A file with a good checksum and any content, as an attacker could make it."""
    place = header.index("DIGEST")
    zeros = header.replace("DIGEST", "0" * 64)
    blob = struct.pack("<Q", len(zeros.encode())) + zeros.encode() + data
    digest = hashlib.sha256(blob).hexdigest().encode()
    at = 8 + len(header[:place].encode())
    return blob[:at] + digest + blob[at + 64 :]


def crafted(entry: dict | None = None, tensors: str = "", raw: str | None = None) -> str:
    text = raw or json.dumps({"sha256": "DIGEST", "format": "inchworm", "kind": "thing", "version": 1, "header": {}, **(entry or {})})
    return '{"__metadata__":{"inchworm":' + json.dumps(text) + "}" + tensors + "}"


def test_the_crafted_form_is_the_real_one(tmp_path):
    path, tensor = tmp_path / "x", ',"t":{"dtype":"BOOL","shape":[2],"data_offsets":[0,2]}'
    path.write_bytes(signed(crafted()))
    assert read(path) == ({}, {})
    path.write_bytes(signed(crafted(tensors=tensor), b"\x01\x00"))
    assert read(path)[0]["t"].tolist() == [True, False]
    path.write_bytes(signed(crafted(tensors=tensor), b"\x01\x07"))
    with pytest.raises(CorruptFileError, match="t holds a byte that is neither true nor false"):
        read(path)


HOSTILE = {
    "doubled key in the entry": crafted(raw='{"sha256": "DIGEST", "kind": "thing", "kind": "thing", "version": 1, "header": {}}'),
    "doubled tensor": crafted(tensors=',"t":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' * 2),
    "nan": crafted(raw='{"sha256": "DIGEST", "kind": "thing", "version": 1, "header": {"a": NaN}}'),
    "no kind": crafted(raw='{"sha256": "DIGEST", "version": 1, "header": {}}'),
    "text version": crafted({"version": "1"}),
    "true as version": crafted({"version": True}),
    "version 0": crafted({"version": 0}),
    "list header": crafted({"header": []}),
    "deep": crafted(raw='{"sha256": "DIGEST", "x": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    "long number": crafted(raw='{"sha256": "DIGEST", "x": ' + "1" * 10_000 + "}"),
    "cut JSON": crafted()[:-1],
    "unknown dtype": crafted(tensors=',"t":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}'),
    "no dtype": crafted(tensors=',"t":{"shape":[1],"data_offsets":[0,2]}'),
    "tensor is text": crafted(tensors=',"t":"x"'),
    "offsets beyond": crafted(tensors=',"t":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}'),
    "overlap": crafted(tensors="".join(f',"{n}":{{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}' for n in "ab")),
    "huge shape": crafted(tensors=',"t":{"dtype":"F64","shape":[9223372036854775807,9],"data_offsets":[0,2]}'),
    "negative shape": crafted(tensors=',"t":{"dtype":"U8","shape":[-2],"data_offsets":[0,2]}'),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_with_a_good_checksum(tmp_path, case):
    data = b"\x00\x00" if "[0,2]" in HOSTILE[case] else b""  # what the offsets promise, so that nothing else is wrong
    (tmp_path / "x").write_bytes(signed(HOSTILE[case], data))
    with pytest.raises(CorruptFileError, match="x cannot be read"):
        read(tmp_path / "x")


def test_damage_at_every_byte_is_noticed(tmp_path):
    blob, path = write(tmp_path / "x", {"w": np.arange(1, 20, dtype=np.float32)}).read_bytes(), tmp_path / "x"
    damaged = [blob + b" "]
    for at in range(len(blob)):
        flipped = blob[:at] + bytes([blob[at] ^ (1 << at % 8)]) + blob[at + 1 :]
        damaged += [flipped, blob[:at]]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(CorruptFileError):
            read(path)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
@example(b"")
@example(b"\x01\x00\x00")
@example(b"a pickle or a poem, it does not matter which")
def test_arbitrary_bytes(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "arbitrary"
    path.write_bytes(content)
    with pytest.raises(CorruptFileError):
        read(path)


# writing
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    assert write_atomically(tmp_path / "x", "ä").read_bytes() == "ä".encode()
    assert write_atomically(str(tmp_path / "x"), (b"1", memoryview(b"2"))).read_bytes() == b"12"
    path = write_atomically(tmp_path / "deep" / "er" / "x", b"old")
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os if name == "fsync" else type(path), name, failing(errno.ENOSPC))
            with pytest.raises(OSError, match=r"\[Errno 28\] No space left on device: '.*/x'"):
                write_atomically(path, b"new")
        assert path.read_bytes() == b"old"
        assert [file.name for file in path.parent.iterdir()] == ["x"]


def test_the_order_of_syncs(tmp_path, monkeypatch):
    # Content reaches the disk before its name does, and the directory is synced after the rename.
    events = record_syncs(monkeypatch)
    write_atomically(tmp_path / "x", b"1")
    assert events[0].startswith(files.TEMPORARY)
    assert events[1:] == ["replace", tmp_path.name]


def test_a_safetensors_that_orders_its_header_otherwise_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "save", lambda arrays, metadata: b"\x02" + bytes(7) + b"{}")
    with pytest.raises(RuntimeError, match="safetensors"):
        write(tmp_path / "x")


# irregular files and files that are too large
def test_pipes_and_devices_are_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name in ("pipe", "endless"):
        with pytest.raises(CorruptFileError, match=f"{name} is not a regular file"):
            read(tmp_path / name)


def test_a_limit_is_the_most_that_is_read(tmp_path):
    (tmp_path / "x").write_bytes(b"12345")
    assert read_bytes(tmp_path / "x", limit=5) == b"12345"
    with pytest.raises(CorruptFileError, match="x has 5 bytes, more than the limit of 4"):
        read_bytes(tmp_path / "x", limit=4)


def test_json_of_too_many_values_is_not_read():
    text = '{"a":[' + "[]," * 300_000 + "[]]}"  # 300,000 commas, as many brackets, and a few
    assert json_pieces(text) == 600_003
    with pytest.raises(ValueError, match="more than 500,000 values"):
        read_json(text)


WRONG_DATA = [KeyError("k"), IndexError(), TypeError(), AttributeError(), OverflowError(), AssertionError(), RecursionError()]


@pytest.mark.parametrize("error", [*WRONG_DATA, ConfigError("set it"), OSError("disk")])
def test_wrong_data_is_one_error_unless_it_is_to_be_kept_or_of_the_machine(error):
    kind, message = (CorruptFileError, f"the file x: {type(error).__name__}") if error in WRONG_DATA else (type(error), f"^{error}$")
    with pytest.raises(kind, match=message), untrusted("the file x", keep=(ConfigError,)):
        raise error


def test_new_directories_are_synced_in_those_above_them(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("inchworm.core.tensor_file.sync_directory", lambda path: synced.append(path))
    make_directory(tmp_path / "a" / "b")
    assert set(synced) == {tmp_path, tmp_path / "a"}
    synced.clear()
    make_directory(tmp_path / "a" / "b")
    assert not synced


def round_trip(tree):
    arrays, structure = flatten_tree(tree)
    return unflatten_tree(arrays, json.loads(json.dumps(structure, allow_nan=False)))


def test_everything_comes_back_as_it_was():
    tree = {"a": (1, [2.5, None], ()), "b": {"x": np.arange(3), "y": {}}, "c": True, "d": "ü", "e": -0.0, "f": 2**80, "g": []}
    back = round_trip(tree)
    np.testing.assert_array_equal(back["b"].pop("x"), tree["b"].pop("x"))
    assert back == tree
    assert list(back) == list(tree)  # the order of keys too
    assert isinstance(back["a"], tuple)
    assert isinstance(back["a"][1], list)
    assert back["c"] is True
    assert math.copysign(1, back["e"]) == -1


def test_numbers_that_json_lacks():
    back = round_trip([float("nan"), float("inf"), float("-inf"), np.float32(0.1), np.int64(3), np.bool_(True)])
    assert math.isnan(back[0])
    assert back[1:] == [math.inf, -math.inf, float(np.float32(0.1)), 3, True]
    assert type(back[4]) is int
    assert type(back[5]) is bool


def test_names_are_paths_and_never_collide():
    one, two, three = np.ones(1), np.ones(2), np.ones(3)
    arrays, structure = flatten_tree({"a/b": one, "a": {"b": two}, "__metadata__": three})
    assert {name: len(array) for name, array in arrays.items()} == {"a/b": 1, "a/b'": 2, "__metadata__'": 3}
    back = unflatten_tree(arrays, structure)
    assert (len(back["a/b"]), len(back["a"]["b"]), len(back["__metadata__"])) == (1, 2, 3)
    assert list(flatten_tree(one)[0]) == ["array"]
    assert list(flatten_tree({"x": (one, [two])})[0]) == ["x/0", "x/1/0"]


plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
)
keys = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5)
trees = st.recursive(plain, lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(keys, inner), max_leaves=15)


@given(trees)
def test_any_plain_tree(tree):
    assert round_trip(tree) == tree


@pytest.mark.parametrize(
    "tree, words",
    [({1: 2}, "must be text"), ({"a": {"b\0": 1}}, "key of a"), ({"x": [object()]}, "x/0 is object"), ({1.5}, "the tree is set")],
)
def test_trees_that_a_file_cannot_hold(tree, words):
    with pytest.raises(TypeError, match=words):
        flatten_tree(tree)


@pytest.mark.parametrize(
    "structure, words",
    [
        *((broken, "structure does not fit") for broken in ({"array": "y"}, {"what": 1}, {"dict": 3}, {"dict": {}, "list": []}, {}, [])),
        *(({kind: content}, "structure does not fit") for kind, content in (("list", 3), ("float", "x"), ("float", None), ("array", []))),
        ({"float": 10**400}, "OverflowError"),
        ({"list": []}, r"does not name the arrays \['x'\]"),  # every array is used exactly once
        ({"list": [{"array": "x"}, {"array": "x"}]}, "structure does not fit"),
    ],
)
def test_broken_structures(structure, words):
    with pytest.raises(CorruptFileError, match=words):
        unflatten_tree({"x": np.ones(1)}, structure)
