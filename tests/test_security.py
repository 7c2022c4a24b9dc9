"""feedline does not trust files: it runs no code in them, opens no file that they name, and checks their sizes."""

import ast
import io
import json
import os
import pickle
import struct
import sys
import zlib
from pathlib import Path

import cv2
import h5py
import jax
import numpy as np
import programs
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
from launched import launched
from PIL import Image
from rows_read import read_rows
from tar_files import write_tar

import feedline
from feedline._src.files.cache import Cache
from feedline._src.files.cached_range import CachedRange
from feedline._src.files.client import RemoteObject
from feedline._src.files.file import Version
from feedline._src.files.store import Url
from feedline._src.formats import table
from feedline._src.image_limits import check_image
from feedline._src.images import ImageDecoder
from feedline._src.sources.decoded import Row

PACKAGE = Path(feedline.__file__).parent
REFUSED = (ValueError, TypeError, feedline.FeedError)
ROWS = np.arange(8, dtype=np.int32)


# --- no code in what is read ---

FORBIDDEN = ("pickle.find_class", "os.system", "subprocess.Popen", "exec.marshal")
seen = []
listening = False


def _audit(event, arguments):
    if listening and event in FORBIDDEN:
        seen.append((event, arguments))


@pytest.fixture
def audited():
    """Python's audit events when something is unpickled or started."""
    global listening
    if _audit not in getattr(sys, "_feedline_audits", []):
        sys.addaudithook(_audit)
        sys._feedline_audits = [_audit]
    seen.clear()
    listening = True
    yield seen
    listening = False


class Planted:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def payload(tmp_path):
    return pickle.dumps(Planted(tmp_path / "ran"))


def open_and_read(path, **options):
    source = feedline.open_source(path, **options)
    _ = source.identity
    return read_rows(source)


def test_the_audit_sees_what_is_unpickled(audited, payload, tmp_path):
    pickle.loads(payload)
    assert (tmp_path / "ran").exists()
    assert audited[0][0] == "pickle.find_class"


class Bytes:
    """An object that loads the payload when it is unpickled."""

    def __init__(self, payload):
        self.payload = payload

    def __reduce__(self):
        return pickle.loads, (self.payload,)


def objects(payload):
    return np.array([Bytes(payload)] * 8, object)


def extended(payload):
    """A table with the pickled extension type of old versions of pyarrow, and pickles in its metadata."""
    marks = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": payload}
    field = pyarrow.field("x", pyarrow.int32(), metadata=marks)
    metadata = {b"pandas": payload, b"huggingface": payload}
    return pyarrow.table([ROWS], schema=pyarrow.schema([field], metadata=metadata))


def hdf5(path, payload):
    with h5py.File(path, "w") as file:
        file["x"] = np.array([np.void(payload)] * 2)
        file["x"].attrs["FLAVOR"] = np.void(payload)
        file.attrs["pickled"] = np.void(payload)  # as PyTables keeps Python objects


def zarr_2(path, payload):
    path.mkdir()
    metadata = {"zarr_format": 2, "shape": [8], "chunks": [8], "dtype": "|O", "compressor": None,
                "fill_value": None, "order": "C", "filters": [{"id": "pickle", "protocol": 5}]}  # fmt: skip
    (path / ".zarray").write_text(json.dumps(metadata))
    (path / ".zattrs").write_text(json.dumps({"pickled": payload.decode("latin1")}))
    (path / "0").write_bytes(payload)


def zarr_3(path, payload):
    path.mkdir()
    codecs = [{"name": "numcodecs.pickle", "configuration": {"protocol": 5}}]
    metadata = {"zarr_format": 3, "node_type": "array", "shape": [8], "data_type": "int32", "fill_value": 0,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [8]}},
                "chunk_key_encoding": {"name": "default"}, "codecs": codecs}  # fmt: skip
    (path / "zarr.json").write_text(json.dumps(metadata))
    (path / "c").mkdir()
    (path / "c" / "0").write_bytes(payload)


@pytest.mark.parametrize(
    ("name", "write", "refused"),
    [
        ("x.npy", lambda path, data: np.save(path, objects(data), allow_pickle=True), True),
        ("x.npz", lambda path, data: np.savez(path, x=ROWS, y=objects(data)), True),
        ("x.arrow", lambda path, data: pyarrow.feather.write_feather(extended(data), path), False),
        ("x.parquet", lambda path, data: pyarrow.parquet.write_table(extended(data), path), False),
        ("x.h5", hdf5, False),
        ("two.zarr", zarr_2, True),
        ("three.zarr", zarr_3, True),
        ("x.tfrecord", lambda path, data: path.write_bytes(data), True),
        ("x.tar", lambda path, data: path.write_bytes(data), True),
        ("x.array_record", lambda path, data: path.write_bytes(data), True),
    ],
)
def test_no_pickle_in_a_file_is_loaded(audited, payload, tmp_path, name, write, refused):
    write(tmp_path / name, payload)
    if refused:
        with pytest.raises(REFUSED, match=name):
            open_and_read(tmp_path / name)
    else:
        open_and_read(tmp_path / name)
    assert audited == []
    assert not (tmp_path / "ran").exists()


def cached(folder, key, size):
    stored = RemoteObject(Url("s3://bucket", key), Version(size, "tag/../.."), 1.0)
    return CachedRange(Cache(str(folder), 1 << 20), stored, 0, size)


def test_no_pickle_in_an_index_a_cache_lanes_or_a_state_is_loaded(audited, payload, tmp_path):
    write_tar(tmp_path / "x.tar", [("0.x", b"a"), ("1.x", b"b")])
    index = tmp_path / ".x.tar.feedline-index"
    index.write_bytes(payload)
    assert open_and_read(tmp_path / "x.tar") == [{"x": b"a"}, {"x": b"b"}]
    assert index.read_bytes() != payload

    block = cached(tmp_path / "cache", "block", 100)
    block.write([0], bytes(100))
    Path(block.path).write_bytes(payload)
    assert block.read_all() is None

    lanes = tmp_path / "lanes"
    lanes.mkdir()
    (lanes / "lane-00000-of-00001.json").write_bytes(payload)
    with pytest.raises(ValueError, match="is not a file that save_lanes wrote"):
        feedline.load_lanes(lanes)

    with feedline.Feed({"x": ROWS}, 4, jax.devices()[0], prefetch=0) as feed:
        state = feed.get_state()
        for name in state:
            with pytest.raises((ValueError, TypeError)):
                feed.set_state({**state, name: payload})
    assert audited == []
    assert not (tmp_path / "ran").exists()


ALLOWED = {
    # our own worker processes: this process makes what they unpickle, and sends it over a pipe
    ("_src/tools/processes.py", "pickle.loads"),
    ("_src/loader/workers.py", "pickle.loads"),
    ("_src/sources/hugging_face.py", "pickle.loads"),
    # `feedline audit` and the processes that it starts, in a temporary folder that only this user can write
    ("_src/tools/audit/processes.py", "pickle.loads"),
}
DANGEROUS = {
    "eval", "exec", "os.system", "os.popen", "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load",
    "marshal.loads", "shelve.open", "yaml.load", "yaml.unsafe_load", "subprocess.getoutput", "tempfile.mktemp",
    "subprocess.getstatusoutput", "pyarrow.deserialize", "joblib.load", "dill.load", "dill.loads", "torch.load",
    "pandas.read_pickle",
}  # fmt: skip


def dangers_in(tree):
    """Calls that run code or a shell, by their names as the code writes them."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in DANGEROUS or name.endswith((".extractall", ".extract")):
            yield name
        for keyword in node.keywords:
            if keyword.arg in ("shell", "allow_pickle") and ast.unparse(keyword.value) != "False":
                yield f"{keyword.arg}={ast.unparse(keyword.value)}"


def test_no_shell_no_evaluation_and_no_pickle_but_between_our_own_processes():
    found = {
        (str(path.relative_to(PACKAGE)), name)
        for path in PACKAGE.rglob("*.py")
        for name in dangers_in(ast.parse(path.read_text()))
    }
    assert found == ALLOWED


# --- no other file ---


@pytest.fixture
def secret(tmp_path):
    """A file outside of the data's folder."""
    path = tmp_path / "outside" / "secret.h5"
    path.parent.mkdir()
    with h5py.File(path, "w") as file:
        file["x"] = np.full(8, 4242, np.int32)
    return path


def _external_link(file, secret):
    file["y"] = h5py.ExternalLink(str(secret), "/x")


def _soft_link_through_an_external_one(file, secret):
    file["out"] = h5py.ExternalLink(str(secret), "/")
    file["y"] = h5py.SoftLink("/out/x")


def _group_with_a_soft_link(file, secret):
    file["out"] = h5py.ExternalLink(str(secret), "/")
    file.create_group("g")["y"] = h5py.SoftLink("../g/z")
    file["g"]["z"] = h5py.SoftLink("/out/x")


def _external_storage(file, secret):
    file.create_dataset("y", (8,), np.int32, external=[(str(secret), 0, 32)])


def _virtual(file, secret):
    layout = h5py.VirtualLayout((8,), np.int32)
    layout[:] = h5py.VirtualSource(str(secret), "x", (8,))
    file.create_virtual_dataset("y", layout)


@pytest.mark.parametrize(
    ("link", "columns"),
    [
        (_external_link, ["y"]),
        (_soft_link_through_an_external_one, ["y"]),
        (_soft_link_through_an_external_one, ["out/x"]),
        (_group_with_a_soft_link, ["g"]),
        (_external_storage, ["y"]),
        (_virtual, ["y"]),
    ],
)
def test_an_hdf5_file_names_no_other_file(tmp_path, secret, link, columns):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["x"] = ROWS
        link(file, secret)
    for chosen in (columns, None):
        with pytest.raises(ValueError, match=r"x\.h5.*(links are not|must lie in the file|, got out/x)"):
            open_and_read(path, columns=chosen)


def files_below(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_an_index_is_not_written_through_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    write_tar(tmp_path / "x.tar", [("0.x", b"a")])
    (tmp_path / ".x.tar.feedline-index").symlink_to(victim)
    open_and_read(tmp_path / "x.tar")
    assert victim.read_text() == "mine"
    assert not (tmp_path / ".x.tar.feedline-index").is_symlink()


def test_an_index_with_right_checksums_cannot_name_bytes_outside_of_its_file(tmp_path):
    write_tar(tmp_path / "x.tar", [("0.x", b"a"), ("1.x", b"b")])
    open_and_read(tmp_path / "x.tar")
    index = tmp_path / ".x.tar.feedline-index"
    line, _, payload = index.read_bytes().partition(b"\n")
    for offset, length in [(-1, 1), (0, 1 << 62), (1 << 62, 1), (0, -1), ((1 << 63) - 1, (1 << 63) - 1)]:
        changed = struct.pack("<qqqq", offset, 512, length, 0) + payload[32:]
        header = {**json.loads(line.partition(b" ")[2]), "crc32": zlib.crc32(changed)}
        text = json.dumps(header).encode() + b"\n"
        index.write_bytes(b"%08x " % zlib.crc32(text) + text + changed)
        with pytest.raises(feedline.FeedError, match="names bytes beyond the 10240 bytes of the file"):
            open_and_read(tmp_path / "x.tar")


@pytest.mark.parametrize("key", ["../../etc/passwd", "/etc/passwd", "a\0b", "x" * 5000])
def test_a_block_of_any_object_lies_in_the_cache(tmp_path, key):
    place = Path(cached(tmp_path / "cache", key, 10).path)
    assert place.parent.parent == tmp_path / "cache" / "blocks"
    assert place.name.isalnum()


def test_lanes_are_saved_by_their_numbers_alone(tmp_path):
    state = {"step": 1, "position": 1, "lanes": {"../../x": {"a": 1}}, "writers": [0]}
    with pytest.raises(ValueError, match="invalid literal"):
        feedline.save_lanes(state, tmp_path / "lanes")
    assert files_below(tmp_path) == {"lanes"}


# --- regressions of the fuzzer ---


@pytest.mark.parametrize(("lane", "count"), [("", 1 << 62), (None, 1 << 62), (0.0, 1 << 62), (0, 1.5)])
def test_a_lane_without_a_number_is_refused_at_once(tmp_path, lane, count):
    state = {"step": 5, "position": 40, "lane": lane, "count": count, "iterator": {}}  # a scan of all never ends
    (tmp_path / "lane-00000-of-00001.json").write_text(json.dumps(state))
    with pytest.raises(
        ValueError, match=r"lane-00000-of-00001\.json is not a file that save_lanes wrote: it is lane"
    ):
        feedline.load_lanes(tmp_path)


def test_deep_json_is_refused_with_the_name_of_its_file(tmp_path):
    deep = b"[" * 100_000 + b"]" * 100_000
    (tmp_path / "lane-00000-of-00001.json").write_bytes(deep)
    with pytest.raises(ValueError, match=r"lane-00000-of-00001\.json is not a file that save_lanes wrote"):
        feedline.load_lanes(tmp_path)


# --- sizes in a header are checked ---


@pytest.fixture(scope="module")
def bombs(tmp_path_factory):
    """The outcome of reading each bomb, in one process with a memory limit."""
    folder = tmp_path_factory.mktemp("bombs")
    command = [sys.executable, Path(__file__).with_name("bombs.py"), folder]
    done = programs.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return {bomb["bomb"]: bomb for bomb in map(json.loads, done.stdout.splitlines())}


IMAGES = ["a.png", "a.gif", "a.avif"]
NAMES = ["b.npz", "a.tfrecord", "size.tar", "longname.tar", "pax.tar", "paxsize.tar", "sparse.tar",
         "wide.h5", "a.arrow", "zlib.zarr", *IMAGES]  # fmt: skip


@pytest.mark.slow
def test_a_bomb_is_refused_before_it_takes_memory(bombs):
    assert sorted(bombs) == sorted([*NAMES, "a.npz"])
    for name in NAMES:
        assert bombs[name]["bytes"] < 2 << 20
        assert bombs[name]["grown_mib"] < 100, bombs[name]
        assert "Error: " in bombs[name]["found"], bombs[name]
        assert name in bombs[name]["found"] or name in IMAGES, bombs[name]


@pytest.mark.slow
def test_of_a_member_that_expands_only_what_its_header_says_is_read(bombs):
    assert bombs["a.npz"]["found"] == "read"
    assert bombs["a.npz"]["grown_mib"] < 100


def test_a_row_group_that_does_not_fit_into_memory_is_refused(tmp_path, monkeypatch):
    pyarrow.parquet.write_table(pyarrow.table({"x": np.zeros(1000)}), tmp_path / "x.parquet")
    open_and_read(tmp_path / "x.parquet")
    monkeypatch.setattr(table, "memory_bytes", lambda: 7999)
    with pytest.raises(ValueError, match=r"x\.parquet: column 'x' .* takes 8000 bytes, but there are 7999"):
        open_and_read(tmp_path / "x.parquet")


PNG, JPEG = (cv2.imencode(kind, np.zeros((16, 16, 3), np.uint8))[1].tobytes() for kind in (".png", ".jpg"))
JPEG_SIZE = JPEG.index(b"\xff\xc0") + 5


def decode_image(data, orient):
    decode = ImageDecoder(8, "center", False, (0.08, 1.0), (0.75, 4 / 3), orient, None, None)
    decode(data, {"image": np.zeros((8, 8, 3), np.uint8)}, Row(0, 0, 0, 7))


def tiff_with(order, *entries):
    """The header of a TIFF with these (tag, type, count, value)."""
    fields = [struct.pack(order + "HHI", *entry[:3]) + entry[3].ljust(4, b"\0") for entry in entries]
    mark = {"<": b"II*\0", ">": b"MM\0*"}[order]
    return mark + struct.pack(order + "IH", 8, len(entries)) + b"".join(fields)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (PNG[:16] + struct.pack(">II", 20_000, 20_000) + PNG[24:], "20000 × 20000"),
        (PNG[:33] + struct.pack(">I", (1 << 31) - 1) + PNG[37:], "the one at byte 33 has 2147483647"),
        (JPEG[:JPEG_SIZE] + struct.pack(">HH", 20_000, 20_000) + JPEG[JPEG_SIZE + 4 :], "20000 × 20000"),
        (b"RIFF" + bytes(4) + b"WEBPVP8X" + bytes(8) + b"\xff\xff\0" * 2, "65536 × 65536"),
        (b"GIF87a" + struct.pack("<HH", 65_535, 4_097), "4097 × 65535; shrink it"),
        (b"BM" + bytes(12) + struct.pack("<Iii", 40, 20_000, -20_000), "20000 × 20000"),
        (b"BM" + bytes(12) + struct.pack("<IHH", 12, 65_535, 65_535), "65535 × 65535"),
        (b"BM" + bytes(12), "must be a whole JPEG.* begins with b'BM"),
        (tiff_with("<", (256, 3, 1, b"\xff\xff"), (257, 3, 1, b"\xff\xff")), "65535 × 65535"),
        (tiff_with(">", (257, 4, 1, b"\0\1\0\0"), (256, 4, 1, b"\0\1\0\0")), "65536 × 65536"),
        (tiff_with("<", (322, 4, 1, b"\0\0\1"), (323, 4, 1, b"\0\0\1")), "65536 × 65536"),
        (tiff_with("<", (256, 3, 1, b"\xff\xff"), (257, 3, 1, b"\1"), (257, 3, 1, b"\xff\xff")), "65535 × 65535"),
        (tiff_with("<", (256, 16, 1, b"\1")), "must be one SHORT or LONG, and tag 256 has 1 of type 16"),
        (tiff_with("<", (256, 3, 2, b"\1\0\1")), "tag 256 has 2 of type 3"),
        (tiff_with("<", (256, 3, 1, b"\1"))[:-5], "must be a whole JPEG"),
        (b"P5\n# made by\r\n20000\n#\n 20000 255\n", "20000 × 20000"),
        (b"P5 #\r1 1\n20000 20000 255\n", "must be a whole JPEG"),
        (b"P5\n#ftyp\n20000 20000 255\n", "20000 × 20000"),  # ftyp at byte 4, as AVIF has it
        (b"BM\0\0ftyp" + bytes(6) + struct.pack("<Iii", 40, 20_000, 20_000), "20000 × 20000"),
        (b"\xff\x4f\xff\x51", "must be a whole JPEG"),  # JPEG 2000
        (b"#?RADIANCE\n\n-Y 1 +X 1\n", "must be a whole JPEG"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("orient", [False, True])
def test_an_image_of_any_format_is_refused_by_its_header(data, message, orient):
    with pytest.raises(ValueError, match=message):
        decode_image(data, orient)


def progressive(scans):
    """A JPEG with this number of scans: its last scan is repeated."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "jpeg", progressive=True, comment=b"\xff\xda" * 100)
    data = file.getvalue()
    first = data.index(b"\xff\xda", data.index(b"\xff\xc2"))
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * (scans - data[first:].count(b"\xff\xda")) + b"\xff\xd9" + b"\xff\xda" * 100


@pytest.mark.parametrize("orient", [False, True])
def test_a_jpeg_of_very_many_scans_is_refused(orient):
    check_image(progressive(64))  # marks of scans in a comment or after the image do not count
    decode_image(progressive(10), orient)
    with pytest.raises(
        ValueError, match=r"a JPEG may have at most 64 scans, .* this one has more; .*jpegtran -optimize"
    ):
        decode_image(progressive(65), orient)


# --- ports ---

LISTENING = """
import socket, sys, urllib.request
import numpy as np
import psutil
import feedline
import jax
from feedline._src.listen.prometheus import serve
from jax.sharding import NamedSharding, PartitionSpec as P

def listening():
    here = psutil.Process()
    for process in (here, *here.children(recursive=True)):
        for each in process.net_connections():
            if each.status == psutil.CONN_LISTEN or (each.type == socket.SOCK_DGRAM and not each.raddr):
                yield each.laddr.ip

if __name__ == "__main__":
    feedline.cluster.initialize()
    path = f"{sys.argv[1]}/{jax.process_index()}.npy"
    np.save(path, np.arange(64, dtype=np.int32))
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    sharding = NamedSharding(mesh, P("data"))
    source = feedline.open_source(path)
    with feedline.Feed(source, 8, sharding, reading=feedline.Reading(workers=1)) as feed:
        with serve(feed, port=0) as server:
            jax.jit(lambda x: x.sum())(next(feed)).block_until_ready()  # Gloo writes to stdout while it connects
            urllib.request.urlopen(server.url).read()
            told = ["listens", str(jax.process_index()), *sorted(set(listening()))]
            print("\\n" + "|".join(told) + "\\n", end="", flush=True)  # in one write
"""


@pytest.mark.slow
def test_a_run_on_one_machine_listens_on_the_loopback_address_only(tmp_path):
    (tmp_path / "run.py").write_text(LISTENING)
    done = launched(sys.executable, tmp_path / "run.py", tmp_path)
    told = [line.partition("listens|")[2].split("|") for line in done.stdout.splitlines() if "listens|" in line]
    assert sorted(process for process, *_ in told) == ["0", "1"], done
    found = {process: addresses for process, *addresses in told}
    assert found["0"], told  # the addresses of the coordinator and of the metrics
    assert found["1"], told
    assert {address for each in found.values() for address in each} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
