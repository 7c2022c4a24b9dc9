"""Objects that are replaced by others of the same size, in stores that may give no strong version."""

import email.utils
import pickle
import time

import numpy as np
import pytest
from stored import ROWS, array_record, npy, tar

import feedline

OTHER = ROWS[::-1]


def date(age_s):
    return email.utils.formatdate(time.time() - age_s, usegmt=True)


def of_date_and_size():
    """As nginx makes its ETags."""
    written = int(time.time())
    headers = ("Last-Modified", email.utils.formatdate(written, usegmt=True))
    return lambda data: [("ETag", f'"{written:x}-{len(data):x}"'), headers]


def the_same(*headers):
    return lambda data: headers


WEAK = {
    "neither ETag nor date": lambda: the_same(),
    "a weak ETag": lambda: the_same(("ETag", 'W/"same"'), ("Last-Modified", date(1e7))),
    "two writes in one second": lambda: the_same(("Last-Modified", date(0))),
    "an ETag of date and size": of_date_and_size,
}


@pytest.fixture(params=WEAK)
def weak(request, store):
    store.validators = WEAK[request.param]()
    return store


@pytest.fixture
def unversioned(store):
    store.validators = the_same()
    return store


def opened(store, options, name="x.npy", **arguments):
    return feedline.open_source(f"{store.url}/{name}", store=options, **arguments)


def all_rows(source):
    out = np.empty((len(source), *source.spec.shape), source.spec.dtype)
    source.read(np.arange(len(source)), out)
    return out


REPLACED = r"an object must not change while a feed reads it, and its sampled bytes differ"


def test_a_running_source_reads_no_row_of_an_object_that_replaced_its_own(weak, options):
    weak.objects["/x.npy"] = npy(ROWS)
    source = opened(weak, options)
    np.testing.assert_array_equal(source[0], ROWS[0])
    weak.objects["/x.npy"] = npy(OTHER)
    np.testing.assert_array_equal(source[1], ROWS[1])  # its block is here
    for _ in range(2):
        with pytest.raises(feedline.FeedError, match=REPLACED) as caught:
            source[4999]
        assert caught.value.file == f"{weak.url}/x.npy"
    np.testing.assert_array_equal(source[0], ROWS[0])


def test_an_object_that_stays_as_it_is_is_read_without_a_version_and_each_block_once(weak, options):
    weak.objects["/x.npy"] = npy(ROWS)
    source = opened(weak, options)
    np.testing.assert_array_equal(all_rows(source), ROWS)
    weak.requests.clear()
    np.testing.assert_array_equal(all_rows(source), ROWS)
    assert weak.requests == []


def test_a_later_source_reads_the_present_object_and_not_the_cache(weak, options):
    weak.objects["/x.npy"] = npy(ROWS)
    before = opened(weak, options)
    known = before.identity
    np.testing.assert_array_equal(all_rows(before), ROWS)
    weak.objects["/x.npy"] = npy(OTHER)
    after = opened(weak, options)
    assert after.identity != known
    np.testing.assert_array_equal(all_rows(after), OTHER)


def test_another_process_refuses_an_object_that_was_replaced_meanwhile(weak, options):
    weak.objects["/x.npy"] = npy(ROWS)
    pickled = pickle.dumps(opened(weak, options))
    np.testing.assert_array_equal(pickle.loads(pickled)[7], ROWS[7])
    weak.objects["/x.npy"] = npy(OTHER)
    with pytest.raises(feedline.FeedError, match=REPLACED):
        pickle.loads(pickled)


def test_a_date_of_an_earlier_minute_is_a_version(store, options):
    """Whatever is written later has a later date."""
    store.validators = the_same(("Last-Modified", date(90)))
    store.objects["/x.npy"] = npy(ROWS)
    np.testing.assert_array_equal(all_rows(opened(store, options)), ROWS)
    store.requests.clear()
    source = opened(store, options)
    np.testing.assert_array_equal(all_rows(source), ROWS)
    assert [method for method, *_ in store.requests] == ["HEAD"]
    again = pickle.dumps(source)
    store.validators = the_same(("Last-Modified", date(0)))
    store.objects["/x.npy"] = npy(OTHER)
    with pytest.raises(feedline.FeedError, match="an object must not change"):
        pickle.loads(again)
    np.testing.assert_array_equal(all_rows(opened(store, options)), OTHER)


def test_the_index_of_records_is_that_of_the_present_object(unversioned, options):
    """Both archives have one size, and equal bytes wherever a digest samples them."""
    data = [bytes(40_000)] * 100
    lengths = [(20_000, 60_000), (60_000, 20_000)]
    first, second = (tar([*data, bytes(a), bytes(b), *data]) for a, b in lengths)
    assert len(first) == len(second)
    unversioned.objects["/x.tar"] = first
    before = opened(unversioned, options, "x.tar")
    unversioned.objects["/x.tar"] = second
    after = opened(unversioned, options, "x.tar")
    for source, expected in ((before, lengths[0]), (after, lengths[1])):
        assert [len(record["bin"]) for record in source.records(np.array([100, 101]))] == list(expected)
    for _ in range(3):  # the same objects leave no more indices
        assert len(opened(unversioned, options, "x.tar")) == len(after)
    assert len(list((options.cache / "index").iterdir())) == 2
    again = pickle.loads(pickle.dumps(after))
    assert [len(record["bin"]) for record in again.records(np.array([100, 101]))] == list(lengths[1])


@pytest.mark.usefixtures("bucket")
def test_files_of_a_folder_that_were_replaced_end_a_running_source(unversioned, options):
    names = [f"/corpus/train/{i:03}.bin" for i in range(200)]
    for i, name in enumerate(names):
        unversioned.objects[name] = bytes([i]) * 1000
    source = feedline.open_source("s3://corpus/train/", store=options)
    assert source.identity
    assert source.records(np.array([5, 7])) == [bytes([i]) * 1000 for i in (5, 7)]
    pickled = pickle.dumps(source)
    for name in names:
        unversioned.objects[name] = bytes(1000)
    for each in (source, pickle.loads(pickled)):
        with pytest.raises(feedline.FeedError, match=REPLACED):
            each.records(np.array([101, 103]))
    after = feedline.open_source("s3://corpus/train/", store=options)
    assert after.records(np.array([5])) == [bytes(1000)]
    assert after.identity != source.identity


def test_a_file_that_is_fetched_whole_is_fetched_for_each_source(unversioned, options, tmp_path):
    versions = [
        array_record(tmp_path / "x", [row.tobytes() for row in rows]) for rows in (ROWS[:500], OTHER[:500])
    ]
    assert len(set(map(len, versions))) == 1
    unversioned.objects["/x.array_record"] = versions[0]
    before = opened(unversioned, options, "x.array_record")
    assert before[3] == ROWS[3].tobytes()
    pickled = pickle.dumps(before)
    unversioned.objects["/x.array_record"] = versions[1]
    after = opened(unversioned, options, "x.array_record")
    assert after[3] == OTHER[3].tobytes()
    assert before[3] == ROWS[3].tobytes()
    with pytest.raises(feedline.FeedError, match=REPLACED):
        pickle.loads(pickled)


def test_a_store_without_versions_is_named_in_the_log_once(unversioned, options, caplog):
    for name in ("a", "b"):
        unversioned.objects[f"/{name}.npy"] = npy(ROWS[:10])
        opened(unversioned, options, f"{name}.npy")
    (message,) = caplog.messages
    assert message.startswith(f"{unversioned.url} gives no strong ETag")
