"""Versions of objects: strong ETags and dates of an earlier minute; objects with neither are refused."""

import email.utils
import pickle
import time

import numpy as np
import pytest
from stored import ROWS, npy

import feedline


def date(age_s):
    return ("Last-Modified", email.utils.formatdate(time.time() - age_s, usegmt=True))


def of_date_and_size(age_s):
    """Headers as nginx sends them: the ETag consists of date and size."""

    def headers(data):
        at = int(time.time() - age_s)
        return [("ETag", f'"{at:x}-{len(data):x}"'), ("Last-Modified", email.utils.formatdate(at, usegmt=True))]

    return headers


@pytest.mark.parametrize(
    "validators",
    [lambda data: [], lambda data: [("ETag", 'W/"weak"')], lambda data: [date(0)], of_date_and_size(0)],
    ids=["no version", "a weak ETag", "a date of this minute", "an ETag of date and size"],
)
def test_an_object_without_a_strong_version_is_refused(store, options, bucket, validators):
    store.validators = validators
    store.objects["/x.npy"] = npy(ROWS[:10])
    bucket.objects["/corpus/x/1"] = b"1"
    for address in (f"{store.url}/x.npy", "s3://corpus/x/"):
        with pytest.raises(feedline.FeedError, match=r"must have a version, .*wait a minute and open it again"):
            feedline.open_source(address, store=options)


@pytest.mark.parametrize(
    "validators",
    [lambda data: [date(90)], lambda data: [("ETag", 'W/"weak"'), date(90)], of_date_and_size(90)],
    ids=["a date", "a weak ETag and a date", "an ETag of date and size"],
)
def test_a_date_of_an_earlier_minute_is_a_version(store, options, validators):
    """The date tells versions apart: whatever is written later has a later date."""
    store.objects["/x.npy"] = npy(ROWS[:10])
    sent = validators(store.objects["/x.npy"])  # made once: a second later, "90 s ago" would be another date
    store.validators = lambda data: sent
    source = feedline.open_source(f"{store.url}/x.npy", store=options)
    np.testing.assert_array_equal(source[3], ROWS[3])
    store.requests.clear()
    source = feedline.open_source(f"{store.url}/x.npy", store=options)
    np.testing.assert_array_equal(source[3], ROWS[3])
    assert [method for method, *_ in store.requests] == ["HEAD"]
    pickled = pickle.dumps(source)
    newer = [date(70)]
    store.validators = lambda data: newer
    store.objects["/x.npy"] = npy(ROWS[10:20])
    with pytest.raises(feedline.FeedError, match="a file must not change"):
        pickle.loads(pickled)
    np.testing.assert_array_equal(feedline.open_source(f"{store.url}/x.npy", store=options)[3], ROWS[13])
