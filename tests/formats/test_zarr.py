"""Zarr arrays and groups of versions 2 and 3, which TensorStore wrote, on a local disk and in a store."""

import json
import pickle
import shutil

import numpy as np
import pytest
from rows_read import read_rows
from written_formats import write_zarr as write

import feedline
from feedline._src.errors import FeedError, RowError

ROWS = np.arange(1, 161, dtype=np.int32).reshape(40, 4)
IMAGES = np.random.default_rng(5).integers(1, 255, (200, 30, 20), np.uint8)
LABELS = np.arange(1, 201)
METADATA = {2: ".zarray", 3: "zarr.json"}
CHUNKS = {2: "{}.0", 3: "c/{}/0"}
GROUPS = {2: (".zgroup", {"zarr_format": 2}), 3: ("zarr.json", {"zarr_format": 3, "node_type": "group"})}


def shards(inner, **configuration):
    inner_codecs = [{"name": "bytes"}, {"name": "zstd"}]
    index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    given = {"chunk_shape": list(inner), "codecs": inner_codecs, "index_codecs": index, **configuration}
    return {"codecs": [{"name": "sharding_indexed", "configuration": given}]}


GZIP = {"codecs": [{"name": "bytes"}, {"name": "gzip", "configuration": {"level": 1}}]}
INNER = (16, 16, 20)
FORMS = {
    "v2": (2, (200, 30, 20), {}),
    "v2 zlib": (2, INNER, {"compressor": {"id": "zlib", "level": 1}}),
    "v2 with slashes": (2, (7, 30, 20), {"dimension_separator": "/"}),
    "v3": (3, (1000, 30, 20), {}),
    "v3 gzip": (3, INNER, GZIP),
    "v3 with dots": (3, (16, 30, 20), {"chunk_key_encoding": {"name": "v2"}}),
    "shards": (3, (64, 32, 40), shards(INNER)),
    "shards, index first": (3, (64, 32, 40), shards(INNER, index_location="start")),
    "shards in shards": (3, (64, 32, 40), shards((32, 32, 40), **shards(INNER))),
}
"""{name: (version, shape of a chunk or shard, metadata)}"""


def group(path, version=3, **arrays):
    """Write a group of arrays. A dict of arrays becomes a group within it."""
    path.mkdir()
    for name, rows in arrays.items():
        group(path / name, version, **rows) if isinstance(rows, dict) else write(path / name, rows, version)
    file, content = GROUPS[version]
    (path / file).write_text(json.dumps(content))
    return path


def edit(path, version, **changes):
    file = path / METADATA[version]
    metadata = json.loads(file.read_text())
    if version == 3 and "chunks" in changes:
        metadata["chunk_grid"]["configuration"]["chunk_shape"] = changes.pop("chunks")
    file.write_text(json.dumps(metadata | changes))
    return path


def put(store, folder, at=""):
    for path in folder.rglob("*"):
        if path.is_file():
            store.objects[f"{at}/{path.relative_to(folder.parent)}"] = path.read_bytes()
    return f"{store.url}{at}/{folder.name}"


# --- arrays and groups ---


@pytest.mark.parametrize("form", FORMS)
def test_rows_and_identity_are_the_same_here_and_in_a_store(form, store, options, tmp_path, is_source_of):
    version, chunks, metadata = FORMS[form]
    write(tmp_path / "x.zarr", IMAGES, version, chunks, metadata)
    local = feedline.open_source(tmp_path / "x.zarr")
    is_source_of(local, IMAGES)
    assert local._tables[0].lengths[0][0] == (INNER[0] if "shards" in form else min(200, chunks[0]))
    remote = feedline.open_source(put(store, tmp_path / "x.zarr"), store=options)
    assert (len(remote), remote.identity) == (200, local.identity)
    rows = np.random.default_rng(6).permutation(200)[:90]
    for source in (remote, pickle.loads(pickle.dumps(remote))):
        assert source.will_read(rows, 0)
        np.testing.assert_array_equal(read_rows(source, rows), IMAGES[rows])
    gets = [request for request in store.requests if request[0] == "GET"]
    assert len(gets) == len(set(gets))  # the sources share a cache, so nothing is fetched twice


@pytest.mark.parametrize("version", METADATA)
def test_groups_are_dicts_and_follow_each_other(tmp_path, is_source_of, version):
    for name, part in (("a", slice(0, 37)), ("b", slice(37, 200))):
        group(tmp_path / name, version, image=IMAGES[part], more={"label": LABELS[part]})
        (tmp_path / name).rename(tmp_path / f"{name}.zarr")
    expected = {"image": IMAGES, "more": {"label": LABELS}}
    is_source_of(feedline.open_source(tmp_path / "*.zarr"), expected)
    is_source_of(
        feedline.open_source(tmp_path / "*.zarr", columns=["more"], cache_bytes=0), {"more": expected["more"]}
    )
    (tmp_path / "b.zarr").rename(tmp_path / "no suffix")
    assert feedline.open_source(tmp_path / "no suffix")[-1]["more"]["label"] == 200


def test_groups_in_a_store(bucket, options, tmp_path):
    web = put(bucket, group(tmp_path / "g.zarr", x=IMAGES, y=LABELS), "/corpus")
    local = feedline.open_source(tmp_path / "g.zarr")
    for end in ("", "/"):
        remote = feedline.open_source(f"s3://corpus/g.zarr{end}", store=options)
        assert remote.identity == local.identity
        np.testing.assert_array_equal(read_rows(remote, [199, 0])["x"], IMAGES[[199, 0]])
    assert sorted(feedline.open_source("s3://corpus/g.zarr", columns=["y"], store=options).spec) == ["y"]
    for address in ("s3://corpus/g.zarr/y", f"{web}/y"):  # without a suffix
        assert int(feedline.open_source(address, store=options)[7]) == 8
    with pytest.raises(ValueError, match=r"a web server does not list the arrays of a Zarr group.*own address"):
        feedline.open_source(web, store=options)


@pytest.mark.parametrize("version", METADATA)
def test_a_group_with_coordinates_names_the_arrays_that_belong_together(tmp_path, is_source_of, version):
    arrays = {"lat": np.ones(5), "lon": np.ones(6), "time": np.arange(1.0, 41), "wind": np.ones((40, 5, 6))}
    path = group(tmp_path / "weather.zarr", version, **arrays, crs=np.array(1))
    with pytest.raises(TypeError, match=r"zarr/crs: an array needs a first axis .*; leave it out with columns="):
        feedline.open_source(path)
    match = r"5 rows: \S*/lat; 6 rows: \S*/lon; 40 rows: \S*/time, \S*/wind; choose those that belong together"
    with pytest.raises(ValueError, match=match):
        feedline.open_source(path, columns=list(arrays))
    chosen = {name: arrays[name] for name in ("time", "wind")}
    is_source_of(feedline.open_source(path, columns=["time", "wind"]), chosen)


@pytest.mark.parametrize("version", METADATA)
def test_an_array_of_very_many_chunks_is_opened_at_once(tmp_path, version):
    path = edit(write(tmp_path / "x.zarr", ROWS, version=version), version, shape=[2**24, 4])
    source = feedline.open_source(path)
    assert len(source) == 2**24
    np.testing.assert_array_equal(read_rows(source, [39, 0]), ROWS[[39, 0]])
    with pytest.raises(RowError, match="every chunk must be present") as error:
        read_rows(source, [2**24 - 1])
    assert error.value.row == (2**24 - 1) // 10 * 10
    with pytest.raises(
        ValueError, match=r"x\.zarr: the index of its groups of rows must fit into memory, and takes"
    ):
        feedline.open_source(edit(path, version, shape=[2**40, 4]))


# --- missing chunks ---


@pytest.mark.parametrize("version", METADATA)
def test_rows_of_a_missing_or_damaged_chunk_are_bad_rows(tmp_path, version, sharding):
    """Also if the fingerprint samples this chunk."""
    for damage, match in (
        (lambda chunk: chunk.unlink(), r'every chunk must be present, .* missing.*missing_chunks="fill"'),
        (lambda chunk: chunk.write_bytes(chunk.read_bytes()[:9]), "could not be read"),
    ):
        path = write(tmp_path / f"{match[:5]}.zarr", ROWS, version=version)
        damage(path / CHUNKS[version].format(2))
        for source in (feedline.open_source(path), pickle.loads(pickle.dumps(feedline.open_source(path)))):
            np.testing.assert_array_equal(read_rows(source, [19, 30]), ROWS[[19, 30]])
            with pytest.raises(RowError, match=match) as error:
                read_rows(source, [5, 25])
            assert (error.value.row, error.value.file) == (20, str(path))
        reading = feedline.Reading(bad_rows="substitute", bad_rows_budget=100)
        with feedline.Feed(source, 8, sharding, epochs=1, reading=reading) as feed:
            seen = np.concatenate(list(feed))
            assert feed.statistics().bad_rows == 10
        assert {*seen[:, 0].tolist()} <= {*np.delete(ROWS, np.s_[20:30], 0)[:, 0].tolist()}


def test_without_a_fill_value_nothing_is_filled(tmp_path):
    path = write(tmp_path / "x.zarr", ROWS, version=2)  # TensorStore writes a fill value of null
    (path / "2.0").unlink()
    with pytest.raises(RowError, match="every chunk must be present"):
        read_rows(feedline.open_source(path, missing_chunks="fill"), [25])


def test_a_missing_inner_chunk_of_a_shard_is_an_error(tmp_path):
    rows = ROWS.copy()
    rows[5:10] = 0  # the fill value: TensorStore leaves such chunks out
    path = write(tmp_path / "x.zarr", rows, 3, (20, 4), shards((5, 4)))
    with pytest.raises(RowError, match=r"chunk .* is missing"):
        read_rows(feedline.open_source(path), [7])
    source = feedline.open_source(path, missing_chunks="fill")
    np.testing.assert_array_equal(read_rows(source, [7, 39]), rows[[7, 39]])
    (path / "c/1/0").unlink()
    with pytest.raises(RowError, match=r"chunk .* is missing") as error:
        read_rows(feedline.open_source(path), [3, 37])
    assert error.value.row == 35


@pytest.mark.parametrize("form", ["v2 zlib", "v3 gzip", "shards"])
def test_a_missing_chunk_in_a_store_is_a_bad_row_or_has_the_fill_value(form, store, options, tmp_path):
    version, chunks, metadata = FORMS[form]
    write(tmp_path / "x.zarr", IMAGES, version, chunks, metadata, only=slice(0, 128), fill=7)
    address = put(store, tmp_path / "x.zarr")
    source = feedline.open_source(address, store=options)
    np.testing.assert_array_equal(source[127], IMAGES[127])
    with pytest.raises(RowError, match=r"every chunk must be present, and one is not.*missing_chunks="):
        source[199]
    filled = feedline.open_source(address, missing_chunks="fill", store=options)
    assert filled.identity == feedline.open_source(tmp_path / "x.zarr", missing_chunks="fill").identity
    assert filled.will_read(np.arange(200), 0)
    assert (filled[199] == 7).all()
    np.testing.assert_array_equal(filled[127], IMAGES[127])


@pytest.mark.parametrize("form", ["v3", "shards"])
@pytest.mark.parametrize("fault", [403, 503, "gone"])
def test_trouble_of_the_store_is_no_missing_chunk(fault, form, store, tmp_path):
    version, _, metadata = FORMS[form]
    write(tmp_path / "x.zarr", IMAGES, version, (64, 32, 40), metadata, fill=7)
    options = feedline.Store(cache=tmp_path / "cache", patience_s=0.2)
    address = put(store, tmp_path / "x.zarr")
    source = feedline.open_source(address, missing_chunks="fill", store=options)
    objects = dict(store.objects)
    if fault == "gone":
        store.objects.clear()
    else:
        store.fault = lambda *request: fault
    with pytest.raises(FeedError) as caught:
        source[100]
    assert not isinstance(caught.value, RowError)
    store.objects |= objects
    store.fault = lambda *request: None
    np.testing.assert_array_equal(source[100], IMAGES[100])


# --- changes ---


@pytest.mark.parametrize("missing", ["error", "fill"])
@pytest.mark.parametrize("version", METADATA)
def test_a_folder_that_is_deleted_while_it_is_read_ends_the_feed(tmp_path, sharding, version, missing):
    rows = np.ones((4000, 4), np.int32)
    path = edit(write(tmp_path / "x.zarr", rows, version), version, fill_value=0)
    source = feedline.open_source(path, missing_chunks=missing, cache_bytes=0)
    reading = feedline.Reading(bad_rows="substitute", bad_rows_budget=10**6, threads=1)
    with feedline.Feed(source, 8, sharding, reading=reading) as feed:
        assert np.asarray(next(feed)).all()
        if missing == "error":
            (path / METADATA[version]).unlink()  # first: as long as it is there, lost chunks are bad rows
            shutil.rmtree(path)
        else:  # in one step: while chunks go one by one, each might as well never have been written
            path.rename(tmp_path / "elsewhere")
        with pytest.raises(FeedError, match=r"it cannot be found any more .* since the source was open") as error:
            assert all(np.asarray(batch).all() for batch in feed)
        assert not isinstance(error.value, RowError)
        assert error.value.file == str(path / METADATA[version])


def test_other_processes_see_that_chunks_changed_where_the_identity_samples_them(tmp_path, store, options):
    path = write(tmp_path / "x.zarr", ROWS)
    address = put(store, path)
    local, remote = feedline.open_source(path), feedline.open_source(address, store=options)
    assert local.identity == remote.identity == pickle.loads(pickle.dumps(remote)).identity
    sent = [pickle.dumps(source) for source in (local, remote)]
    shutil.copyfile(path / "c/1/0", path / "c/0/0")
    put(store, path)
    for source in sent:
        with pytest.raises(FeedError, match=r"chunks of an array must not change .* differ now\. .*x\.zarr"):
            pickle.loads(source)
    store.objects["/x.zarr/zarr.json"] += b" "
    with pytest.raises(FeedError, match="must not change while a feed reads it"):
        pickle.loads(sent[1])


# --- damage ---


def test_damage_in_a_store(store, options, tmp_path):
    address = put(store, write(tmp_path / "x.zarr", IMAGES, 3, (64, 32, 40), shards(INNER)))
    shard = store.objects["/x.zarr/c/0/0/0"]
    for data in (shard[:-5], shard[:-1] + bytes([shard[-1] ^ 1]), b"\0" * 50 + shard[50:], b""):
        store.objects["/x.zarr/c/0/0/0"] = data
        source = feedline.open_source(address, store=options)
        with pytest.raises(RowError, match="could not be read"):
            source[0]
        np.testing.assert_array_equal(source[199], IMAGES[199])
    wide = json.loads(store.objects["/x.zarr/zarr.json"]) | {"shape": [200, 32 * 8193, 20]}
    store.objects["/x.zarr/zarr.json"] = json.dumps(wide).encode()
    with pytest.raises(ValueError, match=r"at most 8,192 files, and has 8,193; write it again with larger chunks"):
        feedline.open_source(address, store=options)
    for data in (b"{", b"[]", b'{"zarr_format": 3, "node_type": "array"}'):
        store.objects["/x.zarr/zarr.json"] = data
        with pytest.raises(ValueError, match=r"x\.zarr.* cannot be read as"):
            feedline.open_source(address, store=options)


@pytest.mark.parametrize("version", METADATA)
def test_invalid_metadata_are_refused(tmp_path, version):
    for number, (changes, match) in enumerate(
        [
            ({"shape": [40, 2**40]}, r"a row of its chunks must fit into memory, and takes \d+ bytes"),
            ({"chunks": [10, 2**40]}, r"a row of its chunks must fit into memory, and takes \d+ bytes"),
            ({"chunks": [2**40, 4]}, r"a row of its chunks must fit into memory, and takes \d+ bytes"),
            *(({"chunks": chunks}, r"x\.zarr") for chunks in ([10, 2**58], [0, 4], [10])),
            *(({"shape": shape}, r"x\.zarr") for shape in ([40, 2**60], [-3, 4], [40, 4.5], "x")),
        ]
    ):
        path = edit(write(tmp_path / f"{number}x.zarr", ROWS, version=version), version, **changes)
        with pytest.raises(ValueError, match=match):
            feedline.open_source(path)
